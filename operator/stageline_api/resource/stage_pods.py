"""Rules of the engine on the stages' pods: as many GPUs as ranks, and no variable that breaks the group."""

from typing import Final

from stageline_api.resource.base import cel
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.placing.placement import NetworkSpec
from stageline_api.resource.pods.pod import StageSpec
from stageline_api.resource.pods.pod_template import overlay_problems, overlay_variables
from stageline_api.resource.pods.template import TemplateSpec
from stageline_api.resource.pods.vllm_environment import OWNED_CONDITION, OWNED_RULE, variable_problem
from stageline_api.resource.serving.engine import MOST_RANKS, EngineSpec, ParallelismSpec

OVERLAY_PATH: Final = "spec.template.podTemplate"
GPU_RESOURCE: Final = "nvidia.com/gpu"
_GPU_RULE: Final = f"{GPU_RESOURCE} in limits must be one for each rank of a stage (parallelism.tensor or expert)"
_NO_GPUS_COUNTED: Final = (
    "(self.engine.name != 'vllm' && (self.engine.device == 'cpu' || (self.engine.device == 'auto' && "
    "self.parallelism.tensor == 1 && self.parallelism.expert == 1)))"
)
_NAMES_NO_GPUS: Final = f"!has(R.limits) || !('{GPU_RESOURCE}' in R.limits)"


def _has_ranks(ranks: int) -> str:
    tensor, expert = f"self.parallelism.tensor == {ranks}", f"self.parallelism.expert == {ranks}"
    return f"{tensor} && {expert}" if ranks == 1 else f"({tensor} || {expert})"


# The API server's cost budget allows only comparisons with literals. One of both numbers of ranks is 1.
_COUNTS_GPUS: Final = f"{_NAMES_NO_GPUS} || " + " || ".join(
    f"({_has_ranks(ranks)} && (R.limits['{GPU_RESOURCE}'] == {ranks} || R.limits['{GPU_RESOURCE}'] == '{ranks}'))"
    for ranks in range(1, MOST_RANKS + 1)
)

STAGE_POD_RULES: Final = (
    cel(
        f"{_NO_GPUS_COUNTED} || {_COUNTS_GPUS.replace('R.', 'self.template.resources.')}",
        _GPU_RULE,
        ".template.resources",
    ),
    cel(
        f"{_NO_GPUS_COUNTED} || !has(self.stages) || self.stages.all(s, !has(s.resources) || "
        f"{_COUNTS_GPUS.replace('R.', 's.resources.')})",
        _GPU_RULE,
        ".stages",
    ),
    *(
        cel(
            f"self.engine.name != 'vllm' || !has(self.{part}.env) || !self.{part}.env.exists(each, {OWNED_CONDITION})",
            OWNED_RULE,
            f".{part}.env",
        )
        for part in ("template", "network")
    ),
)
"""Rules that the API server checks."""


def stage_pod_problems(
    engine: EngineSpec,
    parallelism: ParallelismSpec,
    template: TemplateSpec,
    network: NetworkSpec,
    stages: tuple[StageSpec, ...],
) -> list[FieldProblem]:
    """Problems of the pods: overlay fields that are not allowed, a number of GPUs other than that of ranks, and
    variables for vLLM's nodes that the operator sets.
    """
    problems = overlay_problems(template.pod_template, OVERLAY_PATH)
    is_sound = not problems
    problems += _gpu_problems(engine, parallelism, template, stages)
    if engine.name != "vllm":
        return problems
    given = [
        (f"spec.{part}.env[{at}]", each.name, each.value if each.value_from is None else None)
        for part, variables in (("template", template.env), ("network", network.env))
        for at, each in enumerate(variables)
    ]
    given += overlay_variables(template.pod_template, OVERLAY_PATH) if is_sound else ()
    return problems + [
        FieldProblem(path=f"{path}.name", value=show_value(name), rule=f"{name} {problem}")
        for path, name, value in given
        if (problem := variable_problem(name, value)) is not None
    ]


def _gpu_problems(
    engine: EngineSpec, parallelism: ParallelismSpec, template: TemplateSpec, stages: tuple[StageSpec, ...]
) -> list[FieldProblem]:
    """Stages with a number of GPUs other than that of their ranks.

    Under vLLM more GPUs than ranks are wrong too: vLLM divides rank numbers by its device count to find ranks of the
    same node, so stages of several pods would look for each other in one pod's memory. A single rank of Stageline's
    engine may leave devices unused that `auto` has found; several ranks need one each.
    """
    is_own = engine.name != "vllm"
    if is_own and (engine.device == "cpu" or (engine.device == "auto" and parallelism.devices_per_stage == 1)):
        return []
    where = f"with engine.device {engine.device}" if is_own else "with engine.name vllm on GPUs"
    wanted = parallelism.devices_per_stage
    given = {"spec.template.resources": template.resources}
    given |= {f"spec.stages[{at}].resources": each.resources for at, each in enumerate(stages) if each.resources}
    counted = f"must be {wanted} {where}: one for each rank of a stage (parallelism.tensor or expert)"
    return [
        FieldProblem(path=f"{path}.limits[{GPU_RESOURCE}]", value=count, rule=counted)
        for path, resources in given.items()
        if (count := resources.limits.get(GPU_RESOURCE)) not in (None, str(wanted))
    ]
