"""The group's first steps: a dummy plan through all stages, and what a step costs where drafts have to pay for theirs.

The cost is measured with dummy plans, which compute layers and no logits; the logits' share of a step is that of the
model that cuts layers (`planning.cut.estimate_costs`). The best of a few runs counts: a busy machine only adds. What a
step of a draft model takes, the last stage says itself.
"""

import time
from collections.abc import Awaitable, Callable

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.planning.cut import estimate_costs
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import StepCost

FIRST_TOKENS = 8
RUNS = 6
DRAFT_STEPS = 4
SMALL_TOKENS, LARGE_TOKENS = 1, 16


async def warm_up(
    step: Callable[..., Awaitable[None]], max_step_tokens: int, model: ModelConfig, speculation: Speculation | None
) -> None:
    """Run a plan through all stages; with `speculation`, learn what its drafts cost.

    `step(tokens, draft_steps=0)` runs one dummy plan to its end.
    """
    await step(min(FIRST_TOKENS, max_step_tokens))
    large = min(LARGE_TOKENS, max_step_tokens)
    if speculation is not None and speculation.has_draft_model:
        for _ in range(RUNS):
            await step(SMALL_TOKENS, DRAFT_STEPS)
    if speculation is None or large <= SMALL_TOKENS:
        return
    costs = estimate_costs(model)
    seconds = {SMALL_TOKENS: float("inf"), large: float("inf")}
    for size in (SMALL_TOKENS, large) * RUNS:
        began = time.perf_counter()
        await step(size)
        seconds[size] = min(seconds[size], time.perf_counter() - began)
    speculation.cost = StepCost.of_two(
        (SMALL_TOKENS, seconds[SMALL_TOKENS]),
        (large, seconds[large]),
        costs.head / (model.num_layers * costs.layer + costs.head),
    )
