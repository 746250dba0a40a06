"""`python -m stageline_runtime.stage.ranks.rank_process`: one rank of a stage, as its supervisor starts it."""

import sys

from stageline_runtime.contract import begin
from stageline_runtime.stage.ranks.inherited import InheritedRank
from stageline_runtime.termination import RuntimeFailure, write_last_words


def main() -> int:
    """Run one rank to its end; the exit code."""
    try:
        contract = begin("stage")
    except RuntimeFailure as failure:
        return write_last_words(failure.message(None))
    inherited = InheritedRank.read(contract.rank)
    from stageline_runtime.stage.process import StageProcess  # torch takes a second to import

    return StageProcess(contract, inherited=inherited).run()


if __name__ == "__main__":
    sys.exit(main())
