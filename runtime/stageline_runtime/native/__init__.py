"""C kernels of the CPU stage, compiled for the machine they run on when a stage loads."""
