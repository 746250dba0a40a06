"""Hugging Face's `generate` with the orders of `vllm_offline`: one prompt at a time, with or without prompt lookup.

Reads one JSON order per line (`prompts` of one, `output_tokens`, `stop_token_ids`) and answers each with `{"seconds",
"output_tokens"}`. It exits at the end of standard input.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Answer orders until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a Hugging Face model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lookup", type=int, default=0, help="prompt_lookup_num_tokens; 0 leaves it off")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loading: Any = AutoModelForCausalLM
    model = loading.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    model.eval()
    options: dict[str, Any] = {"prompt_lookup_num_tokens": arguments.lookup} if arguments.lookup else {}
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - standard output is this program's answer
    for line in sys.stdin:
        order = json.loads(line)
        (prompt,) = order["prompts"]
        ids = torch.tensor([prompt])
        begin = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=order["output_tokens"],
                do_sample=False,
                eos_token_id=order["stop_token_ids"],
                pad_token_id=order["stop_token_ids"][0],
                **options,
            )
        seconds = time.perf_counter() - begin
        tokens = output.shape[1] - len(prompt)
        print(json.dumps({"seconds": seconds, "output_tokens": tokens}), flush=True)  # noqa: T201 - the same


if __name__ == "__main__":
    main()
