"""What runs inside vLLM's own processes. The only place that imports vllm and torch, and only when vLLM loads it."""
