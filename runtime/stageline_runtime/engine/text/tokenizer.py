"""Text to token ids and back, with the model's `tokenizer.json`, to the same ids as transformers.

Raw text gets the special tokens that the post-processor of `tokenizer.json` adds at its edges (beginning of
sequence). Text from a chat template gets none, because the template has written them. Encoding never truncates or
pads.

Tokens that only the accompanying files define also belong to the tokenizer (`tokenizer_loading`). `add_bos_token`
is ignored, as transformers ignores it next to a `tokenizer.json`.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from stageline_api.engine_http import ErrorCode
from stageline_api.failures import FailureClass
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.token_bytes import TokenBytes
from stageline_runtime.model_facts.model_fields import UnsupportedModelError
from stageline_runtime.model_facts.tokenizer_loading import load_tokenizer
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
        self._added_ids = {token.content: index for index, token in added.items()}
        self.token_bytes = TokenBytes(backend)
        self.hidden_ids = lru_cache(self._hidden_ids)
        """Ids of control tokens, except those with a text in the first argument, and of added tokens in the second."""

    @classmethod
    def load(cls, model_dir: Path) -> "EngineTokenizer":
        """Load the tokenizer of the model in `model_dir`.

        Raises:
            RuntimeFailure: class ModelLoad; a file is missing, isn't a tokenizer, or disagrees with another.
        """
        try:
            return cls(load_tokenizer(model_dir))
        except UnsupportedModelError as error:
            raise RuntimeFailure(FailureClass.MODEL_LOAD, str(error), operation="load tokenizer") from error

    def _hidden_ids(self, shown: tuple[str, ...], hidden: tuple[str, ...]) -> frozenset[int]:
        ids = [{self._added_ids[text] for text in texts if text in self._added_ids} for texts in (shown, hidden)]
        return (self.special_token_ids - ids[0]) | ids[1]

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; the model's embedding may hold more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

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
        """Text of `token_ids`; unknown ids give no text, nor do special tokens by default."""
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
