"""What the gateway costs: `python -m stageline_bench.gateway` measures it against a synthetic engine."""
