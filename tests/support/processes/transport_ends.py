"""Stages of one pipeline on loopback that meet by real connections: their contracts, and how they join."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from stageline_api.runtime_config import RuntimeConfig, Timeouts, TlsConfig
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.messages import TransportKind
from stageline_runtime.transport.protocol import Transport, WireSizes
from stageline_runtime.transport.rendezvous import join
from stageline_runtime.transport.ring import link_address, listen
from stageline_runtime.transport.socket_transport import SocketTransport, StagedTransport


def transport_contract(
    stage: int,
    step_seconds: float,
    tls: TlsConfig | None = None,
    rendezvous_seconds: float = 120,
    stage_count: int = 2,
) -> PodContract:
    """The contract of one of the stages."""
    config = RuntimeConfig(
        model_name="m",
        namespace="n",
        served_name="s",
        source="file:///m",
        cache_dir="/c",
        stage_count=stage_count,
        timeouts=Timeouts(rendezvous_seconds=rendezvous_seconds, step_seconds=step_seconds),
        tls=tls,
    )
    return PodContract(
        config=config,
        stage=stage,
        stage_count=stage_count,
        group=0,
        incarnation=1,
        pod_ip="127.0.0.1",
        master_addr="127.0.0.1",
        master_port=1,
        bus_token="unused",
    )


def join_all(
    contracts: Sequence[PodContract],
    sizes: WireSizes,
    kind: TransportKind = TransportKind.HOST,
    accelerators: Sequence[Accelerator | None] | None = None,
) -> list[Transport]:
    """All stages of a pipeline, each told where the next one listens, as an engine does."""
    listeners = [listen(contract) for contract in contracts]
    addresses = [link_address(each) for each in listeners]

    def meet(contract: PodContract, listener: socket.socket, accelerator: Accelerator | None, index: int) -> Transport:
        next_address = addresses[(index + 1) % len(addresses)]
        return join(contract, kind, sizes, accelerator=accelerator, listener=listener, next_address=next_address)

    with ThreadPoolExecutor(len(contracts)) as pool:
        on = accelerators or [None] * len(contracts)
        return list(pool.map(meet, contracts, listeners, on, range(len(contracts))))


def hang_up(transport: Transport) -> None:
    """End its connections, as the end of its process does: by TLS without a word of farewell."""
    wire = transport._wire if isinstance(transport, StagedTransport) else transport
    assert isinstance(wire, SocketTransport)
    for connection in (wire._after._connection, wire._before._connection):
        with suppress(OSError):  # it is closed already
            # Wakes whichever thread waits on it. TLS's own would have that thread go on in clear.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)
        connection.close()
