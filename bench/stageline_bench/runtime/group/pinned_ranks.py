"""A real stage of several ranks, each on its own core, under the pod contract.

`python -m stageline_bench.runtime.group.pinned_ranks 0,1`.

The supervisor starts this program again for each rank, which moves to its core before torch counts its threads, and
then runs as a rank. Otherwise it is the same as `stageline stage`, which does not pin: in a pod, the kubelet assigns
cores.
"""

import os
import sys

from stageline_api import env
from stageline_runtime.contract import begin
from stageline_runtime.stage.ranks import rank_process
from stageline_runtime.stage.ranks.supervisor import RankSupervisor
from stageline_runtime.termination import RuntimeFailure, write_last_words


def main(cores: str) -> int:
    """Run the stage's supervisor, or the rank in the environment; returns the exit code."""
    if (rank := os.environ.get(env.STAGE_RANK)) is not None:
        os.sched_setaffinity(0, {int(cores.split(",")[int(rank)])})
        return rank_process.main()
    try:
        contract = begin("stage")
    except RuntimeFailure as failure:
        return write_last_words(failure.message(None))
    return RankSupervisor(contract, command=("-m", "stageline_bench.runtime.group.pinned_ranks", cores)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
