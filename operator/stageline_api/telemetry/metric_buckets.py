"""Bucket families of all histograms, each with the range that it must resolve. A histogram uses exactly one.

Quantiles are interpolated within a bucket, so bounds are closest where a limit or a comparison is likely.
"""

from typing import Final

from stageline_api.telemetry.metric_spec import Buckets

FIRST_TOKEN: Final[Buckets] = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600,
)  # fmt: skip
"""Time to first token: from a cached prompt on an idle group to a queue of minutes; finest around 0.5 s."""
TOKEN_GAP: Final[Buckets] = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 15, 60,
)  # fmt: skip
"""Time between tokens: 1000 tok/s to a stall; finest between 10 and 100 ms, where a reader begins to notice."""
REQUEST: Final[Buckets] = (
    0.05, 0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 45, 60, 120, 240, 480, 960, 1920, 3600,
)  # fmt: skip
"""Whole answers and their parts: one short token to an hour of text; finest between 1 and 60 s."""
QUEUE: Final[Buckets] = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""From a step's length (a request admitted at once) to minutes in a full queue."""
REQUEST_TOKENS: Final[Buckets] = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
"""Lengths of prompts and answers: one token to the longest contexts, 1-2-5, because lengths span decades."""
STEP: Final[Buckets] = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""From a decode of one small stage on a GPU to a prefill chunk of a large one on a CPU. Bounds differ by at most a
factor 2 up to a second: stages of one pipeline must be distinguishable, and an imbalance of 2 is already bad.
"""
STEP_TOKENS: Final[Buckets] = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Tokens of one plan: a lone decode to a full prefill chunk; powers of two, as padded sizes are."""
COHORT_ROWS: Final[Buckets] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of one plan; powers of two, the usual batch sizes."""
TRANSFER: Final[Buckets] = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
"""From a device-to-device copy to a link that is almost down."""
RECONCILE: Final[Buckets] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""One reconcile: a read of the cache to some dozen slow writes; finest around 10 to 100 ms."""
LIFECYCLE: Final[Buckets] = (1, 2.5, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 1800, 3600)
"""From pods to a ready group: a small model on one machine to an hour of download; finest between 10 s and 2 min."""
