"""The process that stands over one vLLM node: its life, its end, what is told of it. Without torch or vllm."""
