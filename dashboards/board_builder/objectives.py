"""Burn rates of the error budgets: the recorded ratio of each objective, as a multiple of its budget.

At 1 a budget lasts exactly as long as planned; alerts page at 14.4 over an hour and at 6 over six hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from board_builder.panels import Limits
from board_builder.queries import max_by, selected

FIRST_TOKEN_SECONDS: Final = "model:stageline_first_token_seconds:objective"
OUTPUT_TOKEN_SECONDS: Final = "model:stageline_output_token_seconds:objective"
SLOW: Final = "model:stageline_slow_request_ratio:objective"
FAILED: Final = "model:stageline_failed_request_ratio:objective"
RED: Final = "Red: more requests miss the model's objective than it allows."
BURN: Final = Limits(6, 14.4)
"""Over an hour; the lower one also pages if it lasts for six hours."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The recorded share of requests that missed the objective, by window, and the recorded allowed share; both by
    model.
    """

    missed: str
    allowed: str

    def burn(self, window: str, *matchers: str) -> str:
        """Burn rate; no sample without requests."""
        missed = selected(f"{self.missed}:ratio_rate{window}", *matchers)
        return f"{missed} / {self.allowed}"


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "TTFT": Objective("model:stageline_first_token_slow_per_request", SLOW),
    "TPOT": Objective("model:stageline_output_token_slow_per_request", SLOW),
    "Errors": Objective("model:stageline_gateway_failed_per_request", FAILED),
}
"""By their names on boards."""


def over_budget(name: str, *matchers: str) -> str:
    """Has a sample while the requests of five minutes exceed the objective's budget."""
    return f"{max_by((), OBJECTIVES[name].burn('5m', *matchers))} > 1"


def worst_burn(window: str, *matchers: str) -> str:
    """The highest burn rate of all models and objectives."""
    return " or ".join(
        f'label_replace({each.burn(window, *matchers)}, "objective", "{name}", "", "")'
        for name, each in OBJECTIVES.items()
    )
