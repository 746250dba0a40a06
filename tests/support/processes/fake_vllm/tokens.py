"""The stand-in's model: a token that follows from all ids before it, and from the noise that was asked for.

Greedy answers are a function of the ids alone, so an answer that goes on elsewhere from the right ids goes on alike,
and one from wrong ids doesn't. Sampled answers depend on how many draws the *server* has made for the request, as
vLLM's do, whose generator starts anew with a continued request; with keyed noise they depend on ids and on all that the
logits processor is told, the border between prompt and output among it, and keep to the grammar.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_vllm.request_draws import RequestDraws, read_draws

UNMASKED = "FAKE_VLLM_UNMASKED"
"""Set: grammars are not kept to, as if the logits processor had lost them."""
COMPILES_FOR = "FAKE_VLLM_COMPILES_FOR"
"""For how many steps each request's grammar is not compiled yet; 0 where it isn't set."""
NOT_YET = 0
_awaited: Counter[int] = Counter()
"""Steps for which a request, by its number, has been told to wait."""


def next_token(
    ids: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    draws: int,
    vocabulary: int,
    adapter: str | None,
    model_dir: Path | None = None,
) -> int:
    """The token after `ids`; without a grammar none of the first hundred, which may be control tokens."""
    noise: object = ()
    told = read_draws(sampling.get("extra_args"))
    if told is not None and told.awaits_grammar:
        return _word_on_grammar(told)
    if sampling.get("temperature", 1.0) > 0:
        noise = (sampling.get("seed"), draws)
    elif told is not None:
        noise = told.sampling
    text = repr((list(ids), noise, adapter)).encode()
    drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    if told is None or told.sampling.json_schema is None or model_dir is None or UNMASKED in os.environ:
        return 100 + drawn % (vocabulary - 100)
    assert _awaited[told.number] >= _steps_to_wait(), "a step waits for a compiler"
    admitted = _admitted(ids, told, model_dir, vocabulary)
    return admitted[drawn % len(admitted)]


def _word_on_grammar(told: RequestDraws) -> int:
    if _awaited[told.number] >= _steps_to_wait():
        return told.eos_token_ids[0]
    _awaited[told.number] += 1
    return NOT_YET


def _steps_to_wait() -> int:
    return int(os.environ.get(COMPILES_FOR, "0"))


def _admitted(ids: Sequence[int], told: RequestDraws, model_dir: Path, vocabulary: int) -> list[int]:
    """What the grammar admits after the output so far."""
    assert told.sampling.json_schema is not None
    matcher = JsonGrammars(model_dir, vocabulary, told.eos_token_ids).matcher(told.sampling.json_schema)
    for token in ids[told.sampling.num_prompt_tokens :]:
        if not matcher.consume_token(token):
            return list(told.eos_token_ids)
    bits = matcher.compute_bitmask()
    return [token for token in range(vocabulary) if bits[token // 8] >> token % 8 & 1]


def logprobs_of(token: int, count: int, vocabulary: int) -> dict[str, Any]:
    """One entry of `logprobs.content`: the sampled token, then `count` candidates."""
    best = [(token + step) % vocabulary for step in range(max(1, count))]
    top = [{"token_id": each, "logprob": -math.log1p(rank + 1), "rank": rank + 1} for rank, each in enumerate(best)]
    return top[0] | {"top_logprobs": top[:count]}


def prompt_logprobs_of(token: int, count: int, vocabulary: int) -> dict[str, Any]:
    """One entry of `prompt_logprobs`: the prompt's token, of rank 3, and the `count` likeliest."""
    ranked = {token: 3} | {(token + step) % vocabulary: rank for rank, step in enumerate((1, 2, 0), start=1)}
    ranked |= {(token + rank) % vocabulary: rank for rank in range(4, count + 1)}
    return {
        str(each): {"logprob": -math.log1p(rank), "rank": rank, "decoded_token": None}
        for each, rank in ranked.items()
        if rank <= count or each == token
    }
