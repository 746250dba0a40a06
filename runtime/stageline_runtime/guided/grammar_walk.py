"""One answer's way through its grammar, as far as it has come: by the ids of its output alone, within limits of time.

Whoever follows a grammar holds up everybody's next token meanwhile, on the last stage as on the event loop of an engine
over vLLM. So each call into the library has a limit of CPU time (`mask_time`). A grammar of which calls took too long
is followed for nobody for a while, so that a request's many choices cost no more than a few. Free of torch.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from llguidance import LLMatcher

from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars, schema_key
from stageline_runtime.guided.mask_time import AnswerMaskTime, GrammarVerdict, SharedMaskTime, granted
from stageline_runtime.guided.watched_calls import OverrunError, WatchedCalls

TOO_SLOW: Final = "the grammar takes too long to follow"
MOST_JUDGED: Final = 1024
"""Grammars of which it is remembered whether they took too long, the latest."""

T = TypeVar("T")


class GrammarWalk:
    """Where one answer stands. Never lets a token pass once the grammar is lost: `failure` says why instead."""

    def __init__(
        self,
        compiled: Future[LLMatcher],
        calls: WatchedCalls | None = None,
        shared: SharedMaskTime | None = None,
        verdict: GrammarVerdict | None = None,
    ) -> None:
        """The last three are shared with other walks, each where it is given."""
        self.compiled = compiled
        """Done where the next call waits for no compiler."""
        self._calls = WatchedCalls() if calls is None else calls
        self._time = AnswerMaskTime(shared)
        self._verdict = GrammarVerdict() if verdict is None else verdict
        self._matcher: LLMatcher | None = None
        self.failure: str | None = None
        """Why the output can't be followed any more; the request has to fail."""

    def take(self, token_ids: tuple[int, ...]) -> None:
        """Follow the output by `token_ids`. After the end nothing is taken: later rows are not used."""
        matcher = self._ready()
        if matcher is None:
            return
        seconds = self._time.left + granted(len(token_ids))
        refused = self._watched(lambda: _refused(matcher, token_ids, seconds), len(token_ids))
        if refused:
            self.failure = f"token {refused[0]} is not admitted by the grammar"

    def _watched(self, call: Callable[[], T], num_tokens: int = 0) -> T | None:
        """What `call` on the matcher returns; None where that took too long, after which there is no matcher."""
        left = self._time.left
        if left > 0 and not self._verdict.is_too_slow:
            try:
                made = self._calls.make(call, left + granted(num_tokens))
            except OverrunError:
                self._time.use(left + granted(num_tokens), num_tokens)
                self._verdict.overran(left)
            else:
                self._time.use(made.seconds, num_tokens)
                return made.result
        self.failure, self._matcher = TOO_SLOW, None
        return None

    def _ready(self) -> LLMatcher | None:
        if self._matcher is None and self.failure is None:
            try:
                self._matcher = self.compiled.result()
            except GrammarError as error:
                self.failure = str(error)
        return None if self.failure is not None else self._matcher


W = TypeVar("W", bound=GrammarWalk)


class WalkMaker(Generic[W]):
    """Compiles grammars in one thread of its own, and begins walks through them that share what calls may take."""

    def __init__(
        self,
        grammars: JsonGrammars,
        begin: Callable[[Future[LLMatcher], WatchedCalls, SharedMaskTime, GrammarVerdict], W],
    ) -> None:
        self.grammars = grammars
        self._begin = begin
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self.calls = WatchedCalls()
        self._shared = SharedMaskTime()
        self._verdicts: OrderedDict[str, GrammarVerdict] = OrderedDict()

    def load(self) -> Future[None]:
        """Read the tokenizer ahead of the first grammar: who does that holds the interpreter's lock for long."""
        return self._thread.submit(self.grammars.load)

    def start(self, schema: str) -> W:
        """Used, as its walks are, by one thread."""
        kept = self.grammars.kept(schema)
        compiled = self._thread.submit(self.grammars.matcher, schema) if kept is None else _made(kept)
        return self._begin(compiled, self.calls, self._shared, self._verdict(schema_key(schema)))

    def close(self) -> None:
        """Let the threads end."""
        self._thread.shutdown(wait=False)
        self.calls.close()

    def _verdict(self, key: str) -> GrammarVerdict:
        verdict = self._verdicts.setdefault(key, GrammarVerdict())
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MOST_JUDGED:
            self._verdicts.popitem(last=False)
        return verdict


def _refused(matcher: LLMatcher, token_ids: tuple[int, ...], seconds: float) -> tuple[int, ...]:
    """The token of these that the grammar doesn't admit; empty where it takes all up to its end.

    Raises OverrunError: CPU time is up, and many may be to come, for which nobody waits any more.
    """
    until = time.thread_time() + seconds
    for token in token_ids:
        if matcher.is_stopped():
            break
        if time.thread_time() > until:
            raise OverrunError
        # `consume_token` would hold the interpreter's lock, and with it whoever is to leave the call behind.
        if not matcher.consume_tokens([token]):
            return (token,)
    return ()


def _made(matcher: LLMatcher) -> Future[LLMatcher]:
    future: Future[LLMatcher] = Future()
    future.set_result(matcher)
    return future
