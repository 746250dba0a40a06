"""The objects of a `stageline up` in one file, in the format of a cluster's API server.

Contains the PipelineModel with its status, its pods, recently ended pods, ConfigMaps and Events, and never a Secret. It
is replaced by atomic rename and outlives the session, so that a failed run can be examined.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.node.pod_status import timestamp
from stageline_local.replaced_file import replace_file
from stageline_operator.planner.types import PlannedEvent

STATE_FILE: Final = "state.json"
_MAX_ENDED_PODS: Final = 32
_MAX_EVENTS: Final = 256


class LocalState(BaseModel):
    """Objects in Kubernetes form."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    manifest: dict[str, Any]
    """The PipelineModel, including its status."""
    pods: tuple[dict[str, Any], ...] = ()
    ended_pods: tuple[dict[str, Any], ...] = ()
    """Their last state, oldest first."""
    config_maps: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()


def read_state(state_dir: Path) -> LocalState | None:
    """The last state of a directory's session; None if there is no readable one."""
    try:
        return LocalState.model_validate_json((state_dir / STATE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


class StateRecorder:
    def __init__(self, path: Path, model: PipelineModel) -> None:
        self._path = path
        self._manifest = model.to_manifest()
        self._last_seen: dict[str, dict[str, Any]] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=_MAX_ENDED_PODS)
        self._events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self._written = ""

    def add_event(self, event: PlannedEvent) -> None:
        """Keep an Event; the next `write` includes it."""
        self._events.append(
            {
                "type": event.type,
                "reason": event.reason,
                "message": event.message,
                "lastTimestamp": timestamp(datetime.now(UTC)),
                "involvedObject": {"kind": "PipelineModel", "name": self._manifest["metadata"]["name"]},
            }
        )

    def write(
        self, status: PipelineModelStatus, pods: Sequence[dict[str, Any]], config_maps: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replace the file if something has changed."""
        seen = {pod["metadata"]["name"]: pod for pod in pods}
        self._ended.extend(pod for name, pod in self._last_seen.items() if name not in seen)
        self._last_seen = seen
        state = LocalState(
            manifest=self._manifest | {"status": status.to_manifest()},
            pods=tuple(pods),
            ended_pods=tuple(self._ended),
            config_maps=tuple(dict(each) for each in config_maps),
            events=tuple(self._events),
        )
        text = state.model_dump_json()
        if text == self._written:
            return
        replace_file(self._path, text, mode=0o600)
        self._written = text
