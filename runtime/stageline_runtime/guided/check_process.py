"""The process in which the engine has schemas compiled first, each in a fork that can be killed.

Says `{}` once the tokenizer is read. Then takes one schema a line, a JSON string, and answers each with two lines: the
fork's `{"pid": …}`, which is nobody else's until the next schema is sent, and `{"error": null}`, or the sentence why
that schema can't guide, or `{"is_over_time": true}` when it had its CPU time. What a fork that died otherwise leaves is
`{"is_over_time": false}`. Ends with its standard input, or with its parent.
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from stageline_runtime.guided.check_fork import Fork, end_with_parent
from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars
from stageline_runtime.guided.rehearsal import rehearse

_NICENESS: Final = 10
"""Streams under way come first."""


def main(cpu_seconds: str, model_dir: str, vocab_size: str, *eos_token_ids: str) -> None:
    # A compile under way reads no end of input.
    end_with_parent()
    os.nice(_NICENESS)
    grammars = JsonGrammars(Path(model_dir), int(vocab_size), map(int, eos_token_ids))
    try:
        grammars.load()
    except GrammarError:
        pass  # and every schema is answered with it
    _say({})
    fork: Fork | None = None
    for line in sys.stdin:
        # The engine may signal the last one until it has read its answer, and sends this schema only then.
        if fork is not None:
            fork.bury()
        fork = Fork(partial(_answer, grammars, json.loads(line)), float(cpu_seconds))
        _say({"pid": fork.pid})
        answer, is_over_time = fork.answer()
        _say(json.loads(answer) if answer else {"is_over_time": is_over_time})


def _answer(grammars: JsonGrammars, schema: str) -> str:
    return json.dumps({"error": _fault(grammars, schema)})


def _fault(grammars: JsonGrammars, schema: str) -> str | None:
    try:
        return rehearse(partial(grammars.matcher, schema), grammars.vocab_size, grammars.eos_token_ids)
    except GrammarError as error:
        return str(error)


def _say(answer: Mapping[str, str | int | None]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
