"""`python -m stageline_bench.runtime`: the same as `stageline bench`, without the command line installed.

Ctrl-C and SIGTERM end a program with every process it started.
"""

from stageline_bench.benchmark_program import run_benchmark
from stageline_bench.runtime.command import bench

if __name__ == "__main__":
    run_benchmark(bench)
