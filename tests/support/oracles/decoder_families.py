"""Every family that transformers generates text with: how Stageline serves it, and a tiny model of each that it does.

What a family's config class says by default stands for its models: a config that sets what the path can't compute is
refused, by the sentence that names it. The installed transformers is the pinned one, so the list follows its version.
"""

import logging
import warnings
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from oracles.tiny_models import write_tiny_family
from stageline_runtime.model_facts.model_config import model_config_from_dict
from stageline_runtime.model_facts.model_fields import UnsupportedModelError

NO_CONFIG: Final = frozenset({"gemma4_assistant"})
"""Families whose config class has no defaults that it accepts itself."""
_SMALL: Final[dict[str, Any]] = {"sliding_window": 20, "query_pre_attn_scalar": 16}
_NO_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
    }
}
"""Fields without which a family can't be built, and of which its class knows no value."""


class ServedBy(StrEnum):
    """How a family is served."""

    OWN = "own"
    COVERAGE = "coverage"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    path: ServedBy
    reason: str = ""
    """Of a refusal: the sentence that a user reads."""


def decoder_families() -> tuple[Family, ...]:
    """All of transformers' `AutoModelForCausalLM`, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(judged(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in NO_CONFIG)


def judged(name: str) -> Family:
    """One of them, by what the code says of its config."""
    try:
        config = model_config_from_dict(default_config(name), {})
    except UnsupportedModelError as refusal:
        return Family(name=name, path=ServedBy.REFUSED, reason=str(refusal))
    return Family(name=name, path=ServedBy.COVERAGE if config.is_covered else ServedBy.OWN)


def default_config(name: str) -> dict[str, Any]:
    """What the family's config class writes of itself."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        written: dict[str, Any] = CONFIG_MAPPING[name]().to_dict()
    return written


def write_tiny(name: str, directory: Path) -> Path:
    """A tiny model of the family with random weights; returns `directory`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[name]
    defaults = default_config(name)
    fields = {field: value for field, value in _SMALL.items() if defaults.get(field) is not None}
    if "head_dim" in defaults:
        fields["head_dim"] = 16
    fields |= _NO_DEFAULTS.get(name, {})
    if "num_key_value_heads" not in defaults:
        fields["num_key_value_heads"] = 4  # as many as there are of queries: the family knows no groups
    rope = defaults.get("rope_parameters") or {}
    if set(rope) - {"rope_type", "rope_theta"}:
        fields["rope_parameters"] = rope  # the family wants more of it than others do
    return write_tiny_family(directory, config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class], **fields)
