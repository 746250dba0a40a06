"""From logits to tokens: keyed noise and the sampler of the last stage."""
