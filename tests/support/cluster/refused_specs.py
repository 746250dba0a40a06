"""The specs that `stageline validate` refuses, as objects: the same tables that its own tests read."""

import importlib.util
from typing import Any

import yaml

from processes.repository_files import ROOT

_HEAD = {"apiVersion": "stageline.dev/v1alpha1", "kind": "PipelineModel", "metadata": {"name": "m"}}


def refused_manifests() -> dict[str, tuple[dict[str, Any], str]]:
    """Manifest and the line that a person reads, by the case's name."""
    path = ROOT / "tests" / "api" / "test_refused_manifests.py"
    found = importlib.util.spec_from_file_location("refused_manifest_tables", path)
    assert found is not None
    assert found.loader is not None
    tables = importlib.util.module_from_spec(found)
    found.loader.exec_module(tables)
    cases = {name: (f"{tables.MODEL}  {text}", line) for name, (text, line) in tables.SPEC_CASES.items()}
    cases |= {name: (f"  model: {text}", line) for name, (text, line) in tables.MODEL_CASES.items()}
    return {
        name: ({**_HEAD, "spec": yaml.safe_load(f"spec:\n{text}\n")["spec"]}, line)
        for name, (text, line) in cases.items()
    }
