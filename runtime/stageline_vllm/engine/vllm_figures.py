"""Parses vLLM's own `/metrics` about its steps and its cache, for the engine's series. Pure."""

import re
from dataclasses import dataclass
from typing import Final

_SAMPLE: Final = re.compile(r"^(vllm:[a-z_]+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_FIELDS: Final = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:iteration_tokens_total_count": "steps",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
}
SAMPLE_NAMES: Final = tuple(_FIELDS)
_BLOCKS: Final = re.compile(r'num_gpu_blocks="(\d+)"')


@dataclass(frozen=True, slots=True)
class VllmFigures:
    """Totals since vLLM's start, except the first two."""

    kv_usage: float = 0.0
    """Share of the cache that running requests hold."""
    kv_blocks: int = 0
    """All of them; 0 where vLLM doesn't say."""
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def read_figures(page: str) -> VllmFigures:
    """The figures in an exposition; what isn't there is 0. vLLM has one label set for each of its engines."""
    sums: dict[str, float] = {}
    blocks = 0
    for name, labels, value in _SAMPLE.findall(page):
        if name == "vllm:cache_config_info" and (found := _BLOCKS.search(labels)) is not None:
            blocks += int(found[1])
        elif name in _FIELDS:
            sums[name] = sums.get(name, 0.0) + float(value)
    whole = {field: int(sums.get(name, 0.0)) for name, field in _FIELDS.items() if field != "kv_usage"}
    return VllmFigures(kv_usage=sums.get("vllm:kv_cache_usage_perc", 0.0), kv_blocks=blocks, **whole)
