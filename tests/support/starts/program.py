"""How long a group takes to get ready, cold and warm, by phase, and to come back, by cause: `make bench-starts`.

On a laptop and in a cluster of a real control plane, each round from an empty cache: the first start, then one blow
after the other, each of which ends the group. What is published is what the operator and the stages record themselves;
beside a recovery stands the time from the blow by this program's clock, since a failure must be noticed first.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from cluster.api import wait_until
from cluster.control_plane import running_control_plane
from cluster.control_plane_binary import control_plane_binaries
from cluster.under_test import cluster_of
from stageline_bench.page_section import replace_section
from stageline_bench.runtime.record.results import Result, this_machine, today, write_result
from starts.page import section_of
from starts.places import Place, in_cluster, laptop
from starts.recorded import Recorded, read_operator, recovery_of, slowest_stage, start_of

ROOT: Final = Path(__file__).parents[3]
CRD_FILE: Final = ROOT / "operator" / "stageline_api" / "crds" / "stageline.dev_pipelinemodels.yaml"
PLACES: Final = ("laptop", "cluster")
EVENT_SECONDS: Final = 900.0
NOTHING: Final = Recorded({}, {}, {})


@contextmanager
def serving_at(place: str, manifest: Path, directory: Path) -> Iterator[Place]:
    """The model at one of `PLACES`, with an empty cache."""
    with ExitStack() as stack:
        if place == "laptop":
            yield stack.enter_context(laptop(manifest, directory))
            return
        plane = stack.enter_context(running_control_plane(directory / "plane", control_plane_binaries()))
        cluster = stack.enter_context(cluster_of(plane))
        cluster.kubectl_ok("apply", "--server-side", "-f", str(CRD_FILE))
        cluster.kubectl_ok("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRD_FILE))
        yield stack.enter_context(in_cluster(manifest, directory, cluster))


def one_round(place: Place, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A start, and for each blow a recovery with the start that it ends in."""
    recorded = _after(place, NOTHING, starts=1, recoveries=0)
    found = [{"place": place.name, "start": _start(place, recorded)}]
    say(f"{place.name}: {found[-1]}")
    for what, blow in place.blows.items():
        before = read_operator(place.operator_page())
        began = time.monotonic()
        blow()
        recorded = _after(place, before, starts=1, recoveries=1)
        recovery = {"what": what, "seconds": round(time.monotonic() - began, 3)} | recovery_of(recorded)
        found.append({"place": place.name, "start": _start(place, recorded), "recovery": recovery})
        say(f"{place.name}: {found[-1]}")
    return found


def _after(place: Place, before: Recorded, *, starts: int, recoveries: int) -> Recorded:
    """What is recorded since, once there are so many."""

    def _enough() -> Recorded | None:
        recorded = read_operator(place.operator_page()).since(before)
        return recorded if recorded.events[0] >= starts and recorded.events[1] >= recoveries else None

    found = wait_until("the group is ready, and that is recorded", _enough, EVENT_SECONDS, place.state)
    assert found is not None
    return found


def _start(place: Place, recorded: Recorded) -> dict[str, Any]:
    """A stage has left its last phase a moment after the operator has seen it ready."""

    def _stages() -> dict[str, float] | None:
        phases = slowest_stage(place.stage_pages())
        return phases if "Warming" in phases else None

    stages = wait_until("the stages tell their phases", _stages, 60.0, place.state)
    assert stages is not None
    return start_of(recorded, stages)


def say(sentence: str) -> None:
    """To whoever looks on."""
    sys.stdout.write(sentence + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, keep the figures, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "smollm2.yaml", help="PipelineModel to start")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PLACES, help="one of both; the cluster needs Go once")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--page", type=Path, help="page whose section on starts is written anew")
    options = parser.parse_args(arguments)
    places = [options.only] if options.only else list(PLACES)
    machine = this_machine()
    rounds: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        for name in places if turn % 2 == 0 else places[::-1]:
            with (
                tempfile.TemporaryDirectory(prefix="bench-starts-") as directory,
                serving_at(name, options.model, Path(directory)) as place,
            ):
                rounds += one_round(place, say)
    result = Result(
        program="starts",
        date=today(),
        machine=machine,
        parameters={"model": options.model.stem, "rounds": options.rounds},
        rounds=rounds,
        targets=[],
    )
    say(f"wrote {write_result(result, options.results)}")
    if options.page is not None:
        replace_section(options.page, "starts", section_of(result))


if __name__ == "__main__":
    main()
