"""Ranks of a stage in a local group: what they exchange, each exchange a barrier of the seeded interleaving.

A rank that makes another exchange than the others, or one of another shape, is an error at once; one that makes none
leaves the others waiting, which is a deadlock here. The model's tokens depend on what every rank gave, an idle one too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chaos.interleaving import Interleaving
from oracles.hash_model import VOCAB_SIZE, HashModel
from stageline_runtime.model_facts.rank_cut import head_rows
from stageline_runtime.ranks.expert_exchange import expert_exchange
from stageline_runtime.ranks.layer_sums import layer_sums
from stageline_runtime.ranks.protocol import RankGroup


class LocalExchanges:
    """What the ranks of one stage have given so far, exchange by exchange."""

    def __init__(self, interleaving: Interleaving, size: int) -> None:
        self._interleaving = interleaving
        self.size = size
        self.counts = [0] * size
        """Exchanges that each rank has come to."""
        self._given: list[dict[int, Tensor]] = []
        self._described: list[str] = []

    def exchange(self, rank: int, rows: Tensor, operation: str) -> list[Tensor]:
        """What every rank gave, in their order, once all of them have."""
        number = self.counts[rank]
        self.counts[rank] += 1
        described = f"{operation} of {rows.dtype} {tuple(rows.shape)}"
        if number == len(self._given):
            self._given.append({})
            self._described.append(described)
        assert described == self._described[number], f"rank {rank} is at {described}, others {self._described[number]}"
        given = self._given[number]
        given[rank] = rows.clone()
        self._interleaving.wait_until(lambda: len(given) == self.size, f"rank {rank}: {operation}")
        return [given[each] for each in range(self.size)]


class LocalRank:
    """One rank's end; a `RankGroup`."""

    def __init__(self, exchanges: LocalExchanges, rank: int) -> None:
        self.rank = rank
        self.size = exchanges.size
        self._exchanges = exchanges

    def all_reduce(self, rows: Tensor, operation: str, /) -> Tensor:
        return torch.stack(self._exchanges.exchange(self.rank, rows, operation)).sum(0)

    def all_gather(self, rows: Tensor, operation: str, /) -> Tensor:
        return torch.stack(self._exchanges.exchange(self.rank, rows, operation))

    def reduce_scatter(self, rows: Tensor, operation: str, /) -> Tensor:
        return self.all_reduce(rows, operation)[self.rank]

    def close(self) -> None:
        pass


def local_ranks(interleaving: Interleaving, size: int) -> tuple[LocalExchanges, Sequence[LocalRank]]:
    """The exchanges of a stage of `size` ranks, and each rank's end of them."""
    exchanges = LocalExchanges(interleaving, size)
    return exchanges, [LocalRank(exchanges, rank) for rank in range(size)]


class RankedHashModel(HashModel):
    """The hash model as a mixture whose experts are cut over ranks: the expert that a value picks hands it on."""

    def __init__(self, stage: int, num_blocks: int | None, ranks: RankGroup) -> None:
        super().__init__(stage, num_blocks)
        self._ranks = ranks
        self._exchange = expert_exchange(ranks, stage)

    def layers(self, hidden: Tensor, batch: Any) -> Tensor:
        out = super().layers(hidden, batch)
        if self._exchange is None:
            return out
        gathered = self._exchange.gather(out)
        is_own = gathered % self._ranks.size == self._ranks.rank
        return self._exchange.scatter(torch.where(is_own, gathered, 0))


class SharedHashModel(HashModel):
    """The hash model as layers that ranks share: each gives a share of what is handed on, and has a part of the head.

    Hidden tensors are `[padded_tokens, num_ranks]`, of which a lane carries a column: the value and the column's
    number. Each row has to be of the same value in all columns.
    """

    def __init__(self, stage: int, num_blocks: int | None, ranks: RankGroup) -> None:
        super().__init__(stage, num_blocks)
        self._ranks = ranks
        self._columns = torch.arange(ranks.size)
        self._sums = layer_sums(ranks, stage)
        self._width = head_rows(VOCAB_SIZE, ranks.size)
        self.first_token = ranks.rank * self._width

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids) + self._columns

    def layers(self, hidden: Tensor, batch: Any) -> Tensor:
        out = super().layers(self._values(hidden), batch)
        share = out // self._ranks.size
        own = out - (self._ranks.size - 1) * share if self._ranks.rank == 0 else share
        return (own if self._sums is None else self._sums.attention(own)) + self._columns

    def head(self, hidden_rows: Tensor) -> Tensor:
        return self.whole_head(self.head_part(hidden_rows))

    def head_part(self, hidden_rows: Tensor) -> Tensor:
        """As `CutsHead`."""
        return super().head(self._values(hidden_rows))[:, self.first_token : self.first_token + self._width]

    def whole_head(self, part: Tensor) -> Tensor:
        """As `CutsHead`."""
        padded = torch.nn.functional.pad(part, (0, self._width - part.shape[1]))
        gathered = self._ranks.all_gather(padded, "all-gather, logits")
        return gathered.transpose(0, 1).flatten(1)[:, :VOCAB_SIZE].contiguous()

    def _values(self, hidden: Tensor) -> Tensor:
        """`[num_rows, 1]`; of a plan that another stage left out as cancelled, nothing lies there."""
        values = hidden - self._columns
        is_whole = (values == values[:, :1]).all(dim=1) | (hidden == 0).all(dim=1)
        assert is_whole.all(), (
            f"rank {self._ranks.rank}: parts of different rows lie beside each other: {hidden.tolist()}"
        )
        return values[:, :1].contiguous()
