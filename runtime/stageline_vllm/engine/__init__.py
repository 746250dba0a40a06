"""The engine container's core over vLLM: it sends requests to vLLM's HTTP server as token ids and receives token
ids."""
