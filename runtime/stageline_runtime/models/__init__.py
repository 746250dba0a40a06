"""The compute of one stage: weights, attention over the KV cache, decoder layers, embedding and head."""
