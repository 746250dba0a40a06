"""What a decoder layer consists of: its modules, the tensors of each by name and shape, and how ranks share each.

A family describes its layers with these. Loading, the cut over ranks, memory and costs all follow from that one
description. Pure: no torch. Names are those of a checkpoint within a layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import prod

from stageline_runtime.model_facts.hyperparameters import MixtureConfig


class Cut(Enum):
    """How ranks share a tensor."""

    WHOLE = auto()
    """Every rank holds it."""
    BY_OUTPUTS = auto()
    """Each tensor-parallel rank has its rows."""
    BY_INPUTS = auto()
    """Each tensor-parallel rank has its columns, and what the ranks give is summed."""
    FIRST_RANK = auto()
    """The first tensor-parallel rank alone adds it to that sum."""
    BY_VOCABULARY = auto()
    """Each tensor-parallel rank has its rows, of which the last rank may have fewer."""
    BY_EXPERTS = auto()
    """Each expert-parallel rank has its experts."""
    INDIVISIBLE = auto()
    """No rank of several can compute with it: the model can't be cut by tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    """Of matrices `[out_features, in_features]`."""
    cut: Cut = Cut.WHOLE
    expert: int | None = None
    """The one expert whose tensor it is; None: nobody's, or all experts' together."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over `size` elements."""

    name: str
    size: int
    cut: Cut = Cut.WHOLE

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    def tensors(self) -> Iterator[Tensor]:
        yield Tensor(self.weight, (self.size,), self.cut)


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`."""

    name: str
    outputs: int
    inputs: int
    has_bias: bool = False
    cut: Cut = Cut.WHOLE

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def bias(self) -> str:
        return f"{self.name}.bias"

    def tensors(self) -> Iterator[Tensor]:
        yield Tensor(self.weight, (self.outputs, self.inputs), self.cut)
        if self.has_bias:
            yield Tensor(self.bias, (self.outputs,), Cut.FIRST_RANK if self.cut is Cut.BY_INPUTS else self.cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """`down(silu(gate(x)) * up(x))`."""

    gate: Linear
    up: Linear
    down: Linear

    def tensors(self, *, is_stacked: bool = True) -> Iterator[Tensor]:  # noqa: ARG002 - as of a mixture
        for module in (self.gate, self.up, self.down):
            yield from module.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Of a mixture in a checkpoint that has a tensor for each expert; `{}` is the expert."""

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Gated blocks without biases of which a router picks some, and perhaps one that all tokens pass.

    A checkpoint has the experts stacked, as transformers 5 holds them, or separate, under the family's own names.
    """

    sizes: MixtureConfig
    hidden_size: int
    separate: ExpertNames
    shared: Gated | None = None
    shared_gate: Linear | None = None

    router = "mlp.gate.weight"
    gate_up = "mlp.experts.gate_up_proj"
    down = "mlp.experts.down_proj"

    def router_name(self, *, is_stacked: bool) -> str:
        return self.router if is_stacked else self.separate.router

    def expert_names(self, expert: int) -> tuple[str, str, str]:
        """Of gate, up and down of one of separate experts."""
        names = self.separate
        return names.gate.format(expert), names.up.format(expert), names.down.format(expert)

    def tensors(self, *, is_stacked: bool = True) -> Iterator[Tensor]:
        count, inner, hidden = self.sizes.num_experts, self.sizes.intermediate_size, self.hidden_size
        yield Tensor(self.router_name(is_stacked=is_stacked), (count, hidden))
        if is_stacked:
            yield Tensor(self.gate_up, (count, 2 * inner, hidden), Cut.BY_EXPERTS)
            yield Tensor(self.down, (count, hidden, inner), Cut.BY_EXPERTS)
        for expert in range(0 if is_stacked else count):
            gate, up, down = self.expert_names(expert)
            for name, shape in ((gate, (inner, hidden)), (up, (inner, hidden)), (down, (hidden, inner))):
                yield Tensor(name, shape, Cut.BY_EXPERTS, expert)
        for module in (self.shared, self.shared_gate):
            if module is not None:
                yield from module.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Two blocks, each added to the residual stream, with a norm before it, after it, or both.

    `h = x + attended_norm(attention(attention_norm(x)))`
    `y = h + forwarded_norm(feed_forward(feed_forward_norm(h)))`
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    feed_forward: Gated | Mixture
    query_key_norms: tuple[Norm, Norm] | None = None
    """Each of a head's size, or over all heads together."""
    attention_norm: Norm | None = None
    attended_norm: Norm | None = None
    feed_forward_norm: Norm | None = None
    forwarded_norm: Norm | None = None

    def tensors(self, *, is_stacked: bool = True) -> tuple[Tensor, ...]:
        """Of all modules, in a checkpoint whose experts, if there are any, are stacked or separate."""
        norms = (self.attention_norm, self.attended_norm, self.feed_forward_norm, self.forwarded_norm)
        modules = (*norms, self.query, self.key, self.value, self.output, *(self.query_key_norms or ()))
        return (
            *(tensor for module in modules if module is not None for tensor in module.tensors()),
            *self.feed_forward.tensors(is_stacked=is_stacked),
        )
