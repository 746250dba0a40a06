"""LoRA adapters are looked at before vLLM is started, and what is wrong with one is named with its path."""

import json
from pathlib import Path

import pytest

from processes.repository_files import ROOT
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import LoraAdapter
from stageline_runtime.termination import RuntimeFailure
from stageline_vllm.supervisor.adapters import RANK_ARGUMENT, check_adapters, max_rank


def two_adapters(directory: Path, content: str | None) -> list[LoraAdapter]:
    """The first is right, the second has this config."""
    right, asked = directory / "right", directory / "asked"
    right.mkdir()
    (right / "adapter_config.json").write_text('{"r": 1}')
    if content is not None:
        asked.mkdir()
        (asked / "adapter_config.json").write_text(content)
    return [LoraAdapter(name=each.name, path=str(each)) for each in (right, asked)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "adapter_config.json can't be read: No such file or directory; the path is one on a volume of"),
        ("{", "adapter_config.json is no JSON: "),
        ("[8]", "adapter_config.json is no JSON object"),
        ("{}", "adapter_config.json has the rank null, not a positive integer"),
        ('{"r": "8"}', 'adapter_config.json has the rank "8", not'),
        ('{"r": 0}', "adapter_config.json has the rank 0, not"),
        ('{"r": true}', "adapter_config.json has the rank true, not"),
        ('{"r": 8, "rank_pattern": {"q_proj": -1}}', "adapter_config.json has the rank -1, not"),
        (
            '{"r": 17}',
            "its rank is 17, more than the 16 of --max-lora-rank: add --max-lora-rank 32 to spec.engine.extra",
        ),
        (
            '{"r": 8, "rank_pattern": {"q_proj": 300}}',
            "its rank is 300, more than the 16 of --max-lora-rank: add --max-l",
        ),
        ('{"r": 600}', "its rank is 600, more than the 16 of --max-lora-rank: vLLM takes none above 512"),
    ],
)
def test_what_vllm_could_not_load_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    adapters = two_adapters(tmp_path, content)
    with pytest.raises(RuntimeFailure) as refused:
        check_adapters(adapters, ())
    assert refused.value.failure_class is FailureClass.BAD_CONFIG
    assert refused.value.detail.startswith(f"spec.engine.loraAdapters[1] (asked, {tmp_path / 'asked'}): {words}")


@pytest.mark.parametrize(
    ("content", "extra_args"),
    [
        ('{"r": 16, "rank_pattern": {}}', ()),
        ('{"r": 8, "rank_pattern": null}', ()),
        ('{"r": 64}', ("--max-lora-rank", "64")),
        ('{"r": 64}', ("--max-lora-rank", "a number, which vLLM speaks of")),
    ],
)
def test_what_vllm_can_load_passes(tmp_path: Path, content: str, extra_args: tuple[str, ...]) -> None:
    check_adapters(two_adapters(tmp_path, content), extra_args)


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        ((), 16),
        (("--max-lora-rank=128",), 128),
        (("--max_lora_rank", "32", "--enforce-eager"), 32),
        (("--max-lora-r", "8"), 8),
        (("--max-lora-rank", "32", "--max-lora-rank=64"), 64),
        (("--max-lora-cls-labels", "4"), 16),
        (("--max-lora-rank",), None),
        (("--max-lora-rank", "x"), None),
    ],
)
def test_the_greatest_rank_is_read_as_vllm_reads_it(extra_args: tuple[str, ...], expected: int | None) -> None:
    assert max_rank(extra_args) == expected


def test_the_argument_may_be_shortened_as_far_as_vllm_takes_it_for_no_other() -> None:
    record = json.loads((ROOT / "tests/vllm_engine/recorded/serve_arguments.json").read_text())
    names = {*record["refused"], *record["passed"]}
    for length in range(3, len(RANK_ARGUMENT) + 1):
        short = RANK_ARGUMENT[:length]
        is_its_own = [name for name in names if name.startswith(short)] == [RANK_ARGUMENT]
        assert (max_rank((short, "32")) == 32) == is_its_own, short
