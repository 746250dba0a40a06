"""The own decoder on an accelerator: a plan's indices as one small table, attention kernels, layers."""
