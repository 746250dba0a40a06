"""The part of vLLM 0.32 that its logits processors see, for where vLLM is not installed: same names, same refusals.

`provide` puts it where vLLM's own would be imported from; where vLLM is installed it does nothing, so the same tests
run against the real classes. `recorded_interface` and `interface_of` are what both are compared by.
"""

import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from types import ModuleType
from typing import Any

import torch

MODULE = "vllm.v1.sample.logits_processor"


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Who left the batch, came to it and changed places, to be taken in this order."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:  # noqa: ARG003 - as recorded
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        raise NotImplementedError


def provide() -> None:
    """Make `vllm.v1.sample.logits_processor` importable."""
    if importlib.util.find_spec("vllm") is not None:
        return
    parent = ""
    for part in MODULE.split("."):
        name = f"{parent}.{part}" if parent else part
        module = sys.modules.setdefault(name, ModuleType(name))
        module.__path__ = []
        if parent:
            setattr(sys.modules[parent], part, module)
        parent = name
    for each in (MoveDirectionality, BatchUpdate, LogitsProcessor):
        setattr(sys.modules[MODULE], each.__name__, each)


def recorded_interface() -> dict[str, Any]:
    """What is recorded here."""
    return interface_of(sys.modules[__name__])


def interface_of(module: ModuleType) -> dict[str, Any]:
    """Methods with their parameters, fields and members of the classes above, as `module` has them."""
    processor, update, moves = module.LogitsProcessor, module.BatchUpdate, module.MoveDirectionality
    methods = {
        name: [*inspect.signature(member).parameters]
        for name, member in inspect.getmembers(processor, inspect.isroutine)
        if name in vars(processor) and not name.startswith("_abc")
    }
    return {
        "methods": methods,
        "abstract": sorted(processor.__abstractmethods__),
        "fields": [field.name for field in fields(update)],
        "moves": [move.name for move in moves],
    }
