"""Arguments and environment that the engine container's core requires of `vllm serve`. Pure.

The process that starts vLLM adds them to its own. Without one of them vLLM would refuse a request or answer it
differently.
"""

from typing import Final

from stageline_api.engine_http import MAX_TOP_LOGPROBS

LOGITS_PROCESSOR: Final = "stageline_vllm.plugin.keyed_noise:KeyedNoise"
KEY_MIDDLEWARE: Final = "stageline_vllm.plugin.asks_for_key.AsksForKey"
"""For `--middleware` of the node that has the server."""
MAX_LOGPROBS: Final = MAX_TOP_LOGPROBS + 1
"""vLLM's list includes the sampled token, so it is one longer than the reported list."""

NEEDED_WORDS: Final = (
    "--enable-scale-out",  # opens POST /inference/v1/generate: token ids in, token ids out
    "--enable-prompt-tokens-details",  # reports how much of a prompt was cached
    "--logits-processors", LOGITS_PROCESSOR,  # draws by keyed noise; named here, not as an entry point (keyed_noise)
    "--no-async-scheduling",  # the first model runner refuses it together with a pipeline
    "--scheduling-policy", "priority",  # without it, vLLM refuses a request that has a priority
    "--logprobs-mode", "raw_logprobs",  # of the model's own distribution, as the own runtime reports them
    "--max-logprobs", str(MAX_LOGPROBS),
)  # fmt: skip
NEEDED_ENVIRONMENT: Final = {
    # The first model runner shows a logits processor the ids of the output; the second one keeps them on the device.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
