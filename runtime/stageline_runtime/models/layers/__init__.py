"""What models are made of: attention over the paged cache, feed-forward blocks, norms, head, and a plan's batch."""
