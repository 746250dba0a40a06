"""llama.cpp in the rounds of Stageline's bench: runs in llama.cpp's environment, imports nothing of Stageline.

Reads one JSON order per line (`prompts`, `output_tokens`) and answers each with `{"seconds", "output_tokens"}`. All
prompts are decoded together, one row of each in every step, greedily, without end-of-sequence. Prompts are prefilled
before, in steps of up to `--step-tokens`. It exits at the end of standard input.
"""

import argparse
import json
import sys
import time

import llama_cpp
import numpy as np

Row = tuple[int, int, int, bool]
"""Token, position, stream, whether its logits are needed."""


class Llama:
    """One context for the maximum number of concurrent streams."""

    def __init__(self, model: str, threads: int, streams: int, stream_tokens: int, step_tokens: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp can't load {model}")
        shape = llama_cpp.llama_context_default_params()
        shape.n_ctx = streams * stream_tokens
        shape.n_seq_max = streams
        shape.n_batch = shape.n_ubatch = step_tokens
        shape.n_threads = shape.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, shape)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {shape.n_ctx} tokens")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._step_tokens = step_tokens
        self._batch = llama_cpp.llama_batch_init(step_tokens, 0, 1)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> int:
        """Continue all prompts; returns how many tokens were sampled."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        newest = self._take_prompts(prompts)
        sampled = len(newest)
        for step in range(output_tokens - 1):
            rows = [(newest[stream], len(prompts[stream]) + step, stream, True) for stream in range(len(prompts))]
            newest = dict(self._decode(rows))
            sampled += len(newest)
        return sampled

    def _take_prompts(self, prompts: list[list[int]]) -> dict[int, int]:
        rows: list[Row] = [
            (token, position, stream, position == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        newest: dict[int, int] = {}
        for start in range(0, len(rows), self._step_tokens):
            newest.update(self._decode(rows[start : start + self._step_tokens]))
        return newest

    def _decode(self, rows: list[Row]) -> list[tuple[int, int]]:
        """One step: the token sampled for each stream with requested logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, stream, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode ended with {status}")
        found = []
        for index, (_, _, stream, wanted) in enumerate(rows):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, index)
                found.append((stream, int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))))
        return found


def main() -> None:
    """Answer orders until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True, help="most prompts of a round")
    parser.add_argument("--stream-tokens", type=int, default=640)
    parser.add_argument("--step-tokens", type=int, default=512)
    given = parser.parse_args()
    llama = Llama(given.model, given.threads, given.streams, given.stream_tokens, given.step_tokens)
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - standard output is this program's answer
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.perf_counter()
        tokens = llama.generate(order["prompts"], order["output_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - begin, "output_tokens": tokens}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
