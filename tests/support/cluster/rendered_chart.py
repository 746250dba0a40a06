"""The chart, rendered by Helm's own engine: objects as a cluster would get them, without a cluster."""

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

from processes.repository_files import ROOT

CHART: Final = ROOT / "charts" / "stageline"
NOTES: Final = "stageline/templates/NOTES.txt"
RELEASE: Final = "stageline"
NAMESPACE: Final = "stageline-system"


def rendered_files(
    values: Mapping[str, Any] | None = None, name: str = RELEASE, namespace: str = NAMESPACE, chart: Path = CHART
) -> dict[str, str]:
    """Text by template. Raises `helm_python.HelmValuesError` for values that the schema refuses."""
    if chart != CHART:
        return _render(chart, json.dumps(values or {}), name, namespace)
    return dict(_of_the_chart(json.dumps(values or {}), name, namespace))


@cache
def _of_the_chart(values: str, name: str, namespace: str) -> dict[str, str]:
    return _render(CHART, values, name, namespace)


def _render(chart: Path, values: str, name: str, namespace: str) -> dict[str, str]:
    with helm_python.Chart.load(chart) as loaded:
        return loaded.render(json.loads(values), name=name, namespace=namespace)


def rendered_objects(values: Mapping[str, Any] | None = None, **how: Any) -> list[dict[str, Any]]:
    """Every object that the chart makes."""
    files = rendered_files(values, **how)
    return [
        each
        for name, text in files.items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each is not None
    ]


def rendered_rules(**monitoring: Any) -> dict[str, dict[str, Any]]:
    """Specs of the PrometheusRules, by the name of the file that each was made from."""
    objects = of_kind(rendered_objects({"monitoring": {"rules": "always", **monitoring}}), "PrometheusRule")
    return {each["metadata"]["name"].removeprefix("stageline-").replace("-", "_"): each["spec"] for each in objects}


def found(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The one object of a kind, or of a kind and name."""
    named = [each for each in of_kind(objects, kind) if name in (None, each["metadata"]["name"])]
    assert len(named) == 1, f"{kind} {name}: {[each['metadata']['name'] for each in of_kind(objects, kind)]}"
    return named[0]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """All objects of a kind."""
    return [each for each in objects if each["kind"] == kind]


def pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods' specs of all Deployments."""
    return [each["spec"]["template"]["spec"] for each in of_kind(objects, "Deployment")]


def copy_of_chart(directory: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(CHART, directory / "stageline"))
