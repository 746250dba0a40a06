"""One worker of a gateway of several: what it shares with the others, and how it serves. Runs in a process of its own.

Requests never wait for the supervisor or another worker: limits are in shared memory. Only operators' questions do.
"""

import socket
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from stageline_api.errors import UserError
from stageline_gateway.admission.accounts import Account, Books, Held
from stageline_gateway.admission.admission import GATEWAY
from stageline_gateway.admission.shared_books import SharedBooks, SharedMemory
from stageline_gateway.app import build_app
from stageline_gateway.errors import ApiError
from stageline_gateway.server.http_protocol import Connections
from stageline_gateway.server.listening import worker_socket
from stageline_gateway.server.serve import GatewayServers, Leaving, ShutdownTimes, Sockets, end_at_once, serve
from stageline_gateway.server.tls import TlsFiles
from stageline_gateway.serving import Serving, check_login
from stageline_gateway.telemetry import merging
from stageline_gateway.telemetry.metric_names import WORKERS_LOST
from stageline_gateway.telemetry.metrics import GatewayMetrics
from stageline_gateway.whole import Place, State, Whole, together
from stageline_gateway.workers.link import Link, SilentError
from stageline_gateway.workers.messages import Answered, Begin, Drain, Failed, Stop, frame
from stageline_gateway.workers.rounds import COUNTERS

STATE: Final = "state"
"""The topic of `/status`."""
FIRST_READ_SECONDS: Final = 5.0


class OneOfMany(Whole):
    """A gateway as one of its workers sees it: whichever is asked asks all."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        super().__init__(metrics)
        self.leaving: Leaving | None = None
        self._before: merging.Report = []
        """What those who were in this worker's place before had counted."""
        tell = {COUNTERS: self._tell_counters, STATE: lambda: msgspec.msgpack.encode(self.state())}
        self.link = Link(tell, self._begin, lambda: self.close(), self._stop)

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        said = (await self._ask(COUNTERS)).said
        reports = [(merging.decoded(each.body), each.is_alive) for each in said]
        return merging.exposition([one if is_alive else merging.counted(one) for one, is_alive in reports], accept)

    async def status(self) -> State:
        states = [msgspec.msgpack.decode(each.body) for each in (await self._ask(STATE)).said]
        return together(self.state(), states)

    def drain(self) -> None:
        self.close()
        self.link.say(Drain())

    async def _ask(self, topic: str) -> Answered:
        try:
            return await self.link.ask(topic)
        except SilentError as error:
            raise ApiError(503, str(error), "server_error", code="worker_silent", retry_after_seconds=2.0) from None

    def _tell_counters(self) -> bytes:
        mine = merging.report_of(self.metrics.registry.collectors.collect())
        return merging.encoded(merging.report_of(merging.added([mine, self._before])) if self._before else mine)

    def _begin(self, begin: Begin) -> None:
        before = merging.counted(merging.decoded(begin.counted))
        # This one the supervisor counts: who dies early tells of nothing.
        self._before = [family for family in before if family.name != WORKERS_LOST.family]
        self.metrics.workers_lost.inc(begin.times_lost)

    def _stop(self, stop: Stop) -> None:
        if stop.at_once:
            end_at_once()
        if self.leaving is not None:
            self.leaving.begin(stop.withdraw, "as the supervisor said")


@dataclass(frozen=True)
class WorkerPlace(Place):
    made: list[OneOfMany] = field(default_factory=list)

    def whole(self, metrics: GatewayMetrics) -> Whole:
        self.made.append(OneOfMany(metrics))
        return self.made[0]


class SharedConnections(Connections):
    def __init__(self, account: Account, limit: int) -> None:
        super().__init__(limit)
        self._account = account

    def count(self, open_here: int) -> bool:
        self._account.put(Held.CONNECTIONS, open_here)
        return self._account.total(Held.CONNECTIONS) <= self.limit


@dataclass(frozen=True)
class Shared:
    """What workers of a gateway share."""

    memory: SharedMemory
    public: socket.socket
    """Held by the supervisor; each worker has a socket of its own on its address. So is the next."""
    admin: socket.socket


def run_worker(serving: Serving, shared: Shared, index: int, end: socket.socket) -> int:
    """Serve as the worker `index`, whose supervisor has the other end of a socket, until told; returns an exit code."""
    books: Books = SharedBooks(shared.memory, index)
    place = WorkerPlace(books, index, FIRST_READ_SECONDS)
    times = ShutdownTimes(serving.withdraw_seconds, serving.drain_seconds)
    try:
        check_login(serving.settings)
        app = build_app(serving.settings, place)
        [whole] = place.made
        sockets = Sockets(
            worker_socket(shared.public),
            worker_socket(shared.admin),
            None if serving.tls is None else TlsFiles(*serving.tls),
            serving.connection_limit,
            partial(SharedConnections, books.account(GATEWAY, "")),
        )
        serve(app, sockets, times, serving.access_log, partial(_keep_company, whole, end))
    except UserError as error:
        end.sendall(frame(Failed(error.message, error.exit_code)))
        return error.exit_code
    return 0


async def _keep_company(whole: OneOfMany, end: socket.socket, servers: GatewayServers, leaving: Leaving) -> None:
    whole.leaving = leaving
    servers.on_started = whole.link.now_serves
    await whole.link.run(end)
