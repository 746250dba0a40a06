"""Burn rates of the error budgets: what the rules record of each objective, as a multiple of what it allows.

At 1 a budget lasts exactly as long as it is meant to; alerts page at 14.4 over an hour and at 6 over six hours.
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
"""Over an hour: the lower one pages too when it lasts for six."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A recorded share of requests that missed it, by window, and the recorded share that may; both by model."""

    missed: str
    allowed: str

    def burn(self, window: str, *matchers: str) -> str:
        """Times as fast as allowed; nothing where there were no requests."""
        missed = selected(f"{self.missed}:ratio_rate{window}", *matchers)
        return f"{missed} / {self.allowed}"


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "TTFT": Objective("model:stageline_first_token_slow_per_request", SLOW),
    "TPOT": Objective("model:stageline_output_token_slow_per_request", SLOW),
    "Errors": Objective("model:stageline_gateway_failed_per_request", FAILED),
}
"""By what boards call them."""


def over_budget(name: str, *matchers: str) -> str:
    """Something while the requests of five minutes spend the budget of an objective faster than it allows."""
    return f"{max_by((), OBJECTIVES[name].burn('5m', *matchers))} > 1"


def worst_burn(window: str, *matchers: str) -> str:
    """Of all models and objectives the one whose budget goes fastest."""
    return " or ".join(
        f'label_replace({each.burn(window, *matchers)}, "objective", "{name}", "", "")'
        for name, each in OBJECTIVES.items()
    )
