"""The resolved config of a model's containers, and the ConfigMap that carries it."""

import json
from typing import Any, Final, assert_never

from stageline_api import labels
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.quantities import parse_quantity
from stageline_api.resource.serving.model import CacheSpec
from stageline_api.resource.serving.model_source import (
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    ModelSource,
    PackageSource,
)
from stageline_api.resource.serving.speculative import SpeculativeSpec
from stageline_api.runtime_config import LoraAdapter, RuntimeConfig, SpeculativeConfig, TlsConfig
from stageline_operator.planner.objects.identity import (
    certificate_name,
    config_map_name,
    object_metadata,
    resolved_spec,
)
from stageline_operator.planner.objects.pod_resources import find_step_limits

CONFIG_DIR: Final = "/etc/stageline"
CONFIG_FILE: Final = "config.json"
SPEC_FILE: Final = "spec.json"
"""The spec that the revision was made from, with the defaults of that time. The operator needs it to recreate a group
of an old revision without mixing the defaults of two versions.
"""
CACHE_DIR: Final = "/var/cache/stageline"
COMPILED_DIR: Final = "/var/cache/stageline-compiled"
"""Where a stage keeps compiled kernels. Not below `CACHE_DIR`, which is read-only for most stages."""
SOURCE_DIR: Final = "/var/lib/stageline/source"
"""Mount path of a model source that is a volume."""
TLS_DIR: Final = "/var/lib/stageline/tls"
"""Mount path of the model's certificate. Not below `CONFIG_DIR`: a read-only volume can't hold a mount point."""


def build_config(model: PipelineModel) -> RuntimeConfig:
    """The config with all defaults applied, except limits that depend on what stages with `device: auto` find."""
    engine = model.spec.engine
    limits = find_step_limits(model)
    return RuntimeConfig(
        model_name=model.name,
        namespace=model.namespace,
        served_name=model.served_name,
        source=_source_in_containers(model.spec.model.parsed_source).canonical,
        cache_dir=CACHE_DIR,
        cache_limit_bytes=_cache_limit(model.spec.model.cache),
        stage_count=model.spec.parallelism.pipeline,
        engine_name=engine.name,
        extra_args=engine.extra_args,
        lora_adapters=tuple(LoraAdapter(name=each.name, path=each.path) for each in engine.lora_adapters),
        tensor=model.spec.parallelism.tensor,
        expert=model.spec.parallelism.expert,
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs if limits is None else limits.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens if limits is None else limits.max_num_batched_tokens,
        prefix_cache=engine.prefix_cache,
        generation_config=engine.generation_config,
        graphs=engine.graphs,
        device=engine.device,
        seed=engine.seed,
        speculative=None if engine.speculative is None else _speculative(engine.speculative),
        stage_layers=model.spec.stage_layers,
        network_interface=model.spec.network.interface,
        tls=None if model.spec.network.tls is None else TlsConfig(directory=TLS_DIR, name=certificate_name(model)),
        timeouts=model.spec.timeouts.to_runtime(),
    )


def _cache_limit(cache: CacheSpec) -> int | None:
    """Size limit of a cache shared by models. The kubelet limits a pod's own cache, and the volume limits a stage's."""
    is_shared = cache.host_path is not None or cache.claim_name is not None
    return int(parse_quantity(cache.size_limit)) if is_shared and cache.size_limit is not None else None


def _speculative(given: SpeculativeSpec) -> SpeculativeConfig:
    return SpeculativeConfig(
        tokens=given.tokens,
        min_match=given.min_match,
        recent_answers=given.recent_answers,
        draft_source=None if given.draft is None else given.draft.parsed_source.canonical,
    )


def build_config_map(model: PipelineModel, revision: str) -> dict[str, Any]:
    """The ConfigMap of one revision. It is immutable: another revision has another name."""
    spec = json.dumps(resolved_spec(model), indent=2, sort_keys=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(model, config_map_name(model, revision), "config", **{labels.REVISION: revision}),
        "immutable": True,
        "data": {CONFIG_FILE: build_config(model).model_dump_json(indent=2) + "\n", SPEC_FILE: spec + "\n"},
    }


def _source_in_containers(source: ModelSource) -> ModelSource:
    """The source as containers see it: a volume becomes a directory."""
    match source:
        case ClaimSource(path=path):
            return FileSource(f"{SOURCE_DIR}/{path}" if path else SOURCE_DIR)
        case ImageSource():
            return FileSource(SOURCE_DIR)
        case FileSource() | HubSource() | PackageSource():
            return source
        case _:
            assert_never(source)
