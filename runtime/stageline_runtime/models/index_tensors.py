"""Lists of integers as tensors, by the shortest way: a step makes several, each on its path.

`torch.tensor` looks at every element to find a type and a shape; here both are known.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def index_tensor(values: Sequence[int]) -> Tensor:
    """`[len(values)]` int64, in memory of its own."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)
