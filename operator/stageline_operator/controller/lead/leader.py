"""Leader election over a Lease: at most one replica acts, and a dead leader is replaced within seconds.

`check` guards every write. It refuses if the last renewal is too old, even if the event loop was blocked. So a replica
that was cut off or frozen stops acting before another one may start. Clocks need not agree: a replica takes a lease
only after it saw no renewal for the lease duration.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import LEASE
from stageline_operator.controller.settings import LeaseName, LeaseTimes

_RELEASE_TRIES: Final = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SeenLease:
    """One version of the lease, and when this replica first saw it (monotonic seconds)."""

    manifest: Mapping[str, Any]
    seen_at: float

    @property
    def holder(self) -> str:
        """Identity of the holder; empty if the lease was released."""
        return str(self.manifest.get("spec", {}).get("holderIdentity") or "")

    @property
    def version(self) -> str:
        """resourceVersion; every renewal changes it."""
        return str(self.manifest["metadata"]["resourceVersion"])

    def may_be_taken(self, identity: str, now: float) -> bool:
        """Whether it was released, is this replica's own, or was not renewed for its duration."""
        if self.holder in ("", identity):
            return True
        duration = float(self.manifest["spec"].get("leaseDurationSeconds") or 0)
        return now - self.seen_at > duration


class NotLeadingError(Exception):
    """This replica may not write: another one may be leading."""


class Leadership:
    """This replica's part in the election. `api` must be its own, so that no other request delays a renewal."""

    def __init__(self, api: KubeApi, name: LeaseName, times: LeaseTimes, identity: str) -> None:
        self._api = api
        self._name = name
        self._times = times
        self._identity = identity
        self._seen: SeenLease | None = None
        self._leads_until = 0.0
        """Monotonic time after which writes are refused."""

    @property
    def is_leading(self) -> bool:
        return time.monotonic() < self._leads_until

    def check(self, what: str) -> None:
        if not self.is_leading:
            raise NotLeadingError(f"{what}: not the leader")

    async def run(self, lead: Callable[[], Awaitable[None]], can_act: Callable[[], bool] = lambda: True) -> None:
        """Compete until cancelled. `lead` runs while this replica leads and is cancelled when the lease is lost.

        A replica that can't act does not take the lease, and releases it if it holds it.
        """
        try:
            while True:
                if can_act() and await self._try():
                    await self._lead(lead, can_act)
                    if not can_act():
                        await self.release()
                await asyncio.sleep(self._times.retry_seconds)
        finally:
            self._leads_until = 0.0

    async def release(self) -> None:
        """Release the lease, so that no replica waits for its expiry; call it after all passes have ended."""
        self._leads_until = 0.0
        try:
            if self._seen is None or self._seen.holder != self._identity:
                return
            for tries_left in reversed(range(_RELEASE_TRIES)):
                if await self._write_release(self._seen, may_fail=tries_left > 0):
                    break
                # A renewal or release whose response was lost may have been written.
                await self._look()
                if self._seen is None or self._seen.holder not in ("", self._identity):
                    return
                if not self._seen.holder:
                    break
            _log.info("released lease %s/%s", self._name.namespace, self._name.name)
        except ApiError as error:
            _log.warning("could not release the lease; it expires on its own: %s", error)

    async def _write_release(self, seen: SeenLease, may_fail: bool) -> bool:
        """Returns False if it `may_fail` and the lease has changed or no response came. Raises `ApiError`."""
        try:
            await self._api.replace(LEASE, released_manifest(self._name, seen.manifest))
        except ApiError as error:
            if not (may_fail and (error.is_conflict or error.is_passing)):
                raise
            return False
        return True

    async def _lead(self, lead: Callable[[], Awaitable[None]], can_act: Callable[[], bool]) -> None:
        _log.info("leading as %s", self._identity)
        acting = asyncio.ensure_future(lead())
        try:
            while self.is_leading and can_act() and not acting.done():
                await asyncio.wait({acting}, timeout=self._times.retry_seconds)
                await self._try()
        finally:
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)
        if not acting.cancelled() and (error := acting.exception()) is not None:
            raise error
        why = "the lease could not be renewed in time or was taken" if can_act() else "nothing can be served"
        _log.warning("no longer leading: %s", why)

    async def _try(self) -> bool:
        """Take or renew the lease; returns whether this replica leads."""
        began = time.monotonic()
        try:
            held = await self._write_lease()
        except ApiError as error:
            if error.is_conflict:
                self._leads_until = 0.0  # another replica wrote: read again before acting
            else:
                _log.warning("lease: %s", error)
            return self.is_leading
        if held:
            self._leads_until = began + self._times.renew_deadline_seconds
        else:
            self._leads_until = 0.0
        return held

    async def _write_lease(self) -> bool:
        """Returns False while another replica holds it. Raises `ApiError`."""
        if self._seen is None or self._seen.holder != self._identity or not self.is_leading:
            await self._look()
        now = time.monotonic()
        if self._seen is not None and not self._seen.may_be_taken(self._identity, now):
            return False
        before = None if self._seen is None else self._seen.manifest
        wall = datetime.now(UTC)
        manifest = lease_manifest(self._name, self._identity, self._times, wall, before)
        if before is None:
            written = await self._api.create(LEASE, manifest, {})
        else:
            written = await self._api.replace(LEASE, manifest)
        self._seen = SeenLease(written, now)
        return True

    async def _look(self) -> None:
        try:
            manifest = await self._api.get(LEASE, self._name.namespace, self._name.name)
        except ApiError as error:
            if not error.is_not_found:
                raise
            self._seen = None
            return
        self._seen = see(manifest, self._seen, time.monotonic())


def see(manifest: Mapping[str, Any], before: SeenLease | None, now: float) -> SeenLease:
    """The version just read; a version seen before keeps its time."""
    if before is not None and before.version == manifest["metadata"]["resourceVersion"]:
        return before
    return SeenLease(manifest, now)


def lease_manifest(
    name: LeaseName,
    identity: str,
    times: LeaseTimes,
    wall: datetime,
    before: Mapping[str, Any] | None,
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
    spec = dict(before["spec"]) | {"holderIdentity": "", "leaseDurationSeconds": 1}
    return _manifest(name, spec, before)


def _manifest(name: LeaseName, spec: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name.name, "namespace": name.namespace}
    if before is not None:
        metadata["resourceVersion"] = before["metadata"]["resourceVersion"]
    return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": dict(spec)}
