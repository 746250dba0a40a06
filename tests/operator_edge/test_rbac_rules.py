"""The role grants what the operator does and no more, and the chart has the very same rules."""

from typing import Any

from stageline_operator.controller.client.rbac import CHART_FILE, lease_rules, node_rules, render, workload_rules

ALL = [*workload_rules(), *node_rules(), *lease_rules()]


def verbs_on(resource: str) -> set[str]:
    return {verb for rule in ALL if resource in rule["resources"] for verb in rule["verbs"]}


def test_the_chart_has_the_generated_rules() -> None:
    assert CHART_FILE.read_text(encoding="utf-8") == render(), "run python -m stageline_operator.controller.client.rbac"


def test_nothing_is_granted_on_everything() -> None:
    def flat(rule: dict[str, Any]) -> list[str]:
        return [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]

    assert not [rule for rule in ALL if "*" in flat(rule)]


def test_secrets_can_be_made_and_never_read() -> None:
    """A patch is answered with the whole object, so it would be as good as reading."""
    assert verbs_on("secrets") == {"create"}


def test_nodes_and_pipelinemodels_are_never_changed() -> None:
    assert verbs_on("nodes") == {"get", "list", "watch"}
    assert verbs_on("pipelinemodels") == {"get", "list", "watch"}
    assert verbs_on("pipelinemodels/status") <= {"get", "patch"}
    assert verbs_on("pipelinemodels/scale") == {"patch"}, "the number of groups, for spec.autoscaling"
