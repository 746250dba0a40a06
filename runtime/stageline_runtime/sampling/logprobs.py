"""Log probabilities of a sampled token and of the likeliest ones, under the model's own distribution.

They are the log-softmax of the raw logits, before bias, penalties, grammar, temperature and truncation, as OpenAI and
vLLM report them by default. Computed for the rows that ask, and for no others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import TokenLogprobs
from stageline_runtime.sampling.adjustments import Placing, stay

LOWEST = -9999.0
"""OpenAI's word for "next to impossible"; JSON has no minus infinity."""


class RawLogprobs:
    """Log-softmax of the rows that ask for it, taken before anything changes the logits. On a device, nothing waits."""

    def __init__(self, logits: Tensor, top_counts: list[int | None], place: Placing = stay) -> None:
        """`logits` `[num_rows, vocab_size]`; `top_counts` has for each row how many tokens to list, None for none."""
        self._top_counts = top_counts
        asking = [index for index, count in enumerate(top_counts) if count is not None]
        self._place_of = {index: place for place, index in enumerate(asking)}
        if asking:
            self._asking = place(torch.tensor(asking))
            self._values = torch.log_softmax(logits[self._asking].float(), dim=-1).clamp_(min=LOWEST)

    def read(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """What `of` needs once the tokens are drawn, still where the logits are; nothing when no row asks.

        Values of the tokens `[num_asking, 1]`, then the best values and ids `[num_asking, most]`.
        """
        if not self._place_of:
            return ()
        most = min(max(count for count in self._top_counts if count is not None), self._values.shape[1])
        best = self._values.topk(most, dim=-1)
        return self._values.gather(1, tokens[self._asking][:, None]), best.values, best.indices

    def of(self, index: int, read: Sequence[Tensor]) -> TokenLogprobs | None:
        """What row `index` reports, by what was read and is on the host now; None for a row that didn't ask."""
        count, place = self._top_counts[index], self._place_of.get(index)
        if count is None or place is None:
            return None
        own, values, ids = (tensor[place] for tensor in read)
        return TokenLogprobs(own.item(), tuple(zip(ids.tolist()[:count], values.tolist()[:count], strict=True)))
