"""The engine container's core over vLLM: requests go to its HTTP server as token ids, tokens come back."""
