# Every target does its own set-up: a fresh clone needs Python 3.11, make and PyPI, nothing else.
# Only relative paths are used, so that a checkout may live under any name.

SHELL := /bin/sh
.DEFAULT_GOAL := help
PY := .venv/bin/python
MODEL ?= examples/smollm2.yaml
SOURCES := operator runtime dashboards bench tests
CRD_FILES := $(addsuffix /crds/stageline.dev_pipelinemodels.yaml,operator/stageline_api charts/stageline/files)
PRINT_REFERENCE := from stageline_api.manifests.field_reference import *; print(render_field_reference(), end="")
BENCH := $(PY) -m stageline_bench.runtime
GPU_PYTHON ?= $(PY)
# Tests wait for processes half of their time.
WORKERS ?= $$(($$(nproc) * 2))
# Without bytecode each worker would compile every test module anew at each run; with several threads each, workers wait
# for one another. Stages set their own number.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BENCH_PAGE := --page docs/dev/benchmarks.md
export PYTHON

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} \
		/^## / {printf "\n%s\n", substr($$0, 4)} \
		/^[a-z][a-z-]*:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

## Use it

.PHONY: setup
setup: ## Make the environment (.venv); does nothing when it is up to date
	@sh scripts/setup

.PHONY: up
up: ## Serve examples/smollm2.yaml on this machine (MODEL=file, ARGS="…" for more)
	@sh scripts/setup $(if $(findstring --cache,$(ARGS)),,"$(MODEL)")
	@.venv/bin/stageline up "$(MODEL)" $(ARGS)

.PHONY: images
images: ## Build the container images with docker, podman or buildah (PARTS="runtime operator gateway"; REGISTRY=…, PUSH=1)
	@sh scripts/images $(PARTS)

## Work on it

.PHONY: test
test: setup ## Run the tests, two files at a time on each core (ARGS="…" go to pytest; ARGS="-n 0" one by one)
	@sh scripts/test-tools
	@$(PYTEST) -m "not thorough and not soak" $(ARGS)

.PHONY: test-thorough
test-thorough: setup ## Run the tests that `make test` leaves out: the rest of the kill matrix, long chaos, more models compiled
	@$(PYTEST) --hypothesis-profile thorough -m "thorough and not soak" $(ARGS)

.PHONY: test-soak
test-soak: setup ## Run the tests that CI leaves out too: the longest chaos, every length, family and mode of a kind; before a release
	@$(PYTEST) --hypothesis-profile thorough -m soak $(ARGS)

.PHONY: test-cluster
test-cluster: setup ## Run tests/cluster on a real Kubernetes control plane; builds it once with Go (ARGS="…" go to pytest)
	@sh scripts/test-cluster $(ARGS)

.PHONY: test-node
test-node: setup ## Build the images and run them on two real kubelets in namespaces of this machine; takes root, Go and 60 GB (ARGS="…")
	@sh scripts/test-node $(ARGS)

.PHONY: test-vllm
test-vllm: setup ## Serve SmolLM2 by the real vLLM over two stages and kill one; makes .vllm-venv once (ARGS=all for more)
	@sh scripts/test-vllm $(ARGS)

.PHONY: test-clients
test-clients: setup ## Ask a real group by clients that nobody here wrote; makes .clients-venv and .clients-node once (ARGS="…" go to pytest)
	@sh scripts/clients-environment
	@sh scripts/node-clients-environment
	@STAGELINE_CLIENTS_PYTHON="$$PWD/.clients-venv/bin/python" STAGELINE_CLIENTS_NODE="$$PWD/.clients-node" $(PY) -m pytest -n 0 tests/clients $(ARGS)

.PHONY: check
check: check-format check-lint check-types check-layers check-generated ## Everything but the tests

.PHONY: size
size: setup ## Print how much code there is: statements, files, modules with one importer, the median function
	@$(PY) scripts/size

.PHONY: format
format: setup ## Format the code and mend what lint can mend
	$(PY) -m ruff format $(SOURCES)
	$(PY) -m ruff check --fix $(SOURCES)

.PHONY: generate
generate: setup ## Write the generated files anew: the CRD, its field reference, the chart's rules and its table of values, the boards, the pages of commands, metrics and model families
	$(PY) -m stageline_api.manifests.crd
	$(PY) -m stageline_api.manifests.field_reference
	$(PY) -m stageline_operator.controller.client.rbac
	$(PY) -m board_builder
	PYTHONPATH=tests/support $(PY) -m cluster.chart_values_table
	PYTHONPATH=tests/support $(PY) -m cluster.commands_page
	PYTHONPATH=tests/support $(PY) -m boards.metrics_page
	PYTHONPATH=tests/support $(PY) -m oracles.families_page

.PHONY: lock
lock: setup ## Write constraints.txt from what .venv holds
	@sh scripts/lock

.PHONY: clean
clean: ## Remove the environment and every cache (downloaded models stay)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find operator runtime dashboards bench tests -type d -name __pycache__ -prune -exec rm -rf {} +

.PHONY: grafana
grafana: ## A Grafana with the boards, in a container (docker or podman), at http://127.0.0.1:3000 (PROMETHEUS=http://… for another Prometheus)
	@sh scripts/grafana

## Measure it (on a quiet machine)

.PHONY: bench
bench: setup ## The pipeline against its ceiling, and its bubble with paced stages (ARGS="…" go to the former; ARGS=ranks for ranks instead)
	@$(if $(filter ranks,$(ARGS)),$(BENCH) $(ARGS) $(BENCH_PAGE),$(BENCH) paced $(BENCH_PAGE))
	@$(if $(filter ranks,$(ARGS)),,$(BENCH) pipeline $(BENCH_PAGE) $(ARGS))

.PHONY: bench-peers
bench-peers: setup ## Stageline against vLLM on the same prompts; makes .vllm-venv once (ARGS="--vllm-engine" for vLLM under Stageline)
	@$(BENCH) peers $(BENCH_PAGE) $(ARGS)
	@$(if $(findstring --vllm-engine,$(ARGS)),,$(BENCH) serve $(BENCH_PAGE))

.PHONY: bench-laptop
bench-laptop: setup ## Stageline beside llama.cpp on this machine; compiles llama.cpp into .llama-venv once (ARGS="…")
	@$(BENCH) laptop $(BENCH_PAGE) $(ARGS)

.PHONY: bench-speculation
bench-speculation: setup ## What drafts win and cost: paced stages, a draft model, lookup on real layers (ARGS="…" go to the last)
	@$(BENCH) paced-speculation $(BENCH_PAGE)
	@$(BENCH) draft-model $(BENCH_PAGE)
	@$(BENCH) speculation $(BENCH_PAGE) $(ARGS)

.PHONY: bench-speculation-peers
bench-speculation-peers: setup ## Drafts by lookup beside Hugging Face's and vLLM's; makes vLLM's environment once (ARGS="…")
	@$(BENCH) speculation-peers $(BENCH_PAGE) $(ARGS)

.PHONY: bench-gateway
bench-gateway: setup ## What the gateway adds to an answer, and what a core of it relays beside nginx (ARGS="…")
	@$(PY) -m stageline_bench.gateway $(BENCH_PAGE) $(ARGS)

.PHONY: bench-operator
bench-operator: setup ## 500 models on a real control plane, and how soon a killed group is back; needs Go (ARGS="…")
	@PYTHONPATH=tests/support $(PY) -m cluster.operator_scale $(BENCH_PAGE) $(ARGS)

.PHONY: bench-starts
bench-starts: setup ## How soon a group is ready, by phase, and back, by cause, on a laptop and in a cluster; needs Go (ARGS="--only laptop")
	@PYTHONPATH=tests/support $(PY) -m starts.program $(BENCH_PAGE) $(ARGS)

.PHONY: bench-rules
bench-rules: setup ## The shipped rules in a real Prometheus over 500 models: each group under 1 s; 15 minutes (ARGS="--models 50")
	@PYTHONPATH=tests/support $(PY) -m boards.rules_at_scale $(ARGS)

.PHONY: bench-exporters
bench-exporters: setup ## What counting and scrapes cost; fails when it is 1 % of a step or more
	@$(PY) -m stageline_bench.costs.exporter_cost

.PHONY: bench-bounds
bench-bounds: setup ## Check the tests' bounds in seconds of CPU: what attacks cost, and what may not hold others up (ARGS="…" go to pytest)
	@$(PY) -m pytest -n 0 --cpu-bounds $(ARGS)

.PHONY: gpu-check
gpu-check: $(if $(filter $(PY),$(GPU_PYTHON)),setup) ## Show on a GPU what no test on a CPU can, into docs/dev/gpu-check.md; skipped without one (ARGS="--part NCCL")
	@PYTHONPATH=operator:runtime:bench $(GPU_PYTHON) -m stageline_bench.gpu_check $(or $(ARGS),--page docs/dev/gpu-check.md)

.PHONY: game-day
game-day: setup ## Break a model and a cluster and see that the right alerts fire; an hour, needs Go (ARGS="--only node-lost")
	@PYTHONPATH=tests/support $(PY) -m boards.game_day $(ARGS)

.PHONY: soak
soak: setup ## Kill and stop a pipeline's processes under traffic for an hour, then fuzz for long (ARGS="--minutes 30")
	@PYTHONPATH=tests/support $(PY) -m chaos.soak $(ARGS)

## The parts of make check

.PHONY: check-format
check-format: setup ## Is the code formatted?
	@$(PY) -m ruff format --check $(SOURCES)

.PHONY: check-lint
check-lint: setup ## Does ruff find anything?
	@$(PY) -m ruff check $(SOURCES)

.PHONY: check-types
check-types: setup ## Do the types agree, strictly?
	@$(PY) -m mypy

.PHONY: check-layers
check-layers: setup ## Do imports only go down?
	@.venv/bin/lint-imports

.PHONY: check-generated
check-generated: setup ## Are the generated files what the code generates?
	@stale() { echo "$$1 is out of date: run make generate" >&2; exit 1; }; \
	for file in $(CRD_FILES); do .venv/bin/stageline crd | diff -u "$$file" - || stale "$$file"; done; \
	$(PY) -c '$(PRINT_REFERENCE)' | diff -u docs/pipelinemodel.md - || stale docs/pipelinemodel.md; \
	$(PY) -m board_builder --check
