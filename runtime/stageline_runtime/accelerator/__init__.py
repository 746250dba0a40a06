"""The device that a stage computes on when it is not the CPU: streams, events, pinned memory, its own memory."""
