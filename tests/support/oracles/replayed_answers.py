"""A timed pipeline that says what SmolLM2 once said: real texts, and so real matches, without a model.

`recorded_answers.json` holds token ids of the prompts that `make bench-speculation` asks and of the model's greedy
answers (bfloat16, two stages).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from oracles.timed_pipeline import TimedPipeline
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow

_RECORDED: Final = Path(__file__).with_name("recorded_answers.json")


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def recorded_answers() -> Mapping[str, RecordedAnswer]:
    """By the name of the prompt."""
    texts = json.loads(_RECORDED.read_text(encoding="utf-8"))
    return {name: RecordedAnswer(tuple(each["prompt"]), tuple(each["answer"])) for name, each in texts.items()}


@dataclass(slots=True)
class ReplayingPipeline(TimedPipeline):
    recorded: RecordedAnswer = field(kw_only=True)
    _whole: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.prompt = self.recorded.prompt
        self._whole = (*self.recorded.prompt, *self.recorded.answer)

    def rate(self, num_requests: int) -> float:
        """Tokens per second of requests that all ask this, from the first token to the last, on the average."""
        return self.tokens_per_second(len(self.recorded.answer), num_requests)

    def _sample(self, row: PlanRow) -> SampledRow:
        first = row.position + row.num_tokens - row.num_drafts
        drafts = row.token_ids[1:] if row.num_drafts else ()
        held = 0
        while held < len(drafts) and self._whole[first + held : first + held + 1] == drafts[held : held + 1]:
            held += 1
        token = self._whole[first + held] if first + held < len(self._whole) else 0
        return self._sampled(row, self._whole[row.position], token, held)
