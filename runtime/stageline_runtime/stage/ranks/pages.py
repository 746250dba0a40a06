"""A stage's health pages where it has several ranks: each is asked on its own socket, and one answers for all.

Status and phase are of all ranks. Metrics and timeline of the stage are the first rank's, since all run the same plans;
what differs from rank to rank has series of its own, with the label `rank`. A rank that takes too long to answer is
taken to be where it was.
"""

import http.client
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from stageline_api.health import Phase, StageStatus
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_runtime import metric_names as names
from stageline_runtime.contract import PodContract
from stageline_runtime.stage.ranks.account import RankAccount, phase_of_ranks, status_of_ranks
from stageline_runtime.stage.telemetry.metrics import StageFamilies

ANSWER_SECONDS: Final = 1.0
_END_OF_OPEN_METRICS: Final = b"# EOF\n"


class RankPages:
    """`HealthPages` for the supervisor; `addresses` are the ranks', in their order."""

    def __init__(self, contract: PodContract, addresses: Sequence[bytes]) -> None:
        self._addresses = tuple(addresses)
        self._accounts: dict[int, RankAccount] = {}
        # Enough for two clients at a time: a hung rank occupies a thread until the request's limit.
        self._threads = ThreadPoolExecutor(2 * len(self._addresses), thread_name_prefix="ask-ranks")
        self._nobody = StageStatus(
            phase=Phase.STARTING,
            stage=contract.stage,
            stage_count=contract.stage_count,
            incarnation=contract.incarnation,
        )
        self._registry = MetricRegistry()
        self._registry.add(_RankCollector(self, contract))

    def phase(self) -> Phase:
        return phase_of_ranks(self.accounts())

    def status(self) -> bytes:
        return status_of_ranks(self.accounts(), self._nobody).model_dump_json().encode()

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The first rank's, where it answers, and those of the ranks."""
        of_ranks, content_type = self._registry.exposition(accept)
        of_stage = self._ask(0, "/metrics", accept) or b""
        return of_stage.removesuffix(_END_OF_OPEN_METRICS) + of_ranks, content_type

    def timeline(self, since_seq: int) -> bytes:
        return self._ask(0, f"/timeline?since_seq={since_seq}") or b"{}"

    def account(self) -> bytes | None:
        return None

    def accounts(self) -> list[RankAccount | None]:
        """What each rank says now, or said last; None before it has said anything. All are asked at once."""
        ranks = range(len(self._addresses))
        for rank, answer in zip(ranks, self._threads.map(lambda rank: self._ask(rank, "/account"), ranks), strict=True):
            if answer is not None:
                self._accounts[rank] = RankAccount.model_validate_json(answer)
        return [self._accounts.get(rank) for rank in ranks]

    def _ask(self, rank: int, path: str, accept: str = "") -> bytes | None:
        connection = _RankConnection(self._addresses[rank])
        try:
            connection.request("GET", path, headers={"Accept": accept})
            answer = connection.getresponse()
            return answer.read() if answer.status == http.client.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


class _RankConnection(http.client.HTTPConnection):
    def __init__(self, address: bytes) -> None:
        super().__init__("rank", timeout=ANSWER_SECONDS)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_SECONDS)
        self.sock.connect(self._address)


class _RankCollector(Collector):
    def __init__(self, pages: RankPages, contract: PodContract) -> None:
        self._pages = pages
        self._families = StageFamilies([contract.config.served_name, str(contract.stage)])

    def collect(self) -> Iterator[Metric]:
        answered = self._pages.accounts()
        accounts = [(str(rank), one) for rank, one in enumerate(answered) if one is not None]
        yield self._families.by_label(names.RANK_BUSY, [(rank, one.busy_seconds) for rank, one in accounts])
        told = [(rank, seconds) for rank, one in accounts if (seconds := one.exchange_seconds) is not None]
        yield self._families.by_label(names.RANK_EXCHANGE, told)
        yield self._families.by_label(names.RANK_MEMORY, [(rank, one.status.memory_bytes) for rank, one in accounts])
        phase = phase_of_ranks(answered)
        yield self._families.by_label(names.STAGE_PHASE, [(one.value, float(one is phase)) for one in Phase])
        yield self._families.single(names.STAGE_MEMORY, sum(one.status.memory_bytes for _, one in accounts))
