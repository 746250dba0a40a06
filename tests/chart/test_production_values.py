"""The example of values for production is one that the chart takes, with all that it promises."""

import yaml

from cluster.rendered_chart import NOTES, found, of_kind, rendered_files, rendered_objects
from processes.repository_files import ROOT

VALUES = yaml.safe_load((ROOT / "examples" / "gateway" / "production_values.yaml").read_text(encoding="utf-8"))


def test_the_chart_takes_the_example_and_has_no_caution_left() -> None:
    gateway = found(rendered_objects(VALUES), "Deployment", "stageline-gateway")["spec"]
    assert gateway["replicas"] == 2
    arguments = " ".join(gateway["template"]["spec"]["containers"][0]["args"])
    assert "--keys" in arguments
    assert "--tls-certificate" in arguments
    assert "Caution" not in rendered_files(VALUES)[NOTES]


def test_the_example_serves_both_namespaces_by_roles_in_them() -> None:
    roles = {each["metadata"]["namespace"] for each in of_kind(rendered_objects(VALUES), "Role")}
    assert roles >= {"team-a", "team-b"}
