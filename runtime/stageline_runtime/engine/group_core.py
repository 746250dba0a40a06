"""What ties an engine's core to the stages of its group, so that the engine's life is the same whatever computes.

`OWN_RUNTIME` is the runtime of this package; other engines bring a `Computing` of their own.
"""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageline_api.engine_http import ModelInfo
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_life import CoreLife
from stageline_runtime.engine.group.stage_group import StageGroup, form_scheduler
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.engine.telemetry.tracing import TracedRequests
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.engine.warm_up import warm_up
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config, require_sizes
from stageline_runtime.plan_bus.messages import Begun, Drafted, StepDone

MAX_WAITING: Final = 1024
"""Requests that may wait for a slot; more are told to come again."""


@dataclass(frozen=True, slots=True)
class CoreParts:
    """What a core is made from."""

    contract: PodContract
    info: ModelInfo
    metrics: EngineMetrics
    tracing: TracedRequests | None
    model_dir: Path
    model: ModelConfig
    prompts: PromptReader


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCore:
    """A core, and what its group has to do for it."""

    life: CoreLife
    form: Callable[[StageGroup], Awaitable[None]]
    """Returns once all stages have loaded and the core can send to them."""
    warm_up: Callable[[], Coroutine[Any, Any, None]]
    """One step through all stages."""
    step_done: Callable[[StepDone], None]
    close: Callable[[], Awaitable[None]]
    """After the last answer."""
    drafted: Callable[[Drafted], None] = lambda _drafted: None
    begun: Callable[[Begun], None] = lambda _begun: None
    stages_prepare_guides: bool = True
    """Whether the last stage compiles a grammar beside its steps when it is asked to."""


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes for an engine."""

    read_model: Callable[[Path], ModelConfig]
    """Raises UnsupportedModelError for a model that it can't run."""
    make_core: Callable[[CoreParts], GroupCore]
    takes_longer_contexts: bool = False
    """Whether it judges by itself how far beyond a config's context a model may go."""
    is_told_each_step: bool = True
    """Whether its stages are told each step by the engine. Those that aren't never wait for the engine, and it has
    nothing to do but to hand on what they say, at once."""


def _read_own_model(model_dir: Path) -> ModelConfig:
    return require_sizes(read_model_config(model_dir))


def _own_core(parts: CoreParts) -> GroupCore:
    contract = parts.contract
    core = EngineCore(parts.info, parts.metrics, parts.tracing, group=contract.group, incarnation=contract.incarnation)

    async def form(group: StageGroup) -> None:
        core.attach(await form_scheduler(group, contract.config, MAX_WAITING), group.broadcast)

    async def close() -> None:
        pass

    return GroupCore(
        life=core,
        form=form,
        warm_up=lambda: warm_up(core, contract.config, parts.model, core.speculation),
        step_done=core.step_done,
        close=close,
        drafted=core.drafted,
        begun=core.begun,
    )


OWN_RUNTIME: Final = Computing(_read_own_model, _own_core)
