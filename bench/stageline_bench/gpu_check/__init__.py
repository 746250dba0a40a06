"""`make gpu-check`: one command that checks on a GPU what CPU tests can't, and writes docs/dev/gpu-check.md."""
