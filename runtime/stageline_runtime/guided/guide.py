"""One request's way through its grammar on the last stage: which tokens may come next, and what came.

The engine has the grammar compiled, in a thread, before it hands the request over, so that no step waits for it. Should
it have been forgotten since, it is compiled again and the first mask waits. End of sequence is admitted exactly where
the grammar may end. The state follows from the output's ids alone.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars
from stageline_runtime.sampling.adjustments import Placing, stay


class Guide:
    """Masks one slot's logits. Never lets a token pass once the grammar is lost: `failure` says why instead."""

    def __init__(self, compiled: Future[LLMatcher]) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self.failure: str | None = None
        """Why the output can't be guided any more; the request has to fail."""

    def mask(self, logits: Tensor, place: Placing = stay) -> None:
        """Set what the grammar doesn't admit next to minus infinity, in `logits` `[vocab_size]`."""
        matcher = self._ready()
        if matcher is None:
            return
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            self.failure = f"the grammar became too complex to follow: {matcher.get_error()[:200]}"
            return
        admitted = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(logits), bitorder="little")
        logits.masked_fill_(place(torch.from_numpy(admitted == 0)), float("-inf"))

    def take(self, token_ids: tuple[int, ...]) -> None:
        """Follow the output by `token_ids`. After the end nothing is taken: later rows are not used."""
        matcher = self._ready()
        for token in token_ids:
            if matcher is None or matcher.is_stopped():
                return
            if not matcher.consume_token(token):
                self.failure = f"token {token} is not admitted by the grammar"
                return

    def _ready(self) -> LLMatcher | None:
        if self._matcher is None and self.failure is None:
            try:
                self._matcher = self._compiled.result()
            except GrammarError as error:
                self.failure = str(error)
        return None if self.failure is not None else self._matcher


class GuideMaker:
    """Compiles grammars in one thread of its own, and reads the tokenizer there ahead of the first request."""

    def __init__(self, grammars: JsonGrammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        # What fails here fails again, and is told, when a request needs it.
        self._thread.submit(grammars.load)

    def prepare(self, schema: str, when_ready: Callable[[], None]) -> None:
        """Compile `schema` ahead of its request; `when_ready` is called, in any thread, however that ends."""
        self._thread.submit(self._grammars.matcher, schema).add_done_callback(lambda _: when_ready())

    def start(self, schema: str) -> Guide:
        kept = self._grammars.kept(schema)
        return Guide(self._thread.submit(self._grammars.matcher, schema) if kept is None else _made(kept))


def _made(matcher: LLMatcher) -> Future[LLMatcher]:
    future: Future[LLMatcher] = Future()
    future.set_result(matcher)
    return future
