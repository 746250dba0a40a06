"""`stageline plan` of stages of several ranks: what each holds, what sums take, and a word where ranks don't pay."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.manifest_samples import manifest
from processes.command_here import stageline_here

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_MIXTURE: dict[str, Any] = SMOLLM2 | MIXTURE | {"intermediate_size": 512}


def write(tmp_path: Path, config: dict[str, Any] = SMOLLM2, **spec: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(manifest("ranks", model={"source": f"file://{tmp_path}"}, **spec)))
    return str(path)


def planned(*arguments: str) -> dict[str, Any]:
    done = stageline_here("plan", *arguments, "--json")
    assert done.returncode == 0, done
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_each_rank_holds_its_part_and_its_step_is_shorter_by_more_than_the_sums(tmp_path: Path) -> None:
    file = write(tmp_path, parallelism={"pipeline": 2, "tensor": 3}, engine={"device": "cpu"})
    shared, alone = planned(file, "--devices", "cpu-core"), planned(file, "--devices", "cpu-core", "--tensor", "1")
    assert (shared["ranks"], alone["ranks"]) == (3, 1)
    assert (alone["all_reduce_seconds"], alone["ranks_do_not_pay"]) == (None, None)
    assert shared["ranks_do_not_pay"] is None
    for own, whole in zip(shared["stages"], alone["stages"], strict=True):
        assert own["layers"] == whole["layers"]
        assert whole["weight_bytes"] / 3 < own["weight_bytes"] < whole["weight_bytes"]
        assert own["predicted_step_seconds"] < whole["predicted_step_seconds"]
    # 8 rows of 576 elements, as they were measured in the pod.
    assert shared["all_reduce_seconds"] == pytest.approx(13.8e-6, rel=0.01)


def test_the_measured_latency_counts_twice_a_layer_and_is_told_where_it_eats_what_ranks_save(tmp_path: Path) -> None:
    file = write(tmp_path, parallelism={"pipeline": 2, "tensor": 3}, engine={"device": "cpu"})
    quick = planned(file, "--devices", "cpu-core", "--all-reduce-microseconds", "0")
    slow = planned(file, "--devices", "cpu-core", "--all-reduce-microseconds", "900")
    for before, after in zip(quick["stages"], slow["stages"], strict=True):
        added = after["predicted_step_seconds"] - before["predicted_step_seconds"]
        assert added == pytest.approx(2 * after["num_layers"] * 900e-6)
    assert "3 ranks a stage do not pay: the slowest stage's step of 8 rows takes" in slow["ranks_do_not_pay"]
    assert f"{slow['ranks_do_not_pay']}." in slow["notes"]
    table = stageline_here("plan", file, "--devices", "cpu-core").stdout
    assert "3 ranks a stage" in table
    assert "A sum over them takes 13.8 µs, a guess: measure it, and give --all-reduce-microseconds" in table


def test_ranks_that_divide_the_cores_of_one_machine_gain_nothing(tmp_path: Path) -> None:
    """A lone rank computes on all cores of its stage already."""
    found = planned(write(tmp_path, parallelism={"tensor": 3}))
    assert found["ranks_do_not_pay"] is not None


def test_ranks_of_experts_hold_all_else_and_read_their_part_of_the_experts(tmp_path: Path) -> None:
    spec = {"parallelism": {"pipeline": 2, "expert": 2}, "engine": {"device": "cpu"}}
    file = write(tmp_path, SMALL_MIXTURE, **spec, stages=[{"layers": "0-15"}, {"layers": "16-29"}])
    shared, alone = planned(file, "--devices", "cpu-core"), planned(file, "--devices", "cpu-core", "--expert", "1")
    assert (shared["ranks"], shared["ranks_that_share_experts"], alone["ranks"]) == (2, 2, 1)
    assert shared["ranks_do_not_pay"] is None
    for own, whole in zip(shared["stages"], alone["stages"], strict=True):
        assert own["layers"] == whole["layers"]
        experts = 2 * own["num_layers"] * 2 * 3 * 576 * 512  # bytes of the two of each layer that the rank has not
        assert whole["weight_bytes"] - own["weight_bytes"] == experts
        assert own["predicted_step_seconds"] < whole["predicted_step_seconds"]
    # A host's memory holds a token's keys and values once, whatever the ranks, and their weights and steps each.
    assert 0 < shared["stages"][0]["kv_capacity_tokens"] < alone["stages"][0]["kv_capacity_tokens"]
    slow = planned(file, "--devices", "cpu-core", "--all-reduce-microseconds", "2000")
    quick = planned(file, "--devices", "cpu-core", "--all-reduce-microseconds", "0")
    for before, after in zip(quick["stages"], slow["stages"], strict=True):
        added = after["predicted_step_seconds"] - before["predicted_step_seconds"]
        assert added == pytest.approx(2 * after["num_layers"] * 2000e-6)
    assert "2 ranks a stage do not pay: the slowest stage's step of 8 rows takes" in slow["ranks_do_not_pay"]
    assert "gathering rows for experts and scattering their sums take up to" in slow["ranks_do_not_pay"]
    table = stageline_here("plan", file, "--devices", "cpu-core").stdout
    assert "2 ranks a stage" in table
    assert "which share its experts and have sequences of their own" in table
    assert "Gathering their rows takes 13.8 µs, and scattering the experts' results as long, a guess" in table


@pytest.mark.parametrize(
    ("config", "options", "spec", "message"),
    [
        pytest.param(
            SMOLLM2,
            (),
            {"parallelism": {"tensor": 2}},
            "spec.parallelism.tensor: 2 is not allowed: "
            "the model's 9 query heads and 3 key and value heads can't be divided among 2 ranks",
            id="heads",
        ),
        pytest.param(
            SMOLLM2, ("--tensor", "2"), {}, "--tensor: 2 is not allowed: the model's 9 query heads", id="option"
        ),
        pytest.param(
            SMOLLM2 | MIXTURE, ("--tensor", "2"), {}, "--tensor: 2 is not allowed: model_type 'mixtral'", id="mixture"
        ),
        pytest.param(
            SMALL_MIXTURE,
            (),
            {"parallelism": {"expert": 3}},
            "spec.parallelism.expert: 3 is not allowed: the model's 4 experts a layer can't be divided among 3 ranks",
            id="experts",
        ),
        pytest.param(
            SMOLLM2,
            ("--expert", "2"),
            {},
            "--expert: 2 is not allowed: model_type 'llama' has no experts in any layer that could be cut over 2 ranks",
            id="dense",
        ),
        pytest.param(
            SMALL_MIXTURE,
            ("--expert", "2"),
            {"parallelism": {"tensor": 3}},
            "--expert 2: spec.parallelism.expert: 2 is not allowed: can't be above 1 where parallelism.tensor is",
            id="both",
        ),
        pytest.param(
            SMALL_MIXTURE,
            ("--expert", "2"),
            {"engine": {"name": "vllm"}},
            "--expert 2: spec.parallelism.expert: 2 is not allowed: is only for engine.name: stageline",
            id="experts-under-vllm",
        ),
        pytest.param(
            SMOLLM2,
            ("--tensor", "3"),
            {"engine": {"graphs": "full"}},
            '--tensor 3: spec.engine.graphs: "full" is not allowed: ',
            id="what-the-spec-then-says",
        ),
    ],
)
def test_what_ranks_can_not_share_is_refused_with_the_numbers(
    tmp_path: Path, config: dict[str, Any], options: tuple[str, ...], spec: dict[str, Any], message: str
) -> None:
    done = stageline_here("plan", write(tmp_path, config, **spec), *options)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_vllm_divides_by_its_own_rules_and_the_plan_says_where_it_does_not_know_them(tmp_path: Path) -> None:
    file = write(tmp_path, SMOLLM2 | MIXTURE, engine={"name": "vllm"}, parallelism={"tensor": 2})
    found = planned(file, "--devices", "h100-80gb")
    assert found["ranks"] == 1
    assert any("those of one rank a stage: model_type 'mixtral'" in note for note in found["notes"]), found["notes"]
