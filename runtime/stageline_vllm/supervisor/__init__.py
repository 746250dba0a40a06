"""The supervisor of one vLLM node: starts it, watches it, reports how it ended. Without torch or vllm."""
