"""Who may lead: a lease is taken only when its holder can't be acting any more."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.resource.life.status import PipelineModelStatus
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.lead.leader import Leadership, SeenLease, lease_manifest, released_manifest, see
from stageline_operator.controller.settings import LeaseName, LeaseTimes, OperatorSettings

NAME = LeaseName("ns", "lease")
TIMES = LeaseTimes()
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def stored(manifest: dict[str, Any], version: int) -> dict[str, Any]:
    return manifest | {"metadata": manifest["metadata"] | {"resourceVersion": str(version)}}


@pytest.mark.parametrize(
    ("own", "claimed", "is_anothers"),
    [
        (NAME, "", False),
        (NAME, "ns/lease", False),
        (NAME, "ns/other", True),
        (NAME, "other/lease", True),
        (None, "ns/other", False),
    ],
)
def test_a_model_belongs_to_the_installation_whose_lease_its_status_names(
    own: LeaseName | None, claimed: str, is_anothers: bool
) -> None:
    settings = OperatorSettings("image", "me", lease=own)
    assert settings.is_anothers(PipelineModelStatus(operator=claimed)) is is_anothers


def test_a_lease_in_use_is_taken_only_after_its_own_duration_without_a_renewal() -> None:
    lease = stored(lease_manifest(NAME, "one", TIMES, NOW, None), 1)
    seen = see(lease, None, 100.0)
    assert not seen.may_be_taken("two", 100.0 + TIMES.duration_seconds)
    assert seen.may_be_taken("two", 100.1 + TIMES.duration_seconds)
    assert seen.may_be_taken("one", 100.0), "its holder may always renew it"


def test_a_renewal_starts_the_wait_anew_and_a_second_look_does_not() -> None:
    first = stored(lease_manifest(NAME, "one", TIMES, NOW, None), 1)
    seen = see(first, None, 100.0)
    assert see(first, seen, 105.0).seen_at == 100.0
    renewed = stored(lease_manifest(NAME, "one", TIMES, NOW, first), 2)
    assert see(renewed, seen, 105.0).seen_at == 105.0


def test_a_released_lease_is_free_at_once() -> None:
    held = stored(lease_manifest(NAME, "one", TIMES, NOW, None), 1)
    released = stored(released_manifest(NAME, held), 2)
    assert SeenLease(released, 0.0).may_be_taken("two", 0.0)


def test_a_take_over_counts_and_a_renewal_does_not() -> None:
    held = stored(lease_manifest(NAME, "one", TIMES, NOW, None), 1)
    renewed = lease_manifest(NAME, "one", TIMES, NOW, held)
    taken = lease_manifest(NAME, "two", TIMES, NOW, held)
    assert renewed["spec"]["leaseTransitions"] == 0
    assert taken["spec"]["leaseTransitions"] == 1
    assert taken["metadata"]["resourceVersion"] == "1", "a write over another version must fail"


@given(duration=st.floats(1, 60), deadline=st.floats(0.1, 60), write=st.floats(0.1, 30), retry=st.floats(0.1, 5))
def test_times_that_would_let_two_replicas_act_are_refused(
    duration: float, deadline: float, write: float, retry: float
) -> None:
    """The last write of an old leader ends `deadline + write` after its renewal; another may start after `duration`."""
    if deadline + write >= duration:
        with pytest.raises(ValueError, match="two leaders"):
            LeaseTimes(duration, deadline, retry, write)
    else:
        LeaseTimes(duration, deadline, retry, write)


class OneLease(KubeApi):
    """Keeps one Lease as an API server would; from `cut_off` on it still writes and its answers get lost."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.cut_off = False
        self.unanswered = asyncio.Event()
        self.released = asyncio.Event()

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])

    async def get(self, *_where: Any) -> dict[str, Any]:
        if self.lease is None:
            raise ApiError("get leases: 404 NotFound", 404, "NotFound")
        return self.lease

    async def create(self, _resource: Any, manifest: Mapping[str, Any], _query: Any) -> dict[str, Any]:
        return await self._keep(manifest, 1)

    async def replace(self, _resource: Any, manifest: Mapping[str, Any]) -> dict[str, Any]:
        version = (await self.get())["metadata"]["resourceVersion"]
        if manifest["metadata"]["resourceVersion"] != version:
            raise ApiError("update leases: 409 Conflict", 409, "Conflict")
        return await self._keep(manifest, int(version) + 1)

    async def _keep(self, manifest: Mapping[str, Any], version: int) -> dict[str, Any]:
        self.lease = stored(dict(manifest), version)
        if not self.holder:
            self.released.set()
        if self.cut_off:
            self.unanswered.set()
            await asyncio.Event().wait()
        return self.lease


async def lead_and_release(api: OneLease, times: LeaseTimes, at_the_end: Callable[[], Awaitable[Any]]) -> str:
    """Lead until `at_the_end` returns, then give the lease up; who holds it after that."""
    leads = asyncio.Event()

    async def lead() -> None:
        leads.set()
        await asyncio.Event().wait()

    leadership = Leadership(api, NAME, times, "one")
    competing = asyncio.create_task(leadership.run(lead))
    async with asyncio.timeout(120):
        await leads.wait()
        await at_the_end()
    competing.cancel()
    await asyncio.gather(competing, return_exceptions=True)
    await leadership.release()
    assert api.lease is not None
    return str(api.lease["spec"]["holderIdentity"])


def test_a_renewal_that_is_cut_off_by_the_order_to_stop_does_not_keep_the_lease_from_being_released() -> None:
    """It was written, and its version never heard of."""

    async def scenario() -> str:
        api = OneLease()

        async def cut_a_renewal_off() -> None:
            api.cut_off = True
            await api.unanswered.wait()
            api.cut_off = False

        return await lead_and_release(api, LeaseTimes(retry_seconds=0.01), cut_a_renewal_off)

    assert asyncio.run(scenario()) == ""


def test_a_replica_that_can_not_act_takes_no_lease_and_gives_up_the_one_it_holds() -> None:
    able = False
    looked, leads = asyncio.Event(), asyncio.Event()

    def can_act() -> bool:
        looked.set()
        return able

    async def lead() -> None:
        leads.set()
        await asyncio.Event().wait()

    async def scenario() -> list[str]:
        nonlocal able
        api = OneLease()
        leadership = Leadership(api, NAME, LeaseTimes(retry_seconds=0.01), "one")
        competing = asyncio.create_task(leadership.run(lead, can_act))
        async with asyncio.timeout(120):
            await looked.wait()
            before = "nobody" if api.lease is None else api.holder
            able = True
            await leads.wait()
            during = api.holder
            able = False
            await api.released.wait()
        competing.cancel()
        await asyncio.gather(competing, return_exceptions=True)
        return [before, during, api.holder]

    assert asyncio.run(scenario()) == ["nobody", "one", ""]


class NoAnswerOnce(OneLease):
    """The first release gets no answer; `meanwhile` says what has become of the lease all the same."""

    def __init__(self, meanwhile: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self._meanwhile = meanwhile
        self.has_failed = False

    async def replace(self, resource: Any, manifest: Mapping[str, Any]) -> dict[str, Any]:
        if manifest["spec"]["holderIdentity"] or self.has_failed:
            return await super().replace(resource, manifest)
        self.has_failed = True
        assert self.lease is not None
        self.lease = self._meanwhile(self.lease, stored(dict(manifest), 100))
        raise ApiError("update leases: no answer", 0)


def taken_by_another(kept: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    return stored(lease_manifest(NAME, "two", TIMES, NOW, kept), 100)


@pytest.mark.parametrize(
    ("meanwhile", "holder", "is_told"),
    [
        (lambda _kept, released: released, "", True),
        (lambda kept, _released: kept, "", True),
        (taken_by_another, "two", False),
    ],
    ids=["written", "not-written", "taken"],
)
def test_a_release_that_gets_no_answer_is_tried_again_while_the_lease_is_ours(
    meanwhile: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
    holder: str,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> str:
        api = NoAnswerOnce(meanwhile)
        left = await lead_and_release(api, TIMES, partial(asyncio.sleep, 0))
        assert api.has_failed
        return left

    with caplog.at_level("INFO"):
        assert asyncio.run(scenario()) == holder
    assert ("released lease ns/lease" in caplog.text) == is_told
