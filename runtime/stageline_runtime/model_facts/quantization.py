"""Which quantised checkpoints are read, and what their tensors stand for: dense matrices, by name and shape. No torch.

Weights are dequantised as they are read and then held dense, in the model's dtype: a quantised checkpoint saves disk
and download here, not memory, and what is counted of it (memory, cut) is the dense matrix. Activations are never
quantised. A form that isn't read exactly is refused, with the engine that runs it.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from stageline_runtime.model_facts.model_fields import Fields, UnsupportedModelError

WORD_BITS: Final = 32
_INSTEAD: Final = "; serve it with engine.name: vllm, or use unquantised weights"
_BLOCK_DIMENSIONS: Final = 2
_FP8_BITS: Final = 8
_PACKED_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
_SCALES: Final = ("weight_scale_inv", "weight_scale")
_ONLY_FOR_ACTIVATIONS: Final = ("input_scale", "output_scale", "k_scale", "v_scale", "activation_scale")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How a checkpoint's quantised matrices are stored."""

    form: Literal["fp8", "awq", "gptq"]
    bits: int = 8
    group_size: int | None = None
    """Inputs that share a scale; None: all of them."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, of block-wise FP8."""
    zero_offset: int = 0
    """What is added to stored zero points: GPTQ's first format stores them less one."""


def quantization_of(fields: Fields) -> Quantization | None:
    """What `quantization_config` says; None where weights are not quantised.

    Raises:
        UnsupportedModelError: it is a form that isn't read here; the message says what serves it.
    """
    config = fields.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"config.json: quantization_config must be an object, not {config!r}")
    match config.get("quant_method"):
        case "fp8" | "fbgemm_fp8":
            return Quantization(form="fp8", block=_block(config))
        case "compressed-tensors":
            return _compressed(config)
        case "awq":
            version = str(config.get("version", "gemm")).lower()
            _hold(version == "gemm", f"version {version!r} of quant_method 'awq'")
            return Quantization(form="awq", bits=_bits(config, 4), group_size=_group_size(config))
        case "gptq":
            known = str(config.get("checkpoint_format", "gptq"))
            _hold(known in ("gptq", "gptq_v2"), f"checkpoint_format {known!r} of quant_method 'gptq'")
            offset = int(known == "gptq")
            return Quantization(
                form="gptq", bits=_bits(config, 4, 8), group_size=_group_size(config), zero_offset=offset
            )
        case method:
            raise UnsupportedModelError(f"quantization_config {method!r} is not supported{_INSTEAD}")


def parts_of(name: str, stored: Set[str]) -> tuple[str, ...]:
    """The stored tensors that the tensor `name` is made from: itself, where it is not quantised."""
    stem, _, kind = name.rpartition(".")
    if kind != "weight":
        return (name,)
    if f"{stem}.qweight" in stored:
        return tuple(f"{stem}.{part}" for part in _PACKED_PARTS if f"{stem}.{part}" in stored)
    scales = (f"{stem}.{part}" for part in _SCALES if f"{stem}.{part}" in stored)
    return (name, *list(scales)[:1])


def dense_names(stored: Set[str]) -> frozenset[str]:
    """Names of the tensors that those `stored` stand for."""
    return frozenset(filter(None, (_dense_name(name, stored) for name in stored)))


def dense_elements(shapes: Mapping[str, Shape], quantization: Quantization | None) -> dict[str, int]:
    """Elements of the tensors that the stored ones of `shapes` stand for, by name."""
    found = {}
    for name, shape in shapes.items():
        dense = _dense_name(name, shapes.keys())
        if dense is not None:
            packed = name != dense and quantization is not None
            found[dense] = prod(shape) * (WORD_BITS // quantization.bits if packed and quantization else 1)
    return found


def _dense_name(name: str, stored: Set[str]) -> str | None:
    stem, _, kind = name.rpartition(".")
    if kind == "qweight":
        return f"{stem}.weight"
    is_packed = kind in _PACKED_PARTS and f"{stem}.qweight" in stored
    is_scale = kind in _SCALES and f"{stem}.weight" in stored
    return None if is_packed or is_scale or kind in _ONLY_FOR_ACTIVATIONS else name


def _block(config: Fields) -> tuple[int, int] | None:
    value = config.get("weight_block_size")
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != _BLOCK_DIMENSIONS or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UnsupportedModelError(f"quantization_config: weight_block_size must be two sizes, not {value!r}")
    return sizes[0], sizes[1]


def _compressed(config: Fields) -> Quantization:
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights: list[Fields] = [group["weights"] for group in groups if isinstance(group, dict) and group.get("weights")]
    is_fp8 = bool(weights) and all(
        isinstance(each, dict) and each.get("type") == "float" and each.get("num_bits") == _FP8_BITS for each in weights
    )
    _hold(is_fp8, f"format {config.get('format')!r} of quant_method 'compressed-tensors'")
    return Quantization(form="fp8", block=_block({"weight_block_size": weights[0].get("block_structure")}))


def _bits(config: Fields, *known: int) -> int:
    bits = config.get("bits", config.get("w_bit", 4))
    _hold(isinstance(bits, int) and bits in known, f"bits {bits!r} of quant_method {config['quant_method']!r}")
    return next(each for each in known if each == bits)


def _group_size(config: Fields) -> int | None:
    size = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise UnsupportedModelError(f"quantization_config: group_size must be a size or -1, not {size!r}")
    return None if size == -1 else size


def _hold(is_known: bool, what: str) -> None:
    if not is_known:
        raise UnsupportedModelError(f"quantization_config: {what} is not supported{_INSTEAD}")
