"""Five hours, scripted by the half minute: each of one hour, and in most something happens after half of it.

Two models share an installation: `chat` with two groups of three stages, which the scenarios happen to, and `mini` with
one group of two stages, which is well in all of them but the last, so that a board must tell the two apart.
`python -m boards.fleet_scenarios NAME`, with tests/support on the path, prints one as OpenMetrics text that ends now.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from boards.scripted_fleet import ScriptedFleet
from boards.scripted_moments import Clients, Group, Model, Moment
from stageline_api.health import Phase

SCRAPE_SECONDS: Final = 30
LENGTH_SECONDS: Final = 3600
HAPPENS_AT_SECONDS: Final = 1800
STEPS: Final = (0.020, 0.025, 0.020)
"""Stage 1 of `chat` is a little slower than the others: 80 % of its busy time is theirs."""
HEALTHY_GROUP: Final = Group(STEPS, load=0.6, engaged=0.9, drafted_rows_per_second=5.0)
HEALTHY_CLIENTS: Final = Clients({"200": 4.0, "404": 0.1}, in_flight=20)
MINI: Final = Model(Clients({"200": 1.0}, in_flight=3), (Group((0.01, 0.01), 0.4, 0.5, running=4),), stages=2)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`script` says how the installation does at a moment; alerts fire from when on, by name, with labels."""

    name: str
    script: Callable[[int], Moment]
    alerts: Mapping[str, tuple[int, Mapping[str, str]]]

    def open_metrics(self, begins_at: float) -> str:
        """The hour from `begins_at` on."""
        fleet = ScriptedFleet()
        for second in range(0, LENGTH_SECONDS + 1, SCRAPE_SECONDS):
            fleet.pass_time(self.script(second), SCRAPE_SECONDS, begins_at + second)
            for alert, (since, labels) in self.alerts.items():
                if second >= since:
                    fleet.fire(alert, begins_at + second, **labels)
        return fleet.history.open_metrics()


def _chat(clients: Clients, *groups: Group | None, **more: object) -> Moment:
    return {"chat": Model(clients, groups, **more), "mini": MINI}  # type: ignore[arg-type]


def healthy(_second: int) -> Moment:
    """All as it should be, with a usual error of a client now and then."""
    return _chat(HEALTHY_CLIENTS, HEALTHY_GROUP, HEALTHY_GROUP)


def slow_stage(second: int) -> Moment:
    """Stage 1 of group 0 takes four times as long: the group is at its limit with fewer steps, and users wait."""
    if second < HAPPENS_AT_SECONDS:
        return healthy(second)
    slow = Group((0.020, 0.100, 0.020), load=0.98, engaged=1.0, waiting=6, queue_seconds=2.0)
    clients = replace(HEALTHY_CLIENTS, first_token_seconds=1.5, output_token_seconds=0.12, queued=8)
    return _chat(clients, slow, HEALTHY_GROUP)


def stage_lost(second: int) -> Moment:
    """A stage of group 0 is killed. The group is away for five minutes and comes back as incarnation 2.

    A quarter of an hour later somebody rolls out another template, and group 1 is about to be replaced.
    """
    back_at = HAPPENS_AT_SECONDS + 300
    if second < HAPPENS_AT_SECONDS:
        return healthy(second)
    if second >= back_at:
        first = second < back_at + SCRAPE_SECONDS
        again = replace(HEALTHY_GROUP, incarnation=2, stage_phase=Phase.LOADING if first else Phase.READY)
        recovered = (300.0,) if first else ()
        rolled = {1: "Replacing"} if 2700 <= second < 2820 else {}
        more = {"phases": rolled, "incarnations": {0: 2}, "recovered_seconds": recovered}
        return _chat(HEALTHY_CLIENTS, again, HEALTHY_GROUP, **more)
    first = second < HAPPENS_AT_SECONDS + SCRAPE_SECONDS
    clients = replace(
        HEALTHY_CLIENTS,
        requests={"200": 3.8, "502": 0.2, "404": 0.1},
        broken_per_second=0.1,
        losses={"connection_lost": 0.4} if first else {"unreachable": 0.1},
        resumes={"resumed": 0.3, "moved": 0.1},
    )
    busier = replace(HEALTHY_GROUP, load=0.95, engaged=1.0)
    down = {
        "phases": {0: "BackingOff"},
        "incarnations": {0: 2},
        "failures": {"Killed": 1.0} if first else {},
        "missed": 1.0 if first else 0.0,
    }
    return _chat(clients, None, busier, **down)


def saturated(second: int) -> Moment:
    """More is asked for than there is room for: both groups full, a queue, and requests turned away."""
    if second < HAPPENS_AT_SECONDS:
        return healthy(second)
    full = Group(
        STEPS,
        load=0.99,
        engaged=1.0,
        running=48,
        waiting=40,
        kv_usage=0.99,
        preemptions_per_second=0.2,
        queue_seconds=8,
    )
    clients = Clients(
        {"200": 6.0, "503": 2.0, "429": 1.0},
        first_token_seconds=9.0,
        output_token_seconds=0.08,
        queued=60,
        in_flight=150,
        refused_per_second=1.0,
        slow_readers_per_second=0.02,
    )
    return _chat(clients, full, full)


def no_traffic(second: int) -> Moment:
    """Nobody asks for anything from half an hour on; of `mini` nobody ever did."""
    idle_mini = Model(Clients(), (Group((0.01, 0.01), 0.0, 0.0, running=0, kv_usage=0.0),), stages=2)
    if second < HAPPENS_AT_SECONDS:
        return {**healthy(second), "mini": idle_mini}
    idle = replace(HEALTHY_GROUP, load=0.0, engaged=0.0, running=0, kv_usage=0.0)
    return {"chat": Model(Clients({"200": 0.0, "404": 0.0}), (idle, idle)), "mini": idle_mini}


_OF_CHAT: Final = {"namespace": "models", "model_name": "chat"}
_OF_GROUP: Final = {**_OF_CHAT, "model": "chat", "group": "0"}
SCENARIOS: Final = {
    each.name: each
    for each in (
        Scenario("healthy", healthy, {}),
        Scenario(
            "slow-stage",
            slow_stage,
            {"StagelineStageBottleneck": (2400, {"severity": "warning", "stage": "1", **_OF_GROUP})},
        ),
        Scenario(
            "stage-lost", stage_lost, {"StagelineFailureBudgetBurn": (1860, {"severity": "critical", **_OF_CHAT})}
        ),
        Scenario(
            "saturated", saturated, {"StagelineRequestsQueuedTooLong": (2400, {"severity": "warning", **_OF_CHAT})}
        ),
        Scenario("no-traffic", no_traffic, {}),
    )
}


if __name__ == "__main__":
    sys.stdout.write(SCENARIOS[sys.argv[1]].open_metrics(int(time.time()) - LENGTH_SECONDS))
