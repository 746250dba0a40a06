"""What `stageline plan` is told of a stage's ranks: how many there are, and what one sum over them takes.

A model that T ranks can't share is refused with the numbers that don't divide, as the engine would at its start. vLLM
divides models by rules of its own, so what these ranks can't share is planned there for one, and the plan says so.
"""

from dataclasses import dataclass

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.manifests.manifest_loader import refuse
from stageline_api.resource.pipeline_model import PipelineModel, spec_problems
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError
from stageline_runtime.model_facts.rank_cut import refuse_ranks
from stageline_runtime.planning.devices import all_reduce_guess

_FIELD = "spec.parallelism.tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksToPlan:
    count: int
    note: str | None = None
    """Why it is not the number asked for."""


def with_tensor(model: PipelineModel, tensor: int | None) -> PipelineModel:
    """The model with `tensor` ranks a stage in place of its own; raises UserError where the spec then says no."""
    if tensor is None:
        return model
    parallelism = model.spec.parallelism.model_copy(update={"tensor": tensor})
    spec = model.spec.model_copy(update={"parallelism": parallelism})
    refuse([problem.placed(f"--tensor {tensor}", None) for problem in spec_problems(spec)])
    return model.model_copy(update={"spec": spec})


def ranks_to_plan(model: PipelineModel, config: ModelConfig, *, is_option: bool) -> RanksToPlan:
    """Ranks of each stage; raises UserError, of the option where `is_option`, for a model that they can't share."""
    asked = model.spec.parallelism.tensor
    try:
        refuse_ranks(config, asked)
    except UnsupportedModelError as error:
        if model.spec.engine.name == "vllm":
            return RanksToPlan(count=1, note=f"All figures are those of one rank a stage: {error} here, but by vLLM.")
        where = "--tensor" if is_option else _FIELD
        raise UserError(f"{where}: {asked} is not allowed: {error}", USAGE_EXIT_CODE) from error
    return RanksToPlan(count=asked)


def all_reduce_seconds(
    measured_microseconds: float | None, config: ModelConfig, rows: int, *, on_devices: bool
) -> float:
    """What one sum of `[rows, hidden_size]` takes: as measured, else the guess for such ranks."""
    if measured_microseconds is not None:
        return measured_microseconds * 1e-6
    return all_reduce_guess(rows * config.hidden_size, on_devices=on_devices)
