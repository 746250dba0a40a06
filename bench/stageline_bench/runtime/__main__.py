"""`python -m stageline_bench.runtime`: what `stageline bench` runs, where the command line isn't installed.

Ctrl-C and SIGTERM end a program with every process it started.
"""

from stageline_bench.benchmark_program import run_benchmark
from stageline_bench.runtime.command import bench

if __name__ == "__main__":
    run_benchmark(bench)
