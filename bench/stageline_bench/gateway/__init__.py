"""Cost of the gateway: `python -m stageline_bench.gateway` measures it against a synthetic engine."""
