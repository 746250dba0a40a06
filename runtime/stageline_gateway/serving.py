"""From settings to a gateway that serves: in this process, or in several that a supervisor here starts.

What serves is imported only by the process that does.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stageline_api.telemetry.logs import identify
from stageline_gateway.settings import GatewaySettings

Listen = Callable[[], tuple[socket.socket, socket.socket]]
"""Makes the sockets for clients and operators; raises UserError."""
Say = Callable[[socket.socket, socket.socket], None]


@dataclass(frozen=True, slots=True)
class Serving:
    """What to serve, and how; the same for all workers."""

    settings: GatewaySettings
    tls: tuple[Path, Path] | None
    """Certificate and key."""
    connection_limit: int
    withdraw_seconds: float
    drain_seconds: float
    access_log: bool


def serve_alone(serving: Serving, listen: Listen, say_where: Say) -> None:
    """Until a signal. Raises UserError."""
    from stageline_gateway.app import build_app
    from stageline_gateway.server.serve import ShutdownTimes, Sockets, serve
    from stageline_gateway.server.tls import TlsFiles

    check_login(serving.settings)
    app = build_app(serving.settings)
    public, admin = listen()
    say_where(public, admin)
    tls = None if serving.tls is None else TlsFiles(*serving.tls)
    times = ShutdownTimes(serving.withdraw_seconds, serving.drain_seconds)
    serve(app, Sockets(public, admin, tls, serving.connection_limit), times, serving.access_log)


def serve_by_workers(
    workers: int, serving: Serving, listen: Listen, say_where: Say, configure_log: Callable[[], None]
) -> int:
    """Until a signal; returns the exit code. Raises UserError when no worker can serve."""
    from stageline_gateway.admission.shared_books import SharedMemory
    from stageline_gateway.server.listening import shareable
    from stageline_gateway.workers.supervisor import Supervisor

    public, admin = (shareable(one) for one in listen())
    memory = SharedMemory(workers)

    def run(index: int, end: socket.socket) -> int:
        configure_log()
        identify(worker=index)
        # Not before: the supervisor stays small.
        from stageline_gateway.worker import Shared, run_worker

        return run_worker(serving, Shared(memory, public, admin), index, end)

    return Supervisor(
        workers=workers,
        run_worker=run,
        forget=memory.forget,
        on_serving=partial(say_where, public, admin),
        grace_seconds=serving.withdraw_seconds + serving.drain_seconds,
    ).run()


def check_login(settings: GatewaySettings) -> None:
    """Raise UserError when a cluster is to be served and there is no way to log in to it."""
    if settings.endpoints_path is None:
        from stageline_gateway.groups import discovery_kubernetes

        discovery_kubernetes.check_login()
