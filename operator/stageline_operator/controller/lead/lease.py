"""A Lease as replicas read and write it: who leads, since when, and whether it may be taken. Pure.

Clocks of two machines need not agree: a replica takes a lease only after it has itself seen no renewal for as long as
the lease lasts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stageline_operator.controller.client.resources import LEASE
from stageline_operator.controller.settings import LeaseName, LeaseTimes


@dataclass(frozen=True)
class SeenLease:
    """One version of the lease, and when this replica first saw it (monotonic seconds)."""

    manifest: Mapping[str, Any]
    seen_at: float

    @property
    def holder(self) -> str:
        """Identity of the holder; empty when it was released."""
        return str(self.manifest.get("spec", {}).get("holderIdentity") or "")

    @property
    def version(self) -> str:
        """resourceVersion, which every renewal changes."""
        return str(self.manifest["metadata"]["resourceVersion"])

    def may_be_taken(self, identity: str, now: float) -> bool:
        """Whether it was released, is our own, or was not renewed for as long as its holder said it lasts."""
        if self.holder in ("", identity):
            return True
        duration = float(self.manifest["spec"].get("leaseDurationSeconds") or 0)
        return now - self.seen_at > duration


def see(manifest: Mapping[str, Any], before: SeenLease | None, now: float) -> SeenLease:
    """The version just read; one that was seen before keeps the time at which it was first seen."""
    if before is not None and before.version == manifest["metadata"]["resourceVersion"]:
        return before
    return SeenLease(manifest, now)


def lease_manifest(
    name: LeaseName, identity: str, times: LeaseTimes, wall: datetime, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The lease held by `identity`, over the version `before` (None: there is none yet)."""
    spec = dict((before or {}).get("spec", {}))
    moment = wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if spec.get("holderIdentity") != identity:
        spec["acquireTime"] = moment
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if before else 0)
    spec |= {"holderIdentity": identity, "renewTime": moment, "leaseDurationSeconds": round(times.duration_seconds)}
    return _manifest(name, spec, before)


def released_manifest(name: LeaseName, before: Mapping[str, Any]) -> dict[str, Any]:
    return _manifest(name, dict(before["spec"]) | {"holderIdentity": "", "leaseDurationSeconds": 1}, before)


def _manifest(name: LeaseName, spec: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name.name, "namespace": name.namespace}
    if before is not None:
        metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": dict(spec)}
