"""Groups on one machine get their parts of its cores and its memory: each counts its own stages alone."""

import os

import pytest

from cluster.planned_cluster import tiny_model
from stageline_api import env
from stageline_local.node.images import LocalImages
from stageline_local.session.local_overrides import THREADS, with_shared_machine

IMAGES = LocalImages(frozenset({"here"}), {"PATH": "/bin"})


@pytest.mark.parametrize(
    ("replicas", "stages", "expected"), [(2, 1, "8"), (2, 2, "4"), (3, 2, "2"), (4, 8, "1"), (1, 2, None)]
)
def test_each_stage_of_several_groups_has_its_part(
    monkeypatch: pytest.MonkeyPatch, replicas: int, stages: int, expected: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    shared = with_shared_machine(IMAGES, tiny_model(replicas=replicas, parallelism={"pipeline": stages}))
    assert shared.env.get(THREADS) == expected
    assert shared.env.get(env.GROUPS_ON_MACHINE) == (None if replicas == 1 else str(replicas))
    assert (shared.names, shared.env["PATH"]) == (IMAGES.names, "/bin")


def test_what_the_caller_has_set_stays() -> None:
    images = LocalImages(IMAGES.names, {THREADS: "5"})
    assert with_shared_machine(images, tiny_model(replicas=2)).env == {THREADS: "5", env.GROUPS_ON_MACHINE: "2"}
