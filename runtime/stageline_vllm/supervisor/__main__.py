"""`python -m stageline_vllm.supervisor`: runs the stage where Stageline is on a volume beside vLLM's own image."""

import sys

from stageline_vllm.supervisor.entry import run_stage

if __name__ == "__main__":
    sys.exit(run_stage())
