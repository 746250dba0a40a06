"""Budget for log probabilities of prompts that wait in the engine for their clients, reserved in advance.

A request reserves its maximum when it is admitted, because a slow client never holds the stages back. So their
total memory is bounded for any client behaviour.
"""

from dataclasses import dataclass

from stageline_api.engine_http import ErrorCode
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.errors import EngineRefusal, PromptError
from stageline_runtime.plan_bus.prompt_report import report_bytes


def needed_bytes(request: AdmittedRequest) -> int:
    """Upper bound in bytes of the log probabilities of the request's prompt."""
    top_count = request.sampling.num_top_prompt_logprobs
    if top_count is None:
        return 0
    return report_bytes(len(request.prompt_token_ids) - (request.prompt_told or 0), top_count)


@dataclass(slots=True)
class PromptRoom:
    limit_bytes: int = 64 * 1024 * 1024
    held_bytes: int = 0

    def take(self, request: AdmittedRequest) -> int:
        """Reserve the request's bytes; returns them, for `give_back` at its end.

        Raises:
            PromptError: it needs more than the whole budget, naming `prompt_logprobs`.
            EngineRefusal: it needs more than is free now.
        """
        size_bytes = needed_bytes(request)
        if size_bytes > self.limit_bytes:
            asked = request.sampling.num_top_prompt_logprobs
            message = (
                f"Log probabilities of {len(request.prompt_token_ids)} prompt tokens, with prompt_logprobs = {asked}, "
                f"take {size_bytes} bytes; this engine holds {self.limit_bytes} at most."
            )
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="prompt_logprobs")
        if size_bytes and self.held_bytes + size_bytes > self.limit_bytes:
            message = f"log probabilities of prompts hold {self.held_bytes} bytes, and {size_bytes} more have no room"
            raise EngineRefusal(ErrorCode.QUEUE_FULL, message, 1.0)
        self.held_bytes += size_bytes
        return size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Release the bytes of a finished request."""
        self.held_bytes -= size_bytes
