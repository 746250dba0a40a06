"""Whatever happens, in whatever order: lives of a group never overlap, and each is on record before its pods are."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.planned_cluster import PlannedCluster, is_over, tiny_model
from stageline_api import labels
from stageline_api.engine_access import KEYS_SECRET

EVENTS = st.lists(
    st.one_of(
        st.just(("step",)),
        st.just(("ready",)),
        st.just(("hold",)),
        st.just(("release",)),
        st.tuples(st.just("advance"), st.floats(0, 200)),
        st.tuples(st.just("kill"), st.integers(0, 5), st.sampled_from([0, 1, 64, 71, 73, 137])),
        st.tuples(st.just("vanish"), st.integers(0, 5)),
        st.tuples(st.just("change"), st.integers(0, 3)),
        st.tuples(st.just("scale"), st.integers(0, 3)),
        st.just(("delete",)),
    ),
    max_size=40,
)


def act(cluster: PlannedCluster, event: tuple[object, ...]) -> None:
    names = sorted(cluster.pods)
    match event:
        case ("ready",):
            cluster.make_ready()
        case ("hold",):
            cluster.holds_deletions = True
        case ("release",):
            cluster.holds_deletions = False
            for name, pod in cluster.pods.items():
                if "deletionTimestamp" in pod["metadata"]:
                    del cluster.objects[("Pod", name)]
        case ("advance", float(seconds)):
            cluster.advance(seconds)
        case ("kill", int(pick), int(code)) if names:
            own = cluster.pods[names[pick % len(names)]]["metadata"]["labels"]
            same = [p for p in cluster.pods.values() if p["metadata"]["labels"] == own]
            if len(same) == 1:
                status = same[0]["status"]["containerStatuses"][0]
                status["state"] = {"terminated": {"exitCode": code, "finishedAt": cluster.now.isoformat()}}
                if len(same[0]["status"]["containerStatuses"]) == 1:
                    same[0]["status"]["phase"] = "Failed" if code else "Succeeded"
        case ("vanish", int(pick)) if names:
            del cluster.objects[("Pod", names[pick % len(names)])]
        case ("change", int(seed)):
            generation = (cluster.model.metadata.generation or 0) + 1
            cluster.model = tiny_model(generation, replicas=cluster.model.spec.replicas, engine={"seed": seed})
        case ("scale", int(replicas)):
            generation = (cluster.model.metadata.generation or 0) + 1
            seed = cluster.model.spec.engine.seed
            cluster.model = tiny_model(generation, replicas=replicas, engine={"seed": seed})
        case ("delete",):
            cluster.model = tiny_model(deleted=True)
        case _:
            pass


def check(cluster: PlannedCluster) -> None:
    lives: dict[str, set[str]] = {}
    for pod in cluster.pods.values():
        own = pod["metadata"]["labels"]
        if not is_over(pod):
            lives.setdefault(own[labels.GROUP], set()).add(own[labels.INCARNATION])
    assert all(len(incarnations) == 1 for incarnations in lives.values()), lives
    for each in cluster.objects.values():
        if each["metadata"]["name"] == KEYS_SECRET:
            continue  # of all models of the namespace
        assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == ["u-1"], each["metadata"]
    assert len(cluster.status.last_failures) <= 5


@given(EVENTS)
def test_lives_never_overlap_and_everything_is_owned(events: list[tuple[object, ...]]) -> None:
    cluster = PlannedCluster(tiny_model())
    for event in events:
        act(cluster, event)
        before = {group.index: group.incarnation for group in cluster.status.groups}
        cluster.step()
        check(cluster)
        for group in cluster.status.groups:
            assert group.incarnation in (before.get(group.index, 0), before.get(group.index, 0) + 1) or (
                group.index not in before
            ), (before, cluster.status)


@given(EVENTS)
def test_left_alone_a_model_ends_ready_down_or_gone(events: list[tuple[object, ...]]) -> None:
    cluster = PlannedCluster(tiny_model())
    for event in events:
        act(cluster, event)
        cluster.step()
    act(cluster, ("release",))
    for _ in range(60):
        cluster.advance(61)
        cluster.settle()
        cluster.make_ready()
    phases = {group.phase for group in cluster.status.groups}
    if cluster.model.metadata.deletion_timestamp is not None:
        assert cluster.objects == {}
    else:
        assert phases <= {"Ready", "Failed"}, cluster.status
        spec = cluster.model.spec
        # A surge group of a new revision that has failed for good stays, and holds the rollout: it says why.
        extra = spec.rollout.max_surge if "Failed" in phases else 0
        assert spec.replicas <= len(cluster.status.groups) <= spec.replicas + extra, cluster.status


def test_a_rollout_whose_surge_group_failed_for_good_is_held_with_all_it_serves_by() -> None:
    """Found by the test above, and what is wanted: the old group serves on, the failed one is there to be looked at."""
    cluster = PlannedCluster(tiny_model())
    for event in (("change", 2), ("hold",), ("ready",), ("delete",), ("scale", 2), ("advance", 55.9), ("kill", 5, 64)):
        act(cluster, event)
        cluster.step()
    act(cluster, ("release",))
    for _ in range(60):
        cluster.advance(61)
        cluster.settle()
        cluster.make_ready()
    assert [group.phase for group in cluster.status.groups] == ["Ready", "Ready", "Failed"], cluster.status
    conditions = {each.type: (each.status, each.reason) for each in cluster.status.conditions}
    assert conditions["Available"] == ("True", "AsExpected")
    assert conditions["Degraded"] == ("True", "BadConfiguration")
    assert conditions["Progressing"] == ("False", "ProgressDeadlineExceeded")
