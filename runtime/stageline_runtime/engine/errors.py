"""Refusals: the reason to reject a request, as the one exception that the HTTP edge converts to an `EngineError` body.

`EngineRefusal` with a `retry_after_seconds` means "try again later"; `PromptError` means "never, until the request
is changed" and names the field in OpenAI's vocabulary.
"""

from stageline_api.engine_http import ContextExceeded, EngineError, ErrorCode

HTTP_STATUS_OF_CODE: dict[ErrorCode, int] = {
    ErrorCode.INVALID_VALUE: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.NO_CHAT_TEMPLATE: 400,
    ErrorCode.NOT_READY: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.QUEUE_FULL: 503,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.KEY_MISSING: 401,
}


class EngineRefusal(Exception):  # noqa: N818 - a refusal is an answer, not a fault
    """A request that is not admitted; `message` is a sentence its sender can act on."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        retry_after_seconds: float | None = None,
        *,
        param: str | None = None,
        exceeded: ContextExceeded | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.param = param
        self.exceeded = exceeded

    @property
    def http_status(self) -> int:
        """Status of the HTTP answer: 400 for what must change, 503 for what may be tried again, 401, 404 and 405."""
        return HTTP_STATUS_OF_CODE[self.code]

    def body(self) -> EngineError:
        return EngineError(
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_seconds=self.retry_after_seconds,
            exceeded=self.exceeded,
        )


class PromptError(EngineRefusal):
    """A request that can't be served unchanged. `param` names the field to change."""

    def __init__(self, code: ErrorCode, message: str, *, param: str, exceeded: ContextExceeded | None = None) -> None:
        super().__init__(code, message, param=param, exceeded=exceeded)
