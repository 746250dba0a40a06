"""Log probabilities of a sampled token and of the likeliest ones, under the model's own distribution.

They are the log-softmax of the raw logits, before bias, penalties, grammar, temperature and truncation, as OpenAI and
vLLM report them by default. Computed for the rows that ask, and for no others.
"""

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import TokenLogprobs

LOWEST = -9999.0
"""OpenAI's word for "next to impossible"; JSON has no minus infinity."""


class RawLogprobs:
    """Log-softmax of some rows of a step, taken before anything changes the logits."""

    def __init__(self, logits: Tensor, top_counts: list[int | None]) -> None:
        """`logits` `[num_rows, vocab_size]`; `top_counts` has for each row how many tokens to list, None for none."""
        self._top_counts = top_counts
        asking = [index for index, count in enumerate(top_counts) if count is not None]
        self._place = {index: place for place, index in enumerate(asking)}
        self._values = torch.log_softmax(logits[asking].float(), dim=-1).clamp_(min=LOWEST) if asking else None

    def of(self, index: int, token: int) -> TokenLogprobs | None:
        """What row `index` reports when it drew `token`; None for a row that didn't ask."""
        count = self._top_counts[index]
        if count is None or self._values is None:
            return None
        row = self._values[self._place[index]]
        values, ids = row.topk(min(count, len(row)))
        return TokenLogprobs(row[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
