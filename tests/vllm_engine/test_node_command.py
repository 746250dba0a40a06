"""What a vLLM node is started with, as a function of the pod contract: words, environment, addresses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.fake_vllm.arguments import read_arguments
from stageline_api import ports
from stageline_api.resource.pods.vllm_environment import OWNED_VARIABLES
from stageline_api.resource.serving import vllm_arguments
from stageline_api.runtime_config import LoraAdapter, RuntimeConfig, Timeouts
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.messages import Welcome
from stageline_vllm.addresses import http_host, http_url, network_interface, rendezvous_port
from stageline_vllm.server_key import server_key
from stageline_vllm.supervisor.vllm_command import node_environment, node_words
from stageline_vllm.worker_state import DIRECTORY_VARIABLE

WELCOME = Welcome(
    first_layer=0, last_layer=1, model_dir="/cache/model", dtype="bfloat16", num_cohorts=2, num_slots=16,
    slot_tokens=2048, max_step_tokens=512, stages_on_host=1, layer_counts=(16, 14),
)  # fmt: skip


def contract(stage: int = 0, stage_count: int = 2, pod_ip: str = "10.0.0.7", **config: Any) -> PodContract:
    resolved = RuntimeConfig(
        model_name="m", namespace="lab", served_name="tiny", source="file:///m", cache_dir="/c",
        stage_count=stage_count, engine_name="vllm", **config,
    )  # fmt: skip
    return PodContract(
        config=resolved, stage=stage, stage_count=stage_count, group=0, incarnation=3, pod_ip=pod_ip,
        master_addr="m-0-3-0.m-stages.lab.svc", master_port=29500, bus_token="secret",
    )  # fmt: skip


def environment(of: PodContract, welcome: Welcome = WELCOME, cores: tuple[int, ...] = (0, 1), **given: str) -> Any:
    paths = (Path("/scratch/path"),)
    scratch = Path("/scratch")
    return node_environment(
        of, welcome, given, state_dir=scratch / "s", scratch=scratch, python_path=paths, cores=cores, num_memories=2
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_nodes_differ_by_rank_and_by_who_has_the_server(stage: int) -> None:
    words = node_words(contract(stage), WELCOME, {})
    assert words[:4] == ("-m", "vllm.entrypoints.cli.main", "serve", "/cache/model")
    read = read_arguments(words[3:])
    assert (read.nnodes, read.node_rank, read.pipeline_parallel_size) == (2, stage, 2)
    assert (read.master_addr, read.master_port) == ("m-0-3-0.m-stages.lab.svc", 29500)
    assert read.headless is (stage == 1)
    assert (read.host, read.port) == (("127.0.0.1", ports.VLLM_HTTP) if stage == 0 else (None, 8000))
    assert (read.max_model_len, read.max_num_seqs, read.dtype) == (2048, 16, "bfloat16")
    assert read.enable_scale_out
    assert read.middleware == (["stageline_vllm.plugin.asks_for_key.AsksForKey"] if stage == 0 else [])


def test_what_a_person_added_comes_last_and_adapters_are_served_names() -> None:
    adapters = (LoraAdapter(name="a", path="/a"), LoraAdapter(name="b", path="/b"))
    words = node_words(contract(extra_args=("--quantization", "fp8"), lora_adapters=adapters), WELCOME, {})
    assert words[-2:] == ("--quantization", "fp8")
    assert read_arguments(words[3:]).adapters == {"a": "/a", "b": "/b"}


def test_cohorts_are_even_unless_there_is_one_stage_or_a_comparison_asks() -> None:
    assert "--scheduler-cls" in node_words(contract(), WELCOME, {})
    assert "--scheduler-cls" not in node_words(contract(), WELCOME, {"STAGELINE_VLLM_EVEN_COHORTS": "0"})
    assert "--scheduler-cls" not in node_words(contract(stage_count=1), WELCOME, {})


def test_every_word_of_ours_is_one_that_a_person_may_not_give() -> None:
    """An argument that we pass and a person may pass too would be given twice, and the later one would win."""
    ours = {word for word in node_words(contract(lora_adapters=(LoraAdapter(name="a", path="/a"),)), WELCOME, {})
            if word.startswith("--")}  # fmt: skip
    allowed = {word for word in ours if vllm_arguments.argument_problem(word) is None}
    assert allowed == set()


def test_the_environment_names_the_cut_the_address_and_no_secret() -> None:
    found = environment(contract(timeouts=Timeouts(step_seconds=40)), STAGELINE_BUS_TOKEN="secret", HF_TOKEN="secret")
    assert found["VLLM_PP_LAYER_PARTITION"] == "16,14"
    assert found["VLLM_HOST_IP"] == "10.0.0.7"
    assert int(found["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) > 40, "the watchdog names who hangs, and goes first"
    assert "GLOO_SOCKET_IFNAME" not in found
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found, "alone on its machine it has all of it"
    assert "secret" not in found.values()


def test_the_node_with_the_server_has_a_key_of_its_incarnation_alone() -> None:
    lives = [contract(), replace(contract(), group=1), replace(contract(), incarnation=4)]
    keys = [environment(life)["VLLM_API_KEY"] for life in lives]
    assert keys == [server_key("secret", life.group, life.incarnation) for life in lives]
    assert len({*keys, server_key("another secret", 0, 3)}) == 4
    assert min(map(len, keys)) == 64
    assert "VLLM_API_KEY" not in environment(contract(stage=1))
    assert not any(keys[0] in word for word in node_words(contract(), WELCOME, {}))


def test_defaults_give_way_to_the_pods_environment_and_what_decides_the_group_does_not() -> None:
    found = environment(contract(), VLLM_CACHE_ROOT="/mine", VLLM_HOST_IP="1.2.3.4", PYTHONPATH="/theirs")
    assert found["VLLM_CACHE_ROOT"] == "/mine"
    assert found["VLLM_HOST_IP"] == "10.0.0.7"
    assert found["PYTHONPATH"] == "/scratch/path:/theirs"


def test_what_a_person_may_not_set_no_image_sets_either() -> None:
    """`VLLM_API_KEY` of an image would shut the engine out, `FORCE_COLOR` put colours round the words of a failure."""
    given: Any = dict.fromkeys(OWNED_VARIABLES, "theirs")
    found = environment(contract(), **given)
    assert [name for name, value in found.items() if value == "theirs"] == []


def test_every_variable_of_ours_is_one_that_a_person_may_not_set() -> None:
    """It would be overruled without a word. `PYTHONPATH` is kept behind ours."""
    defaults: Any = dict.fromkeys(environment(contract()), "theirs")
    overruled = {name for name, value in environment(contract(), **defaults).items() if value != "theirs"}
    assert overruled - OWNED_VARIABLES.keys() == {"PYTHONPATH", DIRECTORY_VARIABLE}


def test_vllms_own_limit_for_loading_is_no_shorter_than_the_models() -> None:
    """Its default of ten minutes would end what `timeouts.loadSeconds` allows."""
    found = environment(contract(timeouts=Timeouts(load_seconds=1800)))
    assert int(found["VLLM_ENGINE_READY_TIMEOUT_S"]) > 1800


@given(st.integers(1, 6), st.integers(1, 24))
def test_stages_of_one_machine_share_its_cores_without_overlap(sharing: int, num_cores: int) -> None:
    welcome = Welcome(
        **{name: getattr(WELCOME, name) for name in WELCOME.__struct_fields__} | {"stages_on_host": sharing}
    )
    cores = tuple(range(num_cores))
    taken = [environment(contract(stage, max(2, sharing)), welcome, cores).get("VLLM_CPU_OMP_THREADS_BIND")
             for stage in range(sharing)]  # fmt: skip
    if sharing == 1 or num_cores < sharing:
        assert set(taken) == {None}
    else:
        assert sorted(int(core) for part in taken for core in part.split(",")) == list(cores)


@pytest.mark.parametrize(
    ("stage", "sharing", "workers", "num_cores", "bound"),
    [
        (0, 1, 2, 4, None),  # a NUMA node each: vLLM's own choice is the better one
        (0, 1, 3, 6, "0,3|1,4|2,5"),
        (0, 1, 3, 2, "0|1|0"),
        (1, 2, 2, 8, "1,5|3,7"),
        (1, 2, 3, 4, "1|3|1"),
        (1, 3, 2, 2, "0|1"),
    ],
)
def test_workers_of_a_stage_share_its_cores(
    stage: int, sharing: int, workers: int, num_cores: int, bound: str | None
) -> None:
    welcome = Welcome(
        **{name: getattr(WELCOME, name) for name in WELCOME.__struct_fields__} | {"stages_on_host": sharing}
    )
    found = environment(contract(stage, max(2, sharing), tensor=workers), welcome, tuple(range(num_cores)))
    assert found.get("VLLM_CPU_OMP_THREADS_BIND") == bound


def test_on_one_machine_groups_keep_out_of_each_others_way() -> None:
    """vLLM's rendezvous listens on all addresses, so its port must differ, and must be none of the contract's."""
    taken = {rendezvous_port(f"127.64.0.{host}") for host in range(1, 255)}
    assert len(taken) == 254
    assert taken.isdisjoint({ports.ENGINE_HTTP, ports.PLAN_BUS, ports.RENDEZVOUS, ports.STAGE_HEALTH, ports.VLLM_HTTP})
    assert max(taken) < 32_768
    assert rendezvous_port("m-0-3-0.m-stages.lab.svc") == ports.RENDEZVOUS
    assert (http_host("127.64.0.9"), http_host("10.0.0.7")) == ("127.64.0.9", "127.0.0.1")
    assert http_url("10.0.0.7") == f"http://127.0.0.1:{ports.VLLM_HTTP}"
    assert network_interface("127.64.0.9", None) == "lo"
    assert network_interface("10.0.0.7", "eth1") == "eth1"
