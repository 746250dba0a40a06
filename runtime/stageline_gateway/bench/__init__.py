"""What the gateway costs: `python -m stageline_gateway.bench` measures it against a synthetic engine."""
