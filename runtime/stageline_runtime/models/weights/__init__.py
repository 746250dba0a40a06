"""A stage's weights: found in checkpoints, read by name, fused for the decoder."""
