"""The ranks of a stage for `stageline plan`: their number, what they share, and the time of one exchange.

A model that they can't share is refused with the numbers that don't divide, as at the engine's start. vLLM divides
models by its own rules. If these ranks can't share a vLLM model, the plan is for one rank, with a note.
"""

from dataclasses import dataclass

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.manifests.manifest_loader import refuse
from stageline_api.resource.pipeline_model import PipelineModel, spec_problems
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError
from stageline_runtime.model_facts.rank_cut import refuse_experts, refuse_ranks
from stageline_runtime.planning.devices import all_reduce_guess


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksToPlan:
    """Ranks of each stage. One of the two numbers is 1."""

    tensor: int = 1
    """Ranks that share each layer."""
    expert: int = 1
    """Ranks that only share the experts."""
    note: str | None = None
    """Why the number differs from the requested one."""

    @property
    def count(self) -> int:
        return self.tensor * self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """`--tensor` and `--expert`; None if not given."""

    tensor: int | None
    expert: int | None

    @property
    def given(self) -> dict[str, int]:
        both = {"tensor": self.tensor, "expert": self.expert}
        return {name: count for name, count in both.items() if count is not None}


def with_ranks(model: PipelineModel, options: RankOptions) -> PipelineModel:
    """The model with the options instead of its own ranks; raises UserError if the spec then is invalid."""
    if not options.given:
        return model
    parallelism = model.spec.parallelism.model_copy(update=options.given)
    spec = model.spec.model_copy(update={"parallelism": parallelism})
    words = " ".join(f"--{name} {count}" for name, count in options.given.items())
    refuse([problem.placed(words, None) for problem in spec_problems(spec)])
    return model.model_copy(update={"spec": spec})


def ranks_to_plan(model: PipelineModel, config: ModelConfig, options: RankOptions) -> RanksToPlan:
    """Ranks of each stage; raises UserError, with the option if one was given, for a model that they can't share."""
    tensor, expert = model.spec.parallelism.tensor, model.spec.parallelism.expert
    name, asked = ("expert", expert) if expert > 1 else ("tensor", tensor)
    try:
        refuse_ranks(config, tensor)
        refuse_experts(config, expert)
    except UnsupportedModelError as error:
        if model.spec.engine.name == "vllm":
            return RanksToPlan(note=f"All figures are those of one rank a stage: {error} here, but by vLLM.")
        where = f"--{name}" if name in options.given else f"spec.parallelism.{name}"
        raise UserError(f"{where}: {asked} is not allowed: {error}", USAGE_EXIT_CODE) from error
    return RanksToPlan(tensor=tensor, expert=expert)


def all_reduce_seconds(
    measured_microseconds: float | None, config: ModelConfig, rows: int, *, on_devices: bool
) -> float:
    """Time of one sum of `[rows, hidden_size]`: measured, else estimated for such ranks.

    Gathering the rows of all ranks for their experts, and scattering the experts' sums, each move as many bytes.
    """
    if measured_microseconds is not None:
        return measured_microseconds * 1e-6
    return all_reduce_guess(rows * config.hidden_size, on_devices=on_devices)
