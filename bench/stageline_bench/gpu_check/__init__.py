"""`make gpu-check`: one command that shows on a GPU what no test on a CPU can, and writes docs/dev/gpu-check.md."""
