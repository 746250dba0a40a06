"""vLLM's logits processor with keyed noise: `--logits-processors stageline_vllm.plugin.keyed_noise:KeyedNoise`.

Implements the interface of vLLM's first model runner (`VLLM_USE_V2_MODEL_RUNNER=0`), which passes a processor the
ids of a request's output. It is named on the command line and not as an entry point, because only then does vLLM
keep these ids up to date. `keyed_draws` has all the logic. vLLM loads it in the worker, and also in its server to
check requests.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from stageline_runtime.sampling.device_sampler import compile_draws
from stageline_vllm.plugin.keyed_draws import KeyedDraws
from stageline_vllm.request_draws import read_draws

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class KeyedNoise(LogitsProcessor):  # type: ignore[misc]  # vllm has no types where this is checked
    """Draws the tokens of requests that bring `RequestDraws`; leaves all others alone."""

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """vLLM: raises ValueError, which it answers with a 400, for draws that can't be read or would be undone."""
        if read_draws(sampling_params.extra_args) is None:
            return
        changed = {
            "temperature": (sampling_params.temperature, 0.0),
            "repetition_penalty": (sampling_params.repetition_penalty, 1.0),
            "frequency_penalty": (sampling_params.frequency_penalty, 0.0),
            "presence_penalty": (sampling_params.presence_penalty, 0.0),
        }
        for name, (value, neutral) in changed.items():
            if value != neutral:
                raise ValueError(f"{name} is {value}; a request that is drawn by keyed noise has {neutral}")

    def __init__(self, vllm_config: "VllmConfig", device: "torch.device", is_pin_memory: bool) -> None:  # noqa: ARG002
        """vLLM: made once in every worker, of which those of the last stage sample."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        stage = parallel.rank // parallel.tensor_parallel_size
        self._samples = stage == parallel.pipeline_parallel_size - 1
        most_at_once = vllm_config.scheduler_config.max_num_seqs
        self._draws = KeyedDraws(Path(model.model), model.get_vocab_size(), most_at_once)
        if self._samples:
            compile_draws(model.get_vocab_size(), device)

    def is_argmax_invariant(self) -> bool:
        """vLLM: never, the drawn token is what argmax is to find."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """vLLM calls this before each step with the requests removed, added and moved, which apply in this order."""
        if batch_update is None or not self._samples:
            return
        for place in batch_update.removed:
            self._draws.remove(place)
        for place, params, prompt, output in batch_update.added:
            self._draws.add(place, params.extra_args, prompt, output)
        for source, target, direction in batch_update.moved:
            self._draws.move(source, target, swap=direction is MoveDirectionality.SWAP)

    def apply(self, logits: Tensor) -> Tensor:
        """vLLM: float32 logits `[num_requests, vocab_size]`, before its argmax."""
        return self._draws.apply(logits)
