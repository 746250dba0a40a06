"""The stage's blocking end against a real asyncio server: order, timeouts, large messages, and the other side's end."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from processes.model_certificates import write_certificates
from stageline_api.runtime_config import TlsConfig
from stageline_runtime.plan_bus.bus import BusClosedError, EngineBusConnection, StageBus, encode_frame
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    GroupFailed,
    Loaded,
    PlanRow,
    Shutdown,
    StepPlan,
    ToEngine,
    ToStage,
    WorkOutstanding,
)
from stageline_runtime.tls.certificates import PodIdentity
from stageline_runtime.tls.channel import TlsChannel

SECONDS = 60.0


class EngineSide:
    """An engine's end on a loop of its own thread; remembers what came."""

    def __init__(self, identity: PodIdentity | None = None) -> None:
        self.identity = identity
        self.received: list[ToEngine] = []
        self.lost: list[str] = []
        self.connection: EngineBusConnection | None = None
        self.channel: TlsChannel | None = None
        self.loop = asyncio.new_event_loop()
        self.port = 0

    def make_connection(self) -> EngineBusConnection:
        self.channel = None if self.identity is None else TlsChannel(self.identity, is_server=True)
        self.connection = EngineBusConnection(
            lambda _connection, message: self.received.append(message),
            lambda _connection, reason: self.lost.append(reason),
            channel=self.channel,
        )
        return self.connection

    def do(self, action: Callable[[EngineBusConnection], None]) -> None:
        """Run `action` on the loop once the stage is connected."""
        wait_for(lambda: self.connection is not None)
        assert self.connection is not None
        self.loop.call_soon_threadsafe(action, self.connection)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextmanager
def running_engine_side(identity: PodIdentity | None = None) -> Iterator[EngineSide]:
    side = EngineSide(identity)
    server = side.loop.run_until_complete(side.loop.create_server(side.make_connection, "127.0.0.1", 0))
    side.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=side.loop.run_forever)
    thread.start()

    async def close() -> None:
        server.close()
        if side.connection is not None:
            side.connection.close()

    try:
        yield side
    finally:
        asyncio.run_coroutine_threadsafe(close(), side.loop).result(SECONDS)
        side.loop.call_soon_threadsafe(side.loop.stop)
        thread.join(SECONDS)
        side.loop.run_until_complete(asyncio.sleep(0))
        side.loop.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return write_certificates(tmp_path_factory.mktemp("certificates"), trustme.CA())


@pytest.fixture(params=["in clear", "by TLS"])
def engine(request: pytest.FixtureRequest, certificates: TlsConfig) -> Iterator[EngineSide]:
    with running_engine_side(PodIdentity(certificates) if request.param == "by TLS" else None) as side:
        yield side


@pytest.fixture
def stage(engine: EngineSide) -> Iterator[StageBus]:
    bus = StageBus.connect("127.0.0.1", engine.port, SECONDS, engine.identity)
    # The kernel connects; an engine's end that is not there yet could not be closed at the end. The stage's end of TLS
    # is open once it has sent its last words of the handshake, the engine's once it has them.
    wait_for(lambda: engine.connection is not None and (engine.channel is None or engine.channel.is_open))
    yield bus
    bus.close()


def plan(seq: int, num_tokens: int = 1) -> StepPlan:
    rows = (PlanRow(0, 1, 0, num_tokens, tuple(range(num_tokens)), need_sample=True),)
    return StepPlan(seq, 0, (), rows, num_tokens, -1, feedback_posted=False, dummy=False)


def test_messages_arrive_in_order_however_they_are_packed(engine: EngineSide, stage: StageBus) -> None:
    """One write with many frames, and one frame larger than any socket buffer."""
    plans = [plan(0), plan(1), plan(2, 500_000), plan(3)]
    engine.do(lambda connection: connection.send_frame(b"".join(map(encode_frame, plans))))
    received: list[ToStage] = []
    while len(received) < len(plans):
        message = stage.receive(SECONDS)
        if message is not None:
            received.append(message)
    assert received == plans


def test_receive_gives_up_in_time(stage: StageBus) -> None:
    assert stage.receive(0) is None
    assert stage.receive(0.05) is None


def test_something_else_that_can_be_read_ends_the_wait_once(engine: EngineSide, stage: StageBus) -> None:
    watched, other = socket.socketpair()
    with watched, other:
        descriptor = os.dup(watched.fileno())
        stage.wake_once(descriptor)
        other.sendall(b"x")
        assert stage.receive(None) is None, "nothing else ends a wait without a limit"
        assert not is_open(descriptor), "one is left for each worker that ends"
        assert stage.receive(0.05) is None, "it can still be read, and wakes nobody again"
        engine.do(lambda connection: connection.send_frame(encode_frame(WorkOutstanding(True))))
        assert stage.receive(SECONDS) == WorkOutstanding(True)


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hangs up", "says nothing"])
def test_who_does_not_finish_tls_is_no_engine(certificates: TlsConfig, hangs_up: bool) -> None:
    error, words = (BusClosedError, "closed the plan bus") if hangs_up else (TimeoutError, "did not finish the TLS")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        host, port = listener.getsockname()
        connecting = pool.submit(StageBus.connect, host, port, 2.0, PodIdentity(certificates))
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1)[0] == 0x16, "a handshake is what it says first"
            if hangs_up:
                connection.recv(1 << 16)
                connection.shutdown(socket.SHUT_WR)
            with pytest.raises(error, match=words):
                connecting.result(SECONDS)


def test_a_large_message_to_the_engine_waits_for_room(engine: EngineSide, stage: StageBus) -> None:
    for _ in range(20_000):
        stage.send(Loaded(0, 12345))
    wait_for(lambda: len(engine.received) == 20_000)


def test_an_unread_end_is_found_and_stays_unread(engine: EngineSide, stage: StageBus) -> None:
    assert stage.unread_end() is None
    told = GroupFailed(2, "stage 2 is gone")

    def say_and_close(connection: EngineBusConnection) -> None:
        connection.send_frame(encode_frame(WorkOutstanding(True)))
        connection.send_frame(encode_frame(told))
        connection.close()

    engine.do(say_and_close)
    wait_for(stage.engine_hung_up)
    assert stage.unread_end() == told
    assert stage.receive(SECONDS) == WorkOutstanding(True)
    assert stage.unread_end() == told, "off the wire with the message before it, and still unread"
    assert stage.receive(SECONDS) == told
    assert stage.unread_end() is None


def test_the_engine_s_end_is_seen_after_its_last_message(engine: EngineSide, stage: StageBus) -> None:
    assert not stage.engine_hung_up()

    def say_and_close(connection: EngineBusConnection) -> None:
        connection.send_frame(encode_frame(WorkOutstanding(True)))
        connection.send_frame(encode_frame(Shutdown("drained")))
        connection.close()

    engine.do(say_and_close)
    wait_for(stage.engine_hung_up)
    assert stage.receive(SECONDS) == WorkOutstanding(True)
    assert stage.receive(SECONDS) == Shutdown("drained")
    with pytest.raises(BusClosedError, match="the engine closed the plan bus"):
        stage.receive(SECONDS)


def test_garbage_from_the_engine_ends_the_stage_s_end(engine: EngineSide, stage: StageBus) -> None:
    engine.do(lambda connection: connection.send_frame(b"\x02\x00\x00\x00\xff\xff"))
    with pytest.raises(BusProtocolError, match="does not decode"):
        stage.receive(SECONDS)


def test_garbage_from_a_stage_ends_its_connection(engine: EngineSide) -> None:
    with socket.create_connection(("127.0.0.1", engine.port)) as connection:
        connection.sendall(b"\x02\x00\x00\x00\xff\xff")
        while connection.recv(100):
            pass  # TLS says why
    wait_for(lambda: bool(engine.lost))
    assert ("does not decode" if engine.identity is None else "it does not speak TLS") in engine.lost[0]
    assert engine.received == []


def test_a_stage_that_leaves_is_told_once_with_a_reason(engine: EngineSide, stage: StageBus) -> None:
    stage.send(Loaded(0, 1))
    stage.close()
    wait_for(lambda: bool(engine.lost))
    assert engine.lost == ["closed the plan bus"]
    assert engine.received == [Loaded(0, 1)]


@pytest.fixture
def deaf_port() -> Iterator[socket.socket]:
    """A socket that has a port but does not listen: nobody else gets the port, and who connects is refused."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved


def test_connect_tries_until_somebody_listens(deaf_port: socket.socket) -> None:
    port = deaf_port.getsockname()[1]
    with pytest.raises(TimeoutError, match=f"no engine at 127.0.0.1:{port} within 0.3 s: "):
        StageBus.connect("127.0.0.1", port, 0.3)


def test_connect_waits_for_a_late_engine(deaf_port: socket.socket) -> None:
    port = deaf_port.getsockname()[1]
    found: list[StageBus] = []
    thread = threading.Thread(target=lambda: found.append(StageBus.connect("127.0.0.1", port, SECONDS)))
    thread.start()
    time.sleep(0.15)  # not for luck: whenever the engine comes, the stage must find it
    deaf_port.listen()
    accepted, _ = deaf_port.accept()
    thread.join(SECONDS)
    accepted.close()
    assert len(found) == 1
    found[0].close()


class LateSender(StageBus):
    """A stage that is told to end, by a signal, while it sends."""

    interruption: Callable[[], None] | None = None

    def _write(self, frame: bytes) -> None:
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            interruption()
        super()._write(frame)


def test_what_a_signal_s_handler_sends_does_not_cut_into_what_it_interrupts(engine: EngineSide) -> None:
    stage = LateSender.connect("127.0.0.1", engine.port, SECONDS, engine.identity)
    assert isinstance(stage, LateSender)
    stage.interruption = lambda: stage.send(Loaded(0, 2))
    stage.send(Loaded(0, 1))
    stage.send(Loaded(0, 3))
    wait_for(lambda: len(engine.received) == 3)
    assert engine.received == [Loaded(0, 1), Loaded(0, 2), Loaded(0, 3)]
    stage.close()


def test_threads_may_send_at_once(engine: EngineSide, stage: StageBus) -> None:
    def send_all() -> None:
        for number in range(2000):
            stage.send(Loaded(0, number))

    threads = [threading.Thread(target=send_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    wait_for(lambda: len(engine.received) == 8000)
    numbers = [each.memory_bytes for each in engine.received if isinstance(each, Loaded)]
    assert sorted(numbers) == sorted(4 * list(range(2000)))
