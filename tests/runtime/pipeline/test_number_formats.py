"""What a checkpoint is computed in: `auto` widens float16 on CPUs, and bfloat16 where a CPU has no units for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oracles.pipeline_checks import draw_prompts, greedy, stage_samples
from oracles.tiny_models import VOCAB_SIZE, write_tiny_llama
from processes.running_group import RunningGroup, page, running_group
from stageline_runtime.model_facts.number_format import choose_number_format
from stageline_runtime.planning import cpu_features
from stageline_runtime.planning.cpu_features import has_bfloat16_units

STAGE = Path(__file__).parents[2] / "support" / "processes" / "stage_of_cpu.py"
AVX2_INFO = "processor\t: 0\nmodel name\t: any\nflags\t\t: fpu avx avx2 f16c fma\n"


@pytest.mark.parametrize(
    ("asked", "of_model", "on_devices", "expected"),
    [
        ("auto", "float16", False, "float32"),
        ("auto", "float16", True, "float16"),
        ("auto", "bfloat16", False, "bfloat16"),
        ("auto", "float32", True, "float32"),
        ("float16", "bfloat16", False, "float16"),
        ("float32", "float16", True, "float32"),
    ],
)
def test_auto_is_the_checkpoints_own_but_for_float16_on_cpus(
    asked: str, of_model: str, on_devices: bool, expected: str
) -> None:
    assert choose_number_format(asked, of_model, on_devices=on_devices).dtype == expected


@pytest.mark.parametrize(
    ("asked", "of_model", "expected"),
    [("auto", "bfloat16", "float32"), ("auto", "float32", "float32"), ("bfloat16", "bfloat16", "bfloat16")],
)
def test_auto_widens_bfloat16_where_a_cpu_has_no_units_for_it(asked: str, of_model: str, expected: str) -> None:
    found = choose_number_format(asked, of_model, on_devices=False, slow_cpus="the CPU of stage 1")
    assert found.dtype == expected
    assert ("the CPU of stage 1" in found.reason) == (expected != of_model)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (AVX2_INFO, False),
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_vnni\n", False),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\nflags\t\t: fpu\n", True),
        ("flags : amx_bf16 amx_tile\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", False),
        ("processor\t: 0\nhart\t: 0\n", False),
    ],
    ids=["avx2", "avx512", "avx512-bf16", "amx", "arm-bf16", "arm", "riscv"],
)
def test_the_kernel_tells_whether_a_cpu_has_units_for_bfloat16(
    info: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(cpu_features, "CPU_INFO", tmp_path / "cpuinfo")
    assert has_bfloat16_units(cpu_features.cpu_features()) is expected


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), dtype="float16")


def reference(model_dir: Path, prompt: tuple[int, ...], count: int, dtype: torch.dtype) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    said = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(said[0, len(prompt) :].tolist())


def test_a_float16_checkpoint_answers_as_hugging_face_in_the_format_it_is_computed_in(
    model_dir: Path, tmp_path: Path
) -> None:
    [prompt] = draw_prompts(1, VOCAB_SIZE, 20)
    held = {}
    for asked, computed in (("auto", torch.float32), ("float16", torch.float16)):
        with running_group(tmp_path / asked, model_dir, 2, dtype=asked, max_num_seqs=2) as group:
            assert group.generate(prompt, greedy(12)) == reference(model_dir, prompt, 12, computed)
            held[computed] = memory_bytes(group)
    assert held[torch.float16] == held[torch.float32] / 2, held


def memory_bytes(group: RunningGroup) -> float:
    """Weights and KV cache of the first stage."""
    return sum(stage_samples(group, 0)["stageline_stage_memory_bytes"].values())


def test_one_cpu_without_bfloat16_units_makes_its_whole_group_compute_in_float32(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", dtype="bfloat16")
    (tmp_path / "cpuinfo-1").write_text(AVX2_INFO)
    command = (str(STAGE), str(tmp_path / "cpuinfo-"))
    [prompt] = draw_prompts(1, VOCAB_SIZE, 20)
    with running_group(tmp_path / "group", model_dir, 2, dtype="auto", max_num_seqs=2, stage_command=command) as group:
        assert group.generate(prompt, greedy(12)) == reference(model_dir, prompt, 12, torch.float32)
        told = [page(f"http://{address}:9100/status").json()["message"] for address in group.addresses]
        assert told[0] == told[1], told
        assert told[0].startswith("float32 (spec.engine.dtype auto: "), told
        assert "the CPU of stage 1" in told[0], told
        assert "computing in float32: " in group.log("engine"), group.log("engine")
