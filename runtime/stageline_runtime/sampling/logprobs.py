"""Log probabilities of a sampled token and of the likeliest ones, under the model's own distribution.

They are the log-softmax of the raw logits, before bias, penalties, grammar, temperature and truncation, as OpenAI and
vLLM report them by default. Computed for the rows that ask, and for no others.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import TokenLogprobs
from stageline_runtime.sampling.adjustments import Placing, stay

LOWEST = -9999.0
"""OpenAI's word for "next to impossible"; JSON has no minus infinity."""


class RawLogprobs:
    """Log-softmax of the rows that ask for it, taken before anything changes the logits. On a device, nothing waits."""

    def __init__(self, logits: Tensor, top_counts: Mapping[int, int], place: Placing = stay) -> None:
        """`logits` `[num_rows, vocab_size]`; `top_counts`: how many tokens to list, of the rows that ask."""
        self._top_counts = top_counts
        self._place_of = {index: place for place, index in enumerate(top_counts)}
        if top_counts:
            self._asking = place(torch.tensor([*top_counts]))
            self._values = torch.log_softmax(logits[self._asking].float(), dim=-1).clamp_(min=LOWEST)

    def read(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """What `of` needs once the tokens are drawn, still where the logits are; nothing when no row asks.

        Values of the tokens `[num_asking, 1]`, then the best values and ids `[num_asking, most]`.
        """
        if not self._place_of:
            return ()
        most = min(max(self._top_counts.values()), self._values.shape[1])
        best = self._values.topk(most, dim=-1)
        return self._values.gather(1, tokens[self._asking][:, None]), best.values, best.indices

    def of(self, index: int, read: Sequence[Tensor]) -> TokenLogprobs | None:
        """What row `index` reports, by what was read and is on the host now; None for a row that didn't ask."""
        if (count := self._top_counts.get(index)) is None:
            return None
        place = self._place_of[index]
        own, values, ids = (tensor[place] for tensor in read)
        return TokenLogprobs(own.item(), tuple(zip(ids.tolist()[:count], values.tolist()[:count], strict=True)))
