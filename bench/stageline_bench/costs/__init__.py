"""What counting, tracing and timelines cost the processes that do them."""
