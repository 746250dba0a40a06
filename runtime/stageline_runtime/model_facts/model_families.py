"""What distinguishes the model families that the own decoder runs: one row of facts a family. Pure: no torch.

Every difference is data: which biases there are, whether heads are normalised, which layers look back only so far and
which are mixtures of experts. Defaults are those of Hugging Face's config classes, since a config.json may omit them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from stageline_runtime.model_facts.model_fields import (
    Fields,
    UnsupportedModelError,
    names,
    positive,
    positive_or_none,
    required,
    whole_numbers,
)

Windows = tuple[int | None, ...]
"""By layer: how many positions a query sees, itself included; None: all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """Mixture-of-experts feed-forward blocks: a router picks some experts for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner size of one expert."""
    normalise_weights: bool
    """Whether the picked experts' weights are scaled to sum to one."""
    sparse_layers: tuple[bool, ...]
    """By layer: whether its feed-forward block is a mixture; the others are dense."""
    shared_size: int | None = None
    """Inner size of one more expert, which every token passes, weighted by a gate of its own; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts of one `model_type`. Where a bias is None, the config's field decides."""

    query_key_value_bias: bool | None
    output_bias: bool | None
    feed_forward_bias: bool | None
    query_key_norm: bool
    windows: Callable[[Fields, int], Windows]
    mixture: Callable[[Fields, int], MixtureConfig] | None = None
    default_num_kv_heads: int | None = None
    """None: as many as heads."""
    default_head_dim: int | None = None
    """None: `hidden_size / num_heads`."""
    default_rms_norm_eps: float = 1e-6
    default_rope_theta: float = 10_000.0
    default_eos_token_id: int | None = None


def _never(_fields: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def _everywhere(default: int | None) -> Callable[[Fields, int], Windows]:
    """All layers share `sliding_window`; null switches it off."""
    return lambda fields, num_layers: (_window(fields, default),) * num_layers


def _by_layer_type(is_windowed: Callable[[int, int], bool]) -> Callable[[Fields, int], Windows]:
    """Qwen: off unless `use_sliding_window`; then by `layer_types`, or else by a layer and `max_window_layers`."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window = _window(fields, 4096) if fields.get("use_sliding_window") else None
        kinds = names(fields, "layer_types")
        if kinds is not None:
            return _of_kinds(kinds, window, num_layers)
        bound = required({"max_window_layers": 28} | fields, "max_window_layers", int)
        return tuple(window if is_windowed(layer, bound) else None for layer in range(num_layers))

    return windows


def _of_kinds(kinds: Sequence[str], window: int | None, num_layers: int) -> Windows:
    if len(kinds) != num_layers:
        raise UnsupportedModelError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types {unknown[0]!r} is not supported: full_attention, sliding_attention are"
        )
    if window is None and "sliding_attention" in kinds:
        raise UnsupportedModelError("layer_types has 'sliding_attention', but sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _from_layer(layer: int, first: int) -> bool:
    """Qwen2 and Qwen3."""
    return layer >= first


def _alternating_below(layer: int, end: int) -> bool:
    """Qwen2-MoE: every other layer, the first one too."""
    return layer % 2 == 0 and layer < end


def _switched(fields: Fields, num_layers: int) -> Windows:
    """Qwen3-MoE: `use_sliding_window` switches the window of all layers."""
    return (_window(fields, 4096) if fields.get("use_sliding_window") else None,) * num_layers


def _window(fields: Fields, default: int | None) -> int | None:
    return positive_or_none({"sliding_window": default} | fields, "sliding_window")


def _qwen2_mixture(fields: Fields, num_layers: int) -> MixtureConfig:
    if fields.get("qkv_bias", True) is not True:
        raise UnsupportedModelError("qkv_bias false is not supported: query, key and value have biases in this family")
    shared = positive({"shared_expert_intermediate_size": 5632} | fields, "shared_expert_intermediate_size")
    return replace(_qwen3_mixture(fields, num_layers), shared_size=shared)


def _qwen3_mixture(fields: Fields, num_layers: int) -> MixtureConfig:
    dense = set(whole_numbers(fields, "mlp_only_layers"))
    step = positive({"decoder_sparse_step": 1} | fields, "decoder_sparse_step")
    return _mixture(
        fields,
        "moe_intermediate_size",
        normalise_weights=bool(fields.get("norm_topk_prob", False)),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _mixtral_mixture(fields: Fields, num_layers: int) -> MixtureConfig:
    return _mixture(fields, "intermediate_size", normalise_weights=True, sparse_layers=(True,) * num_layers)


def _mixture(
    fields: Fields, size_field: str, *, normalise_weights: bool, sparse_layers: tuple[bool, ...]
) -> MixtureConfig:
    # transformers 5 writes num_local_experts for both families; published Qwen3-MoE configs have num_experts.
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    num_experts, experts_per_token = positive(fields, name), positive(fields, "num_experts_per_tok")
    if experts_per_token > num_experts:
        raise UnsupportedModelError(f"num_experts_per_tok {experts_per_token} is above {name} {num_experts}")
    return MixtureConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=positive(fields, size_field),
        normalise_weights=normalise_weights,
        sparse_layers=sparse_layers,
    )


def _unbiased(
    windows: Callable[[Fields, int], Windows],
    mixture: Callable[[Fields, int], MixtureConfig] | None = None,
    *,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 10_000.0,
) -> Family:
    """Mistral AI's two families."""
    return Family(
        query_key_value_bias=False,
        output_bias=False,
        feed_forward_bias=False,
        query_key_norm=False,
        windows=windows,
        mixture=mixture,
        default_num_kv_heads=8,
        default_rms_norm_eps=rms_norm_eps,
        default_rope_theta=rope_theta,
        default_eos_token_id=2,
    )


FAMILIES = MappingProxyType(
    {
        "llama": Family(
            query_key_value_bias=None,
            output_bias=None,
            feed_forward_bias=None,
            query_key_norm=False,
            windows=_never,
            default_eos_token_id=2,
        ),
        "mistral": _unbiased(_everywhere(4096)),
        "mixtral": _unbiased(_everywhere(None), _mixtral_mixture, rms_norm_eps=1e-5, rope_theta=1e6),
        "qwen2": Family(
            query_key_value_bias=True,
            output_bias=False,
            feed_forward_bias=False,
            query_key_norm=False,
            windows=_by_layer_type(_from_layer),
            default_num_kv_heads=32,
        ),
        "qwen2_moe": Family(
            query_key_value_bias=True,
            output_bias=False,
            feed_forward_bias=False,
            query_key_norm=False,
            windows=_by_layer_type(_alternating_below),
            mixture=_qwen2_mixture,
            default_num_kv_heads=16,
        ),
        "qwen3": Family(
            query_key_value_bias=None,
            output_bias=None,
            feed_forward_bias=False,
            query_key_norm=True,
            windows=_by_layer_type(_from_layer),
            default_num_kv_heads=32,
            default_head_dim=128,
        ),
        "qwen3_moe": Family(
            query_key_value_bias=None,
            output_bias=None,
            feed_forward_bias=False,
            query_key_norm=True,
            windows=_switched,
            mixture=_qwen3_mixture,
            default_num_kv_heads=4,
        ),
    }
)
"""By `model_type`; all of them run in the one decoder of `models/decoder.py`."""
