"""What can be known of a covered model without torch: whether Hugging Face's layers can be cut, and its weights.

`transformers` is looked at, never imported: importing it loads torch, which only stages may. Refused here is what one
hidden tensor between stages and one slot of keys and values a layer can't carry; what only the built layers show is
refused when a stage loads.
"""

import ast
import json
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from stageline_runtime.model_facts.model_fields import Fields, UnsupportedModelError, names, rope_parameters
from stageline_runtime.model_facts.quantization import Shape, dense_elements, quantization_of
from stageline_runtime.model_facts.weight_files import weight_file_names

COVERED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
COVERED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""The others' frequencies depend on the longest request in a batch."""
_OLDEST_MAJOR = 5
"""Of transformers: its layers take one hidden tensor, and hand all they want of attention to one function."""

_OWN_MIXTURES = "mixtures of experts are run by the own decoder only; serve it with engine.name: vllm"
_REFUSED_WHEN_SET = {
    "keep_window_size": "attention masks that follow from the values of keys are not built",
    "num_experts": _OWN_MIXTURES,
    "num_local_experts": _OWN_MIXTURES,
    "n_routed_experts": _OWN_MIXTURES,
    "moe_num_experts": _OWN_MIXTURES,
    "hidden_size_per_layer_input": "layers that take more than hidden states can't be cut",
    "num_kv_shared_layers": "layers that read other layers' keys and values can't be cut",
    "kv_lora_rank": "compressed keys and values don't fit the KV cache; serve it with engine.name: vllm",
    "use_bidirectional_attention": "a token can't see those after it",
    "alibi": "only rotary position embeddings are covered",
}
_REFUSED_FAMILIES = {
    "dots1": _OWN_MIXTURES,
    "granite_swa": "attention sinks are not built",
    "hrm_text": "layers that are run several times over can't be cut",
}
"""Families of which no field tells what the path can't compute."""
_HEADS = frozenset({"lm_head.weight", "embed_out.weight"})
"""The second is GPT-NeoX's, in checkpoints of before."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
TENSORS_FILE = "stageline-tensors.json"
"""Shape of every tensor by name, in place of the headers of weight files that are not all fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredParameters:
    layers: tuple[int, ...]
    front: int
    """What only the first stage holds."""
    tail: int
    """What only the last stage holds, but for a tied embedding."""
    is_tied: bool
    """Whether the last stage holds the front's embedding too, if it isn't the first as well."""


def refuse_uncoverable(fields: Fields, own_families: tuple[str, ...], *, written: Fields) -> None:
    """Refuse a config that the coverage path can't run exactly.

    `fields` are those of `config.json`, `written`, and what the family's class says of others (`with_class_defaults`):
    where both have a reason, the message names what is written.

    Raises:
        UnsupportedModelError: naming the field and the value, or the extra that has to be installed.
    """
    architecture = fields["model_type"]
    own = ", ".join(own_families)
    version = _transformers_version()
    if version is None:
        raise UnsupportedModelError(
            f"model_type {architecture!r} is not supported without transformers; install stageline[coverage], "
            f"or use a model of {own}"
        )
    if int(version.split(".")[0]) < _OLDEST_MAJOR:
        raise UnsupportedModelError(
            f"model_type {architecture!r} needs transformers {_OLDEST_MAJOR} or newer, but {version} is installed; "
            f"install stageline[coverage], or use a model of {own}"
        )
    if architecture not in _pipeline_families():
        raise UnsupportedModelError(
            f"model_type {architecture!r} is not supported; supported: {own}, and those for which transformers "
            f"({version} is installed) declares a base_model_pp_plan"
        )
    if architecture in _REFUSED_FAMILIES:
        raise UnsupportedModelError(f"model_type {architecture!r} is not supported: {_REFUSED_FAMILIES[architecture]}")
    for name, rule in sorted(_REFUSED_WHEN_SET.items(), key=lambda named: named[0] not in written):
        if fields.get(name):
            raise UnsupportedModelError(
                f"{name} {fields[name]!r} of model_type {architecture!r} is not supported: {rule}"
            )
    for kind in names(fields, "layer_types") or ():
        if kind not in COVERED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer_types {kind!r} is not supported; supported: {_list(COVERED_LAYER_TYPES)}"
            )
    for kind in _rope_types(fields):
        if kind not in COVERED_ROPE_TYPES:
            raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: {_list(COVERED_ROPE_TYPES)}")


def with_class_defaults(fields: Fields) -> Fields:
    """The fields, under the names that all families share, with what the family's config class says of those left out.

    Its source is read, not run: importing it would bring torch.
    """
    found = _config_classes().get(str(fields.get("model_type")))
    if found is None:
        return fields
    defaults, other_names = found
    shared = {name: fields[other] for name, other in other_names.items() if other in fields}
    return {**defaults, **shared, **fields}


def measure_checkpoint(model_dir: Path, fields: Fields) -> MeasuredParameters | None:
    """Count the elements of all tensors, by a `TENSORS_FILE` or all files' headers; None when neither is here."""
    num_layers = fields.get("num_hidden_layers")
    shapes = _all_shapes(model_dir)
    counted = None if shapes is None else dense_elements(shapes, quantization_of(fields))
    if not isinstance(num_layers, int) or counted is None:
        return None
    layers, front, tail = [0] * num_layers, 0, 0
    for name, elements in counted.items():
        match = _LAYER.search(name)
        if match is not None and int(match[1]) < num_layers:
            layers[int(match[1])] += elements
        elif "embed" in name and name not in _HEADS:
            front += elements
        else:
            tail += elements
    # Whatever config.json says: a head that is there is read, and one that isn't is the embedding.
    is_tied = not _HEADS & counted.keys()
    return MeasuredParameters(layers=tuple(layers), front=front, tail=tail, is_tied=is_tied)


def _all_shapes(model_dir: Path) -> dict[str, Shape] | None:
    told = model_dir / TENSORS_FILE
    if told.is_file():
        shapes: dict[str, list[int]] = json.loads(told.read_text(encoding="utf-8"))
        return {name: tuple(shape) for name, shape in shapes.items()}
    paths = [model_dir / name for name in weight_file_names(model_dir)]
    if not paths or not all(path.is_file() for path in paths):
        return None
    return {name: shape for path in paths for name, shape in _shapes(path).items()}


def _shapes(path: Path) -> dict[str, Shape]:
    """Shape of each stored tensor; the file starts with its header's length (64 bits) and the header (JSON)."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, path.stat().st_size)))
        return {name: tuple(map(int, tensor["shape"])) for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UnsupportedModelError(f"{path.name} is not a safetensors file: {error!r}") from error


def _rope_types(fields: Fields) -> list[str]:
    """Of all layers; some families have one set of rotary parameters for each layer type."""
    parameters = rope_parameters(fields)
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(each.get("rope_type") or each.get("type") or "default") for each in nested or [parameters]]


def _list(values: frozenset[str]) -> str:
    return ", ".join(sorted(values))


def _transformers_version() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def _pipeline_families() -> frozenset[str]:
    """The `model_type`s of installed config classes whose files declare how a pipeline cuts them."""
    return frozenset(_config_classes())


@cache
def _config_classes() -> dict[str, tuple[Fields, dict[str, str]]]:
    """By `model_type`: defaults of the config class, and by shared name the family's own one."""
    spec = util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    found: dict[str, tuple[Fields, dict[str, str]]] = {}
    for path in sorted(Path(spec.submodule_search_locations[0]).glob("models/*/configuration_*.py")):
        text = path.read_text(encoding="utf-8")
        if "base_model_pp_plan" in text:
            classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
            found |= {
                str(each["model_type"]): _of_class(each) for each in map(_constants, classes) if "model_type" in each
            }
    return found


def _constants(definition: ast.ClassDef) -> Fields:
    """What a class's body sets to a constant."""
    found: Fields = {}
    for node in definition.body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        value = node.value if isinstance(node, ast.AnnAssign | ast.Assign) else None
        if isinstance(target, ast.Name) and value is not None:
            with suppress(ValueError):
                found[target.id] = ast.literal_eval(value)
    return found


def _of_class(constants: Fields) -> tuple[Fields, dict[str, str]]:
    other_names = constants.pop("attribute_map", {})
    defaults = {name: other_names.get(name) and constants.get(other_names[name]) for name in other_names}
    return {**{name: value for name, value in defaults.items() if value is not None}, **constants}, other_names
