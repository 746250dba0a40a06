"""vLLM in the rounds of Stageline's bench: runs in the peers' environment, imports nothing of Stageline.

Reads one JSON order per line (`prompts`, `output_tokens`, and `stop_token_ids` if answers may end) and answers each
with `{"seconds", "output_tokens"}`: the wall time of `LLM.generate` on token ids, greedy. The engine has vLLM's
defaults for a CPU except the options here. It exits at the end of standard input.
"""

import argparse
import json
import os
import sys
import time


def main() -> None:
    """Answer orders until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a Hugging Face model")
    parser.add_argument("--stages", type=int, default=1, help="pipeline_parallel_size")
    parser.add_argument("--tensor", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument("--no-tokenizer", action="store_true", help="the model's directory has none")
    parser.add_argument("--cores", required=True, help="cores of the workers, as 0|1: one set for each")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=640)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=0, help="0 leaves vLLM's default")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV cache of a worker; ample for every round here")
    parser.add_argument("--ngram", type=int, default=0, help="drafts by lookup of a row; 0 leaves them off")
    arguments = parser.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = arguments.cores
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(arguments.kv_gib)
    from vllm import LLM, SamplingParams

    options = {}
    if arguments.ngram:
        # Both bounds are required; these are from vLLM's own examples.
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": arguments.ngram,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    if arguments.max_num_batched_tokens:
        options["max_num_batched_tokens"] = arguments.max_num_batched_tokens
    engine = LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        pipeline_parallel_size=arguments.stages,
        tensor_parallel_size=arguments.tensor,
        skip_tokenizer_init=arguments.no_tokenizer,
        distributed_executor_backend="mp" if arguments.stages * arguments.tensor > 1 else None,
        # Prompts of one round repeat in the next; a cache hit would skip the measured prefill.
        enable_prefix_caching=False,
        **options,
    )
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - standard output is this program's answer
    for line in sys.stdin:
        order = json.loads(line)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=order["output_tokens"],
            ignore_eos=True,
            stop_token_ids=order.get("stop_token_ids") or None,
            detokenize=not arguments.no_tokenizer,
        )
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "output_tokens": tokens}), flush=True)  # noqa: T201 - standard output is this program's answer


if __name__ == "__main__":
    main()
