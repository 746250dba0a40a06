"""An admitted request's parameters as the last stage takes them, once, with the plan that fills the slot."""

from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.plan_bus.messages import RowSampling


def row_sampling(request: AdmittedRequest) -> RowSampling:
    """What the last stage needs to know of a request."""
    sampling = request.sampling
    return RowSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        choice=sampling.choice,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        num_top_logprobs=sampling.top_logprobs,
        json_schema=sampling.json_schema,
        num_prompt_tokens=len(request.prompt_token_ids),
    )
