"""The definition of a server error: shared by boards, and the same as in the rules."""

from collections.abc import Sequence
from typing import Final

from board_builder.panels import Limits
from board_builder.queries import or_zero, rate, rate_by, selected, share, sum_by
from stageline_gateway.telemetry import metric_names as names

FAILING: Final = Limits(0.001, 0.01)
"""The objective's error ratio, and ten times it."""
FAILED: Final = 'code=~"5.."'
NOT_THE_CLIENTS: Final = 'code!~"4.."'
"""Client errors, rate limits (429) and disconnects (499) are excluded."""
ERRORS: Final = "Status 500 or more, or aborted after the first byte; client errors (4xx, 499) aren't counted at all."
"""The same as text."""


def request_rate(labels: Sequence[str], *matchers: str) -> str:
    """Requests answered per second; 0 while the first ones are still running."""
    in_flight = sum_by(labels, selected(names.IN_FLIGHT.name, *matchers))
    return or_zero(rate_by(labels, names.REQUESTS.name, *matchers), in_flight)


def error_ratio(labels: Sequence[str], *matchers: str) -> str:
    """Share of requests with a server error; no sample without requests."""
    failed = rate(names.REQUESTS.name, FAILED, *matchers)
    broken = rate(names.BROKEN_ANSWERS.name, *matchers)
    return share(
        sum_by(labels, f"{failed} or {broken}"), rate_by(labels, names.REQUESTS.name, NOT_THE_CLIENTS, *matchers)
    )
