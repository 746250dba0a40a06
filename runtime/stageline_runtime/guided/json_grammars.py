"""JSON schemas, regular expressions and grammars compiled for one model's tokenizer, in engine and last stage.

The library's fuel limits, set here, bound most of what compiling and following may cost, the same in engine and stage;
what they don't bound is found out by the engine, in a process that can be killed (`check_process`). Compiled grammars
are kept by the schema's hash, the latest first, and are there for whoever needs one while another is compiled.
Never raises for a client's schema anything but `GrammarError`. Free of torch. Safe from any thread.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from stageline_api.engine_http import GRAMMAR_MARK, REGEX_MARK
from stageline_runtime.guided.schema_numbers import inexact_number
from stageline_runtime.model_facts.tokenizer_loading import load_tokenizer

MAX_KEPT = 64
SHOWN_CHARACTERS = 200


def _limits(step_max_items: int, max_items_in_row: int) -> LLParserLimits:
    """With those of the lexer, which are all grammars'.

    An answer's lexer keeps every state that it came to, up to two KiB each. A string of 20,000 characters at most has
    that many; an expression that makes new ones with every token ends there.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=step_max_items, verbose_errors=False,
        max_items_in_row=max_items_in_row, max_grammar_size=500_000, max_lexer_states=50_000,
    )  # fmt: skip


_SCHEMA_LIMITS: Final = _limits(step_max_items=20_000, max_items_in_row=2_000)
_WRITTEN_LIMITS: Final = _limits(step_max_items=5_000, max_items_in_row=1_000)
"""Of a grammar that a client wrote, which may be as ambiguous as it likes: what a mask costs grows with the cube of a
row's items. With these the dearest mask found behind a first token takes 0.2 s; SQL or JSON as grammars pass with less
than half of them. The first mask of all, whose row has no such limit, is rehearsed."""
_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between tokens of JSON: enough for deep indentation, but not for a model that wanders off in blanks."""


class GrammarError(Exception):
    """A schema that can't guide, with a sentence about why."""


class JsonGrammars:
    """Matchers for one model. The tokenizer is read when it is first needed."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._model_dir = model_dir
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        self.foreign_token: int | None = None
        """In no text, and no end: only a grammar that names it admits it. Known once the tokenizer is read."""
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        """Of what is kept; never held for long."""
        self._compiling = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, schema: str) -> LLMatcher:
        """A matcher at its beginning for the schema in `schema`, or for what comes after a mark there.

        Raises:
            GrammarError: the schema is wrong, uses what isn't supported, or is too large; or no token ends an answer.
        """
        with self._compiling:
            if (kept := self.kept(schema)) is not None:
                return kept
            compiled = self._compile(schema)
        with self._lock:
            self._kept[schema_key(schema)] = compiled
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return compiled.deep_copy()

    def kept(self, schema: str) -> LLMatcher | None:
        """A matcher at its beginning where the schema was compiled before; never waits for a compile."""
        key = schema_key(schema)
        with self._lock:
            if (kept := self._kept.get(key)) is None:
                return None
            self._kept.move_to_end(key)
            return kept.deep_copy()

    def load(self) -> None:
        """Read the tokenizer now, so that the first request doesn't wait for it."""
        with self._compiling:
            self._loaded()

    def _compile(self, schema: str) -> LLMatcher:
        limits = _WRITTEN_LIMITS if schema.startswith(GRAMMAR_MARK) else _SCHEMA_LIMITS
        try:
            if schema.startswith(REGEX_MARK):
                grammar = LLMatcher.grammar_from_regex(schema.removeprefix(REGEX_MARK))
            elif schema.startswith(GRAMMAR_MARK):
                grammar = LLMatcher.grammar_from_lark(_as_lark(schema.removeprefix(GRAMMAR_MARK)))
            else:
                if (fault := inexact_number(schema)) is not None:
                    raise GrammarError(fault)
                grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
        except ValueError as error:
            raise GrammarError(first_line(str(error))) from error
        matcher = LLMatcher(self._loaded(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        return matcher

    def _loaded(self) -> LLTokenizer:
        if not self.eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token")
        if self._tokenizer is None:
            text = load_tokenizer(self._model_dir).to_str()
            try:
                tokenizer = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)
            except ValueError as error:
                raise GrammarError("this model's tokenizer can't be guided") from error
            special = filter(tokenizer.is_special_token, range(self.vocab_size))
            self.foreign_token = next((token for token in special if token not in self.eos_token_ids), None)
            self._tokenizer = tokenizer
        return self._tokenizer


def _as_lark(grammar: str) -> str:
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter of GBNF raises whatever it meets
        raise GrammarError(f"it is neither Lark nor GBNF: {first_line(str(error))}") from error


def schema_key(schema: str) -> str:
    """By which it is known where it was compiled before."""
    return hashlib.sha256(schema.encode()).hexdigest()


def first_line(message: str) -> str:
    """Of what the library says, fit for a sentence of one's own."""
    line = message.strip().split("\n", 1)[0]
    return line if len(line) <= SHOWN_CHARACTERS else line[:SHOWN_CHARACTERS] + "…"
