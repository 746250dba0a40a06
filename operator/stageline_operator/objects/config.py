"""The resolved config of a model's containers, and the ConfigMap that carries it."""

from typing import Any, Final

from stageline_api.pipeline_model import PipelineModel
from stageline_api.runtime_config import RuntimeConfig
from stageline_operator.objects.identity import config_map_name, object_metadata

CONFIG_DIR: Final = "/etc/stageline"
CONFIG_FILE: Final = "config.json"
CACHE_DIR: Final = "/var/cache/stageline"


def build_config(model: PipelineModel) -> RuntimeConfig:
    """Apply all defaults; what containers read is complete."""
    engine = model.spec.engine
    return RuntimeConfig(
        model_name=model.name,
        namespace=model.namespace,
        served_name=model.served_name,
        source=model.spec.model.parsed_source.canonical,
        cache_dir=CACHE_DIR,
        stage_count=model.spec.parallelism.pipeline,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        graphs=engine.graphs,
        seed=engine.seed,
        stage_layers=model.spec.stage_layers,
        network_interface=model.spec.network.interface,
        timeouts=model.spec.timeouts.to_runtime(),
    )


def build_config_map(model: PipelineModel, revision: str) -> dict[str, Any]:
    """The config of one revision; immutable, since another revision has another name."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(model, config_map_name(model, revision), "config"),
        "immutable": True,
        "data": {CONFIG_FILE: build_config(model).model_dump_json(indent=2) + "\n"},
    }
