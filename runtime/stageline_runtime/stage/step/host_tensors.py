"""Small tensors made on the host for each step."""

from array import array

import torch
from torch import Tensor


def int64s(numbers: list[int]) -> Tensor:
    """`torch.tensor(numbers)`, which would look at each number."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)
