"""Whatever fails, in whatever order, seen however late, with the operator crashing anywhere: what always holds.

Of a group never two incarnations at once, so never two that could serve. A rollout drains no group that serves unless
enough others do. Incarnations only rise, each is on record before its pods are. Everything has its owner. Restarts
stay within the budget. While most nodes are silent no pod of theirs is given up. And when faults stop, a model ends
as its spec says, or down for a reason.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.planned_cluster import is_over, tiny_model
from cluster.simulated_control_plane import SimulatedControlPlane, Snapshot
from stageline_api import labels
from stageline_api.engine_access import KEYS_SECRET
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_operator.planner.objects.identity import config_map_name, revision_of
from stageline_operator.planner.observed.node_losses import is_outage
from stageline_operator.planner.types import Plan

MAX_RESTARTS = 3
LEAVING = ("Replacing", "Draining")
ROLLOUTS = [(1, 0), (0, 1), (1, 1), (2, 0), (0, 2)]


class FaultyCluster(RuleBasedStateMachine):
    """One model of two stages on a few nodes."""

    @initialize(
        nodes=st.integers(2, 8), replicas=st.integers(1, 3), rollout=st.sampled_from(ROLLOUTS), sees_nodes=st.booleans()
    )
    def start(self, nodes: int, replicas: int, rollout: tuple[int, int], sees_nodes: bool) -> None:
        self.generation = 1
        self.spec: dict[str, Any] = {
            "replicas": replicas,
            "rollout": {"maxSurge": rollout[0], "maxUnavailable": rollout[1]},
            "restart": {"maxRestarts": MAX_RESTARTS, "windowSeconds": 86400},
        }
        self.cluster = SimulatedControlPlane(tiny_model(**self.spec), nodes, sees_nodes)
        self.has_bad_config = False

    def _edit(self, **spec: Any) -> None:
        self.generation += 1
        self.spec |= spec
        self.cluster.model = tiny_model(self.generation, **self.spec)

    def _pick(self, which: int) -> str | None:
        names = sorted(self.cluster.truth.pods)
        return names[which % len(names)] if names else None

    # The operator.

    @rule(lag=st.integers(0, 3))
    def passes(self, lag: int) -> None:
        planned, shown, before = self.cluster.run_pass(lag)
        self._check_pass(planned, shown, before)

    @rule(lag=st.integers(0, 3), writes=st.integers(0, 5))
    def crashes_during_a_pass(self, lag: int, writes: int) -> None:
        planned, shown, before = self.cluster.run_pass(lag, writes)
        self._check_pass(planned, shown, before)

    @rule()
    def goes_on(self) -> None:
        for _ in range(5):
            self.passes(0)
            self.cluster.schedule()
            self.cluster.finish_deletions()
            self.cluster.make_ready()

    # The cluster.

    @rule()
    def schedules(self) -> None:
        self.cluster.schedule()

    @rule()
    def becomes_ready(self) -> None:
        self.cluster.make_ready()

    @rule()
    def confirms_deletions(self) -> None:
        self.cluster.finish_deletions()

    @rule(seconds=st.sampled_from([0.5, 5, 61, 400, 4000]))
    def waits(self, seconds: float) -> None:
        self.cluster.advance(seconds)

    @rule(which=st.integers(0, 9), code=st.sampled_from([0, 1, 65, 70, 71, 137]))
    def a_pod_ends(self, which: int, code: int) -> None:
        if (name := self._pick(which)) is not None:
            self.cluster.end(name, code)

    @rule(which=st.integers(0, 9))
    def a_pod_says_that_its_config_is_bad(self, which: int) -> None:
        if (name := self._pick(which)) is not None:
            self.cluster.end(name, 64)
            self.has_bad_config = True

    @rule(which=st.integers(0, 9))
    def an_image_is_refused(self, which: int) -> None:
        if (name := self._pick(which)) is not None:
            self.cluster.refuse_image(name)

    @rule(which=st.integers(0, 9))
    def a_pod_vanishes(self, which: int) -> None:
        if (name := self._pick(which)) is not None:
            self.cluster.remove(name)

    @rule(which=st.integers(0, 9))
    def a_pod_is_evicted(self, which: int) -> None:
        if (name := self._pick(which)) is not None:
            self.cluster.evict(name)

    @rule(which=st.integers(0, 7))
    def a_node_is_lost(self, which: int) -> None:
        self.cluster.lose(self.cluster.nodes[which % len(self.cluster.nodes)])

    @rule(pods=st.integers(0, 8))
    def a_quota_is_set(self, pods: int) -> None:
        self.cluster.quota = pods

    @rule()
    def nodes_come_back(self) -> None:
        self.cluster.heal()

    @rule(group=st.none() | st.integers(0, 3))
    def a_status_is_lost(self, group: int | None) -> None:
        self.cluster.lose_status(group)

    @rule(which=st.integers(0, 3))
    def a_phase_is_not_known(self, which: int) -> None:
        """Another version of the operator wrote it, and was rolled back."""
        status = self.cluster.status
        if which < len(status.groups):
            unknown = status.groups[which].model_copy(update={"phase": "Hibernating"})
            groups = (*status.groups[:which], unknown, *status.groups[which + 1 :])
            self.cluster.status = status.model_copy(update={"groups": groups})

    # The person.

    @rule(seed=st.integers(0, 2))
    def changes_the_template(self, seed: int) -> None:
        self._edit(engine={"seed": seed})

    @rule(replicas=st.integers(0, 3), partition=st.integers(0, 2))
    def scales(self, replicas: int, partition: int) -> None:
        self._edit(replicas=replicas, rollout=self.spec["rollout"] | {"partition": partition})

    @rule(suspend=st.booleans())
    def suspends(self, suspend: bool) -> None:
        self._edit(suspend=suspend)

    # What always holds.

    def _check_pass(self, planned: Plan, shown: Snapshot, before: PipelineModelStatus) -> None:
        spec = self.cluster.model.spec
        serving = shown.serving(before)
        drained = {
            int(shown.pods[each.name]["metadata"]["labels"][labels.GROUP])
            for each in planned.delete
            if each.kind == "Pod" and each.name in shown.pods
        }
        left_before = {g.index for g in before.groups if g.phase in LEAVING}
        leaving = {g.index for g in planned.status.groups if g.phase in LEAVING}
        assert serving & drained <= leaving, f"drained {drained} of {serving}: {planned.status}"
        # Once it is on record that a group leaves it does so, even if another fails meanwhile.
        if serving & (leaving - left_before) and not spec.suspend:
            floor = max(spec.replicas - spec.rollout.max_unavailable, 0)
            if spec.replicas > 1 or (spec.replicas == 1 and spec.rollout.max_surge > 0):
                floor = max(floor, 1)
            counted = f"served {serving}, leaving {leaving} after {left_before}, floor {floor}"
            assert len(serving - leaving) >= floor, f"{counted}: {planned.status}"
        self._check_that_an_outage_costs_nothing(planned, shown)
        made = {g.index for g in planned.status.groups} - {g.index for g in before.groups} - set(shown.incarnations())
        if made:
            total = sum(g.phase != "Draining" for g in planned.status.groups)
            assert total <= spec.replicas + spec.rollout.max_surge, f"made {made}: {planned.status}"
        for group in planned.status.groups:
            assert len(group.restarts) <= MAX_RESTARTS, group

    def _check_that_an_outage_costs_nothing(self, planned: Plan, shown: Snapshot) -> None:
        silent = shown.lost_nodes & shown.nodes
        if not (self.cluster.sees_nodes and is_outage(len(silent), len(shown.nodes))):
            return
        for each in planned.delete:
            node = shown.pods[each.name]["spec"].get("nodeName") if each.name in shown.pods else None
            assert each.grace_seconds != 0.0 or node not in silent, f"{each} while {silent} of {shown.nodes} are silent"

    @precondition(lambda self: hasattr(self, "cluster"))
    @invariant()
    def lives_do_not_overlap(self) -> None:
        lives: dict[str, set[str]] = {}
        for pod in self.cluster.truth.pods.values():
            own = pod["metadata"]["labels"]
            if not is_over(pod):
                lives.setdefault(own[labels.GROUP], set()).add(own[labels.INCARNATION])
        assert all(len(incarnations) == 1 for incarnations in lives.values()), lives

    @precondition(lambda self: hasattr(self, "cluster"))
    @invariant()
    def everything_is_owned(self) -> None:
        for each in self.cluster.truth.objects.values():
            if each["metadata"]["name"] == KEYS_SECRET:
                continue  # of all models of the namespace
            assert [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == ["u-1"], each["metadata"]
        assert len(self.cluster.status.last_failures) <= 5

    def teardown(self) -> None:
        """Faults stop, there is room for all, and time goes on."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.heal()
        cluster.quota = 1000
        cluster.nodes += [f"spare-{number}" for number in range(12)]
        calm = 0
        for _ in range(150):
            status = cluster.status
            self.passes(0)
            is_calm = cluster.status == status and {g.phase for g in status.groups} <= {"Ready", "Failed"}
            calm = calm + 1 if is_calm else 0
            if calm == 3:
                break
            cluster.schedule()
            cluster.finish_deletions()
            for pod in cluster.truth.pods.values():  # a kubelet that is refused an image tries again
                for each in pod["status"]["containerStatuses"]:
                    if (
                        each["state"].get("waiting", {}).get("reason") == "ImagePullBackOff"
                        and "nodeName" in pod["spec"]
                    ):
                        each["state"] = {"running": {}}
            cluster.make_ready()
            cluster.advance(31)
        self._check_end(cluster)

    def _check_end(self, cluster: SimulatedControlPlane) -> None:
        spec, groups = cluster.model.spec, cluster.status.groups
        if spec.suspend:
            assert (groups, cluster.truth.pods) == ((), {}), cluster.status
            return
        assert {group.phase for group in groups} <= {"Ready", "Failed"}, cluster.status
        ready = [group for group in groups if group.phase == "Ready"]
        if len(ready) == len(groups):
            assert len(groups) == spec.replicas, cluster.status
            outdated = [group for group in groups if group.revision != revision_of(cluster.model)]
            assert len(outdated) <= spec.rollout.partition, cluster.status
            conditions = {each.type: each.status for each in cluster.status.conditions}
            wrong = dict.fromkeys(("Progressing", "Degraded", "Stalled"), "False")
            assert conditions == {"Available": "True" if spec.replicas else "False", "Ready": "True"} | wrong
        names = {f"tiny-{g.index}-{g.incarnation}" for g in groups} | {"tiny-stages", "tiny-engine"}
        assert {name for kind, name in cluster.truth.objects if kind == "NetworkPolicy"} == names
        configs = {
            config_map_name(cluster.model, each) for each in (revision_of(cluster.model), *(g.revision for g in groups))
        }
        assert {name for kind, name in cluster.truth.objects if kind == "ConfigMap"} == configs


TestFaultyCluster = FaultyCluster.TestCase
TestFaultyCluster.settings = settings(stateful_step_count=40)


def test_a_node_that_is_given_up_costs_its_group_alone_and_is_seen_through_the_cache() -> None:
    """By what the cache keeps of nodes: without their taints nobody would take the group for lost."""
    cluster = SimulatedControlPlane(tiny_model(replicas=2), num_nodes=6)
    for _ in range(4):
        cluster.run_pass()
        cluster.schedule()
        cluster.make_ready()
    assert [(group.incarnation, group.phase) for group in cluster.status.groups] == [(1, "Ready")] * 2
    lost = next(pod for name, pod in cluster.truth.pods.items() if name.startswith("tiny-1-"))["spec"]["nodeName"]
    cluster.lose(lost)
    cluster.advance(11)
    for _ in range(3):
        cluster.run_pass()
        cluster.finish_deletions()
    lives = {group.index: (group.incarnation, group.phase) for group in cluster.status.groups}
    assert lives[0] == (1, "Ready"), cluster.status
    assert lives[1] != (1, "Ready"), cluster.status
    assert [failure.reason for failure in cluster.status.last_failures] == ["NodeLost"], cluster.status
