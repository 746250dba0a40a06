"""A question asked again is answered in the same words, sooner: real stages draft from answers that have ended."""

from pathlib import Path
from typing import Any

from oracles.pipeline_checks import draw_prompts, samples
from oracles.tiny_models import VOCAB_SIZE
from processes import eager_drafts_engine
from processes.running_group import RunningGroup, running_group
from stageline_api.engine_http import SamplingParams

PROMPTS = draw_prompts(3, VOCAB_SIZE, 40)
LENGTH = 40
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "speculative": {"tokens": 8, "min_match": 4, "recent_answers": 3},
}


def accepted(group: RunningGroup) -> float:
    return samples(f"{group.url}/metrics")["stageline_engine_accepted_tokens_total"][()]


def test_the_same_question_again(tiny_llama: Path, tmp_path: Path) -> None:
    """Drawn at random, so that an answer has no words of its own to copy; by seed, so that it is the same again."""
    drawn = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=LENGTH, ignore_eos=True) for index in range(len(PROMPTS))
    ]
    with running_group(tmp_path, tiny_llama, 2, engine_command=eager_drafts_engine.COMMAND, **CONFIG) as group:
        first = group.generate_all(PROMPTS, drawn)
        of_themselves = accepted(group)
        assert group.generate_all(PROMPTS, drawn) == first
        again = accepted(group) - of_themselves
    with running_group(tmp_path / "plain", tiny_llama, 2, **CONFIG | {"speculative": None}) as plain:
        assert plain.generate_all(PROMPTS, drawn) == first
    # Of 120 tokens. How many are drafted depends on who steps beside whom: 59 have been seen on a busy machine.
    assert again > of_themselves + len(PROMPTS) * LENGTH / 4, (of_themselves, again)
