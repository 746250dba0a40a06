"""`stageline up` with tiny groups of two stages as real processes, which a test may kill or freeze by their roles."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from oracles.tiny_models import write_tiny_llama
from processes.serving_command import ServingCommand, command_line, descendants, environment_of, kill, serving
from stageline_api import env, ports
from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_api.health import EngineStatus, StageStatus
from stageline_api.telemetry.timeline import GroupStages

ENGINE, FIRST, LAST = "engine", "stage-0", "stage-1"
DEADLINE_SECONDS = 400.0
"""Bounds a hang alone: a group's restart may take a minute where everything else runs at the same time, and a test may
kill a group three times in a row."""
RESTART_WINDOW_SECONDS = 2
"""Short, so that back-off stays short however often a group is killed."""


def state_url(endpoint: GroupEndpoint) -> str:
    """Where an engine says how it is, without a key."""
    return f"http://{httpx.URL(endpoint.url).host}:{ports.ENGINE_STATE}"


@dataclass(frozen=True)
class Member:
    """One process of a group."""

    pid: int
    group: int
    incarnation: int
    role: str

    def kill(self) -> None:
        """End it the hard way, if it still runs."""
        with suppress(ProcessLookupError):
            kill(self.pid)

    def freeze(self) -> None:
        """Stop it where it is; it keeps its sockets and hears nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on, if it still runs: a group whose other process was killed may have ended already."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


@dataclass(frozen=True)
class ChaosGroups:
    """The groups of a running `stageline up`."""

    served: ServingCommand
    model: Path
    """Directory of the model they serve."""

    @property
    def _directory(self) -> Path:
        """What the session keeps of its model."""
        return self.served.state_dir / "tiny"

    def members(self) -> list[Member]:
        """Engines and stages that run now."""
        found = []
        for pid in sorted(descendants(self.served.process.pid)):
            role = command_line(pid)[-1:]
            if role in (["stage"], ["engine"]) and (variables := _environment(pid)):
                stage = variables[env.STAGE_INDEX]
                name = ENGINE if role == ["engine"] else f"stage-{stage}"
                found.append(Member(pid, int(variables[env.GROUP_INDEX]), int(variables[env.INCARNATION]), name))
        return found

    def member(self, group: int, role: str, since: int = 0) -> Member:
        """A process of a group, as soon as it runs in incarnation `since` or a later one."""
        found: list[Member] = []

        def runs() -> bool:
            found[:] = [
                one for one in self.members() if (one.group, one.role) == (group, role) and one.incarnation >= since
            ]
            return bool(found)

        self.until(runs, f"{role} of group {group} since incarnation {since}")
        return max(found, key=lambda one: one.incarnation)

    def endpoint(self, group: int) -> GroupEndpoint | None:
        """What the gateway is told of a group; None before it is told anything."""
        path = self._directory / "endpoints.json"
        listed = Endpoints.model_validate_json(path.read_text()).groups if path.exists() else ()
        return next((one for one in listed if one.group == group), None)

    def engine(self, group: int, since: int = 0) -> EngineStatus | None:
        """What the engine of a group says, in incarnation `since` or a later one; None while it doesn't answer."""
        endpoint = self.endpoint(group)
        if endpoint is None or not endpoint.url or endpoint.incarnation < since:
            return None
        try:
            answered = httpx.get(f"{state_url(endpoint)}/status", timeout=60, trust_env=False)
            return EngineStatus.model_validate_json(answered.content)
        except httpx.TransportError:
            return None

    def stages(self, group: int) -> dict[str, str]:
        """Health URLs of a group's stages that are connected to its engine, by role; none while that doesn't answer."""
        endpoint = self.endpoint(group)
        assert endpoint is not None, "a group without an engine has no stages"
        answered = httpx.get(f"{state_url(endpoint)}/stages", timeout=60, trust_env=False)
        stages = GroupStages.model_validate_json(answered.content).stages
        return {f"stage-{stage.stage}": stage.health_url for stage in stages}

    def stage_steps(self, group: int) -> int:
        """Plans that the first stage of a group has run."""
        status = stage_status(self.stages(group)[FIRST])
        return 0 if status is None else status.steps

    def log_of(self, member: Member) -> Path:
        """What a process writes."""
        name = f"*-{member.group}-{member.incarnation}-{member.role.removeprefix('stage-').replace(ENGINE, '0')}"
        container = ENGINE if member.role == ENGINE else "stage"
        [file] = self._directory.glob(f"logs/{name}/{container}.log")
        return file

    def ready_groups(self) -> int:
        """How many groups the gateway would send requests to."""
        [model] = httpx.get(f"{self.served.url}/v1/models", timeout=60, trust_env=False).json()["data"]
        return sum(group["ready"] for group in model["groups"])

    def wait_ready(self, groups: int) -> None:
        """Until so many groups take requests."""
        self.until(lambda: self.ready_groups() == groups, f"{groups} groups ready")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Poll until `condition` holds; fails with the story."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come\n{self.story()}"
            time.sleep(0.02)

    def gateway_log(self) -> str:
        """All that the gateway has logged."""
        return (self._directory / "logs" / "gateway.log").read_text(errors="replace")

    def story(self) -> str:
        """What happened, for a failed assertion."""
        return f"{self.served.output()[-3000:]}\n{self.gateway_log()[-4000:]}"


def stage_status(health_url: str) -> StageStatus | None:
    """What a stage says of itself; None while it doesn't answer."""
    try:
        answered = httpx.get(f"{health_url}/status", timeout=60, trust_env=False)
        return StageStatus.model_validate_json(answered.content)
    except httpx.TransportError:
        return None


@contextmanager
def serving_tiny(
    directory: Path, replicas: int, engine: str = "", timeouts: str = "", context_length: int = 256
) -> Iterator[ChaosGroups]:
    """`stageline up` with `replicas` ready groups; `engine` and `timeouts` add fields to theirs, as `, name: value`."""
    model = write_tiny_llama(directory / "model", num_layers=2, context_length=context_length)
    file = directory / "tiny.yaml"
    file.write_text(
        f"""
apiVersion: stageline.dev/v1alpha1
kind: PipelineModel
metadata: {{name: tiny}}
spec:
  model: {{source: "file://{model}"}}
  engine: {{dtype: float32, maxModelLen: {context_length}{engine}}}
  parallelism: {{pipeline: 2}}
  replicas: {replicas}
  restart: {{maxRestarts: 100, windowSeconds: {RESTART_WINDOW_SECONDS}, backoffSeconds: 1}}
  timeouts: {{resumeWindowSeconds: {int(DEADLINE_SECONDS)}{timeouts}}}
"""
    )
    with serving(file, directory, directory / "cache") as served:
        served.wait_serving()
        groups = ChaosGroups(served, model)
        groups.wait_ready(replicas)
        yield groups


def _environment(pid: int) -> dict[str, str]:
    """Variables of a process; empty when it is gone, or has not become its container yet."""
    variables = environment_of(pid)
    return variables if env.GROUP_INDEX in variables else {}
