"""How hard the fuzzing tests try: little in every run of the tests, more in a soak, which also takes seeds of its own.

`STAGELINE_FUZZ_FACTOR=50 STAGELINE_FUZZ_SEED=$RANDOM pytest tests/gateway/openai_api` soaks.
"""

import os
from typing import Final

FACTOR: Final = max(1, int(os.environ.get("STAGELINE_FUZZ_FACTOR", "1")))
SEED: Final = int(os.environ.get("STAGELINE_FUZZ_SEED", "5"))
"""The same bytes in every run, unless asked otherwise: a failure of somebody's unrelated change would help nobody."""
