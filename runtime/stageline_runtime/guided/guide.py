"""One request's way through its grammar on the last stage: which tokens may come next, and what came.

The engine has the grammar compiled, in a thread, before it hands the request over, so that no step waits for it. Should
it have been forgotten since, it is compiled again and the first mask waits. End of sequence is admitted exactly where
the grammar may end. The state follows from the output's ids alone (`grammar_walk`).
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stageline_runtime.guided.grammar_walk import GrammarWalk, WalkMaker
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.sampling.adjustments import Placing, stay


class Guide(GrammarWalk):
    """Masks one slot's logits."""

    def mask(self, logits: Tensor, place: Placing = stay) -> None:
        """Set what the grammar doesn't admit next to minus infinity, in `logits` `[vocab_size]`."""
        matcher = self._ready()
        bits = None if matcher is None else self._watched(matcher.compute_bitmask)
        if matcher is None or bits is None:
            return
        if matcher.is_error():
            self.failure = f"the grammar became too complex to follow: {matcher.get_error()[:200]}"
            return
        admitted = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(logits), bitorder="little")
        logits.masked_fill_(place(torch.from_numpy(admitted == 0)), float("-inf"))


class GuideMaker(WalkMaker[Guide]):
    """Reads the tokenizer, in its thread, ahead of the first request."""

    def __init__(self, grammars: JsonGrammars) -> None:
        super().__init__(grammars, Guide)
        # What fails here fails again, and is told, when a request needs it.
        self.load()

    def prepare(self, schema: str, when_ready: Callable[[], None]) -> None:
        """Compile `schema` ahead of its request; `when_ready` is called, in any thread, however that ends."""
        self._thread.submit(self.grammars.matcher, schema).add_done_callback(lambda _: when_ready())
