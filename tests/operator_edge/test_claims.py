"""Whose a model is: another installation's as long as that one's Lease is renewed, and a minute more."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from stageline_api.resource.life.status import PipelineModelStatus
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.lead.claims import (
    ABANDONED_SECONDS,
    TELL_AGAIN_SECONDS,
    Claims,
    LeftAlone,
    left_alone_words,
)
from stageline_operator.controller.lead.leader import lease_manifest, released_manifest, served_namespaces
from stageline_operator.controller.settings import LeaseName, LeaseTimes

OTHER = "elsewhere/operator"
MODEL = ModelKey("models", "tiny")


class Leases(KubeApi):
    """One Lease by its version; None is deleted, and `refusal` the status of every answer."""

    def __init__(self) -> None:
        self.version: int | None = 1
        self.refusal = 0
        self.serves: str | None = None
        self.now = 1000.0
        self.looks = 0
        self.claims = Claims(self, LeaseName("here", "operator"), lambda: self.now)

    async def get(self, _resource: Any, namespace: str, name: str) -> dict[str, Any]:
        assert f"{namespace}/{name}" == OTHER
        self.looks += 1
        if self.refusal:
            raise ApiError(f"get leases: {self.refusal}", self.refusal, "")
        if self.version is None:
            raise ApiError("get leases: 404 NotFound", 404, "NotFound")
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if self.serves is not None:
            metadata["annotations"] = {"stageline.dev/served-namespaces": self.serves}
        return {"metadata": metadata, "spec": {"holderIdentity": "x"}}

    def left_alone(self, claimed: str = OTHER, after_seconds: float = 0.0, namespace: str = "models") -> bool:
        self.now += after_seconds
        return asyncio.run(self.claims.is_anothers(claimed, namespace))


def test_a_model_without_a_claim_or_with_the_own_one_is_acted_on_and_no_lease_is_read() -> None:
    leases = Leases()
    assert not leases.left_alone("")
    assert not leases.left_alone("here/operator")
    assert leases.looks == 0


def test_a_lease_that_is_renewed_holds_its_models_for_as_long_as_that_lasts() -> None:
    leases = Leases()
    for version in range(1, 20):
        leases.version = version
        assert leases.left_alone(after_seconds=ABANDONED_SECONDS - 1)


def test_a_lease_that_is_renewed_no_longer_gives_them_up_after_a_minute() -> None:
    leases = Leases()
    assert leases.left_alone(), "what it was before the first look is not known"
    assert leases.left_alone(after_seconds=ABANDONED_SECONDS)
    assert not leases.left_alone(after_seconds=1)
    leases.version = 2
    assert leases.left_alone(after_seconds=10), "its holder is back before they were taken"


@pytest.mark.parametrize("is_known", [True, False], ids=["seen before", "never seen"])
def test_a_deleted_lease_gives_them_up_when_it_is_still_gone_at_a_second_look(is_known: bool) -> None:
    leases = Leases()
    if is_known:
        assert leases.left_alone()
    leases.version = None
    assert leases.left_alone(after_seconds=10), "its holder makes it again within its retries"
    assert leases.left_alone(after_seconds=1), "no second look yet"
    assert not leases.left_alone(after_seconds=10)


def test_a_lease_that_its_holder_has_made_again_was_never_gone() -> None:
    leases = Leases()
    for version in (2, 3, 4):
        leases.version = None
        assert leases.left_alone(after_seconds=10)
        leases.version = version
        assert leases.left_alone(after_seconds=10)


@pytest.mark.parametrize(
    ("serves", "is_left_alone"),
    [(None, True), ("", True), ("models", True), ("a,models,z", True), ("other", False), ("models-2,other", False)],
)
def test_a_holder_whose_namespaces_lack_the_models_does_not_act_on_it(serves: str | None, is_left_alone: bool) -> None:
    leases = Leases()
    leases.serves = serves
    assert leases.left_alone() is is_left_alone


def test_what_an_operator_writes_about_its_namespaces_is_what_others_read() -> None:
    name, now = LeaseName("here", "operator"), datetime(2026, 1, 1, tzinfo=UTC)
    held = lease_manifest(name, "one", LeaseTimes(), now, None, ("b", "a"))
    assert served_namespaces(held) == {"a", "b"}
    held["metadata"]["resourceVersion"] = "1"
    assert served_namespaces(released_manifest(name, held)) == {"a", "b"}
    everywhere = lease_manifest(name, "one", LeaseTimes(), now, held, ())
    assert served_namespaces(everywhere) == frozenset(), "its namespaces may widen again"


def test_an_event_about_a_lease_that_may_not_be_read_says_what_to_do() -> None:
    words = left_alone_words(MODEL, "here/operator", OTHER, is_unreadable=True)
    command = """kubectl -n models patch plm tiny --subresource=status --type=merge -p '{"status":{"operator":""}}'"""
    assert words.endswith(command)
    assert "kubectl" not in left_alone_words(MODEL, "here/operator", OTHER, is_unreadable=False)


def test_a_model_that_is_left_alone_is_told_of_once_and_again_where_a_person_is_needed() -> None:
    told = LeftAlone()
    assert told.is_to_be_told(MODEL, OTHER, 0.0, again=False)
    assert not told.is_to_be_told(MODEL, OTHER, 10 * TELL_AGAIN_SECONDS, again=False)
    assert told.is_to_be_told(MODEL, "third/operator", 1000.0, again=True)
    assert not told.is_to_be_told(MODEL, "third/operator", 1000.0 + TELL_AGAIN_SECONDS - 1, again=True)
    assert told.is_to_be_told(MODEL, "third/operator", 1000.0 + TELL_AGAIN_SECONDS, again=True)
    assert not told.is_to_be_told(MODEL, "third/operator", 1001.0 + TELL_AGAIN_SECONDS, again=True)
    told.forget(MODEL)
    assert told.is_to_be_told(MODEL, "third/operator", 1002.0 + TELL_AGAIN_SECONDS, again=False)


def test_a_lease_that_may_not_be_read_is_never_taken_for_gone() -> None:
    leases = Leases()
    leases.refusal = 403
    assert leases.left_alone()
    assert leases.left_alone(after_seconds=100 * ABANDONED_SECONDS)
    assert leases.claims.is_unreadable(OTHER)
    leases.refusal = 0
    assert leases.left_alone(after_seconds=10), "readable at last: a first look"
    assert not leases.claims.is_unreadable(OTHER)
    assert not leases.left_alone(after_seconds=ABANDONED_SECONDS + 1)


def test_an_api_server_that_does_not_answer_says_nothing_about_the_lease() -> None:
    leases = Leases()
    leases.refusal = 503
    with pytest.raises(ApiError):
        leases.left_alone()


def test_many_models_of_one_lease_are_one_look() -> None:
    leases = Leases()
    assert all(leases.left_alone() for _ in range(100))
    assert leases.looks == 1


def test_an_operator_without_a_lease_acts_without_asking() -> None:
    leases = Leases()
    leases.claims = Claims(leases, None, lambda: leases.now)
    assert not leases.left_alone()
    assert leases.claims.own == ""
    before = PipelineModelStatus(operator=OTHER)
    assert leases.claims.claimed(before).operator == "", "no other one acts on it any more"
    assert Claims(leases, LeaseName("here", "operator")).claimed(before).operator == "here/operator"
