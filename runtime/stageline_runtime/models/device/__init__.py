"""What an accelerator has of its own: kernels and captured graphs."""
