"""Holds a group that comes back in one phase of its start, by freezing processes, so that a kill surely falls into it.

`freeze_newcomers` comes first, so that no group is past the phase already. A group that is held can neither become
ready nor fail; `kill` ends that, and what was frozen goes on and sees it.
"""

from collections.abc import Mapping
from pathlib import Path

from chaos.groups import ENGINE, FIRST, LAST, ChaosGroups, stage_status
from stageline_api.health import Phase


def freeze_newcomers(groups: ChaosGroups, after: Mapping[int, int]) -> dict[int, int]:
    """Freeze the last stages of groups as they start in an incarnation after the given one; returns these, by group."""
    frozen: dict[int, int] = {}

    def all_frozen() -> bool:
        for one in groups.members():
            if one.role == LAST and one.group not in frozen and one.incarnation > after.get(one.group, one.incarnation):
                one.freeze()
                frozen[one.group] = one.incarnation
        return len(frozen) == len(after)

    groups.until(all_frozen, f"last stages after {after}")
    return frozen


def hold_rendezvous(groups: ChaosGroups, group: int, incarnation: int) -> None:
    """The first stage has met the engine, the last one, which is frozen, never comes."""
    groups.until(lambda: _connected(groups, group, incarnation) == 1, f"one stage of group {group}")


def hold_load(groups: ChaosGroups, group: int, incarnation: int) -> None:
    """Both stages have been told what to load; the last one has, the first one does not get on."""
    hold_rendezvous(groups, group, incarnation)
    groups.member(group, FIRST, incarnation).freeze()
    groups.member(group, LAST, incarnation).thaw()
    groups.until(lambda: _connected(groups, group, incarnation) == 2, f"both stages of group {group}")
    last = groups.stages(group)[LAST]
    groups.until(lambda: _phase(last) is Phase.RENDEZVOUS, f"the load of the last stage of group {group}")


def hold_warm_up(groups: ChaosGroups, group: int, incarnation: int) -> None:
    """The first stage has run the warm-up plan, the last one has not."""
    hold_load(groups, group, incarnation)
    engine, first, last = (groups.member(group, role, incarnation) for role in (ENGINE, FIRST, LAST))
    first_url = groups.stages(group)[FIRST]
    engine.freeze()
    first.thaw()
    logs = [groups.log_of(one) for one in (first, last)]
    groups.until(lambda: all(_has_loaded(log) for log in logs), f"what group {group} loads")
    last.freeze()
    engine.thaw()
    groups.until(lambda: _steps(first_url) >= 1, f"the warm-up plan on the first stage of group {group}")


def kill(groups: ChaosGroups, group: int, incarnation: int, role: str) -> None:
    """Kill one process of a held group, and let the others see it."""
    members = [one for one in groups.members() if (one.group, one.incarnation) == (group, incarnation)]
    status = groups.engine(group)
    assert status is None or status.phase in (Phase.CONNECTING, Phase.WARMING), f"{status}\n{groups.story()}"
    for one in members:
        if one.role == role:
            one.kill()
        else:
            one.thaw()


def _connected(groups: ChaosGroups, group: int, incarnation: int) -> int:
    status = groups.engine(group, incarnation)
    return 0 if status is None else status.stages_connected


def _phase(health_url: str) -> Phase | None:
    status = stage_status(health_url)
    return None if status is None else status.phase


def _steps(health_url: str) -> int:
    status = stage_status(health_url)
    return 0 if status is None else status.steps


def _has_loaded(log: Path) -> bool:
    return "loaded layers" in log.read_text(errors="replace")
