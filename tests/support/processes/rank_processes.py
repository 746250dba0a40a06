"""The rank processes of a running stage, found through their supervisor."""

from pathlib import Path

from processes.forked_ranks import NAME
from processes.running_group import RunningGroup
from stageline_api import env


def rank_pids(group: RunningGroup, stage: int) -> dict[int, int]:
    """Process ids of the stage's ranks that run, by rank."""
    supervisor = group.processes[f"stage-{stage}"].pid
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    except OSError:
        return {}
    found = {}
    for child in map(int, children):
        rank = _rank_of(child)
        if rank is not None:
            found[rank] = child
    return found


def _rank_of(pid: int) -> int | None:
    """By its name, where it is a fork; by its variables, where it is an interpreter of its own."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if name.startswith(NAME):
        return int(name.removeprefix(NAME))
    mark = f"{env.STAGE_RANK}=".encode()
    return next((int(one.removeprefix(mark)) for one in variables if one.startswith(mark)), None)
