"""How a group ends once one of its processes was killed: who is blamed, which exit code, and that nothing stays."""

import time
from pathlib import Path

from processes.running_group import RunningGroup

END_SECONDS = 50.0
"""On a busy machine; still less than the step timeout, which ends a group in any case."""
CLASS_OF_EXIT_CODE = {70: "RendezvousTimeout", 71: "PeerLost", 72: "StepTimeout", 73: "EngineLost"}


def assert_all_end(group: RunningGroup, killed: str) -> None:
    """Everything but `killed` ends in time and explains itself by what was killed."""
    deadline = time.monotonic() + END_SECONDS
    survivors = [name for name in group.processes if name != killed]
    for name in survivors:
        remaining = max(0.1, deadline - time.monotonic())
        group.wait_until(lambda name=name: group.processes[name].poll() is not None, f"the end of {name}", remaining)  # type: ignore[misc]
    for name in survivors:
        words = group.last_words(name)
        told = f"{name}: {words}\n{group.account()}"
        assert CLASS_OF_EXIT_CODE.get(group.processes[name].returncode) == words["failure_class"], told
        assert words["stage"] == (None if name == "engine" else int(name[-1])), told
        assert words["detail"], told
        assert root_of(group, name) == killed, told
    assert "Traceback" not in "".join(group.log(name) for name in survivors), group.account()
    group.wait_until(lambda: not still_running(group), "the end of every process of the group", END_SECONDS)


def assert_all_name(group: RunningGroup, killed: str) -> None:
    """`assert_all_end`, and every survivor names `killed` itself rather than another victim of it."""
    assert_all_end(group, killed)
    expected = ("EngineLost", None) if killed == "engine" else ("PeerLost", int(killed[-1]))
    for name in group.processes.keys() - {killed}:
        words = group.last_words(name)
        assert (words["failure_class"], words["peer"]) == expected, f"{name}: {words}\n{group.account()}"


def root_of(group: RunningGroup, name: str) -> str:
    """Who is to blame by `name`'s account: a lost peer names its peer and a lost engine is the engine; follow that."""
    seen: list[str] = []
    while name in group.processes and name not in seen and (group.directory / f"{name}.termination").exists():
        seen.append(name)
        words = group.last_words(name)
        match words["failure_class"]:
            case "PeerLost":
                name = f"stage-{words['peer']}"
            case "EngineLost":
                name = "engine"
            case _:
                return name
    return name


def still_running(group: RunningGroup) -> list[int]:
    """Processes that inherited the group's token, whoever started them; a zombie has no environment any more."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if group.token.encode() in environment:
            found.append(int(entry.name))
    return found
