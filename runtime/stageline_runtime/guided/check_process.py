"""The process in which the engine has schemas compiled first: what takes too long there is killed with it.

Says `{}` once the tokenizer is read. Then takes one schema a line, a JSON string, and answers each with one line:
`{"error": null}`, or the sentence why that schema can't guide. Ends with its standard input, or with its parent.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars

_PR_SET_PDEATHSIG: Final = 1
_NICENESS: Final = 10
"""Streams under way come first."""


def main(model_dir: str, vocab_size: str, *eos_token_ids: str) -> None:
    # A compile under way reads no end of input.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    grammars = JsonGrammars(Path(model_dir), int(vocab_size), map(int, eos_token_ids))
    try:
        grammars.load()
    except GrammarError:
        pass  # and every schema is answered with it
    _say({})
    for line in sys.stdin:
        _say({"error": _fault(grammars, json.loads(line))})


def _fault(grammars: JsonGrammars, schema: str) -> str | None:
    try:
        grammars.matcher(schema)
    except GrammarError as error:
        return str(error)
    return None


def _say(answer: dict[str, str | None]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
