"""Text to token ids and back, with the model's `tokenizer.json`, to the same ids as transformers.

Two kinds of text come in: raw text gets the special tokens that the post-processor of `tokenizer.json` puts at its
edges (beginning of sequence), and text from a chat template gets none, because the template has written them. Encoding
never truncates or pads.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from stageline_api.engine_http import ErrorCode
from stageline_api.failures import FailureClass
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.token_bytes import TokenBytes
from stageline_runtime.termination import RuntimeFailure


class EngineTokenizer:
    """A loaded tokenizer. Encoding long text lets other threads run, so it may go to a worker thread."""

    def __init__(self, backend: Tokenizer) -> None:
        """Wrap `backend`; its truncation and padding, which belong to training, are switched off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        """Ids that never show in text (control tokens)."""
        self.token_bytes = TokenBytes(backend)

    @classmethod
    def load(cls, model_dir: Path) -> "EngineTokenizer":
        """Load `tokenizer.json` of the model in `model_dir`.

        Raises:
            RuntimeFailure: class ModelLoad; the file is missing or isn't a tokenizer.
        """
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise _broken(f"{path.name} is missing; only models with a fast tokenizer can be served")
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise _broken(f"{path.name} is not a tokenizer: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; the model's embedding may hold more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> tuple[int, ...]:
        """Token ids of `text`; `add_special_tokens` lets the post-processor add its own.

        `param` names the field that the text came from, for errors.

        Raises:
            PromptError: the text isn't valid Unicode (a lone surrogate).
        """
        check_unicode(text, param)
        # The batch call skips the offsets of every token, which takes less than half the time on long text.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids without a token give nothing, nor do special tokens unless asked for."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, index: int) -> str:
        """A token as the vocabulary writes it; empty for an id without a token."""
        return self._backend.id_to_token(index) or ""


def check_unicode(text: str, param: str) -> None:
    """Refuse text that UTF-8 can't carry.

    Raises:
        PromptError: naming the character and its place.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        character = f"U+{ord(text[error.start]):04X}"
        message = f"The text is not valid Unicode: lone surrogate {character} at character {error.start}."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param=param) from error


def _broken(detail: str) -> RuntimeFailure:
    return RuntimeFailure(FailureClass.MODEL_LOAD, detail, operation="load tokenizer")
