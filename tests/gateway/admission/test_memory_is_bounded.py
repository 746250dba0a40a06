"""Whoever sends, however much and however slowly: what the gateway holds of bodies and connections has a limit."""

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.cpu_bounds import CpuBound
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Hold, Say, ScriptedEngine, answer
from stageline_api.engine_http import Admitted
from stageline_gateway.admission.request_body import BodyMemory, HeldBody
from stageline_gateway.errors import ApiError
from stageline_gateway.server import http_protocol
from stageline_gateway.server.http_protocol import GatewayProtocol
from stageline_gateway.settings import GatewaySettings

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
SENDERS = 40
DECLARED_BYTES = 256 * 1024
SENT_BYTES = 200 * 1024
ROOM_BYTES = 2 * 1024 * 1024
SERVER_BUFFER_BYTES = 64 * 1024 + 256 * 1024
"""What the HTTP server holds of one connection: its mark for a full buffer, and one read from the socket."""


def connect(gateway: RunningGateway) -> socket.socket:
    url = httpx.URL(gateway.url)
    return socket.create_connection((url.host, url.port or 0), timeout=60)


def bodies(gateway: RunningGateway) -> dict[str, int]:
    """What the gateway counts of bodies."""
    counted: dict[str, int] = gateway.admin.get("/status").json()["bodies"]
    return counted


def has_all_come(gateway: RunningGateway) -> bool:
    """Whether all that was sent of the bodies that are being read is here."""
    now = bodies(gateway)
    return now["bytes"] == now["being_read"] * SENT_BYTES


def buffered_bytes(gateway: RunningGateway) -> int:
    """Bytes of bodies in the HTTP server's own buffers, over all connections."""
    open_now = tuple(gateway.servers.public.server_state.connections)
    cycles = [one.cycle for one in open_now if isinstance(one, GatewayProtocol) and one.cycle is not None]
    return sum(len(cycle.body) for cycle in cycles)


@contextmanager
def bounded(tmp_path: Path, engine: ScriptedEngine, **settings: Any) -> Iterator[RunningGateway]:
    """No body that a test leaves unfinished is given up before its end."""
    patience = GatewaySettings(tmp_path / "endpoints.json", body_timeout_seconds=600, **settings)
    with running_gateway(patience) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


def test_many_large_and_slow_senders_hold_no_more_than_the_room(tmp_path: Path, engine: ScriptedEngine) -> None:
    """Forty send most of a body and stop: ten have room, and thirty are told to come back later."""
    most_buffered_bytes = 0
    room: dict[str, Any] = {"body_room_bytes": ROOM_BYTES, "retry_after_seconds": 7}
    with bounded(tmp_path, engine, **room) as gateway, ExitStack() as stack:
        senders = [stack.enter_context(connect(gateway)) for _ in range(SENDERS)]
        for sender in senders:
            with suppress(OSError):  # refused while it still sends
                sender.sendall(HEAD % DECLARED_BYTES + b" " * SENT_BYTES)
            most_buffered_bytes = max(most_buffered_bytes, buffered_bytes(gateway))
        refused_name, labels = "stageline_gateway_requests_total", {"model_name": "", "code": "503"}
        fitting = ROOM_BYTES // SENT_BYTES
        eventually(
            lambda: gateway.sample(refused_name, **labels) + bodies(gateway)["being_read"] == SENDERS,
            lambda: (gateway.sample(refused_name, **labels), bodies(gateway)),
        )
        least_bytes = ROOM_BYTES - DECLARED_BYTES - SENT_BYTES
        # What was sent may still be on its way to the gateway.
        eventually(lambda: bodies(gateway)["bytes"] >= least_bytes, lambda: f"room was left unused: {bodies(gateway)}")
        eventually(lambda: has_all_come(gateway), lambda: f"not all that was sent has come: {bodies(gateway)}")
        most_buffered_bytes = max(most_buffered_bytes, buffered_bytes(gateway))
        held = bodies(gateway)
        assert held["bytes"] <= held["most_bytes"] <= ROOM_BYTES, held
        assert held["being_read"] <= fitting, held
        assert gateway.sample("stageline_gateway_body_bytes") == held["bytes"]
        assert most_buffered_bytes <= SENDERS * SERVER_BUFFER_BYTES, most_buffered_bytes
        refusal = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * DECLARED_BYTES})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "body_room")
        assert refusal.headers["retry-after"] == "7"
        stack.close()
        eventually(
            lambda: bodies(gateway)["bytes"] == bodies(gateway)["being_read"] == 0,
            lambda: f"not given back: {bodies(gateway)}",
        )
        assert gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200


def test_a_body_counts_until_its_answer_has_ended(tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold(), *answer("late")[1:]]
    body = {"model": MODEL, "prompt": "x" * 100_000}
    with bounded(tmp_path, engine, body_room_bytes=350_000) as gateway, ThreadPoolExecutor(2) as pool:

        def is_sent() -> bool:
            """While one is parsed and sent there is twice as much of it."""
            return len(engine.requests) == len(running) and bodies(gateway)["bytes"] < len(running) * 102_000

        running = list[Future[httpx.Response]]()
        for _ in range(2):
            running.append(pool.submit(gateway.http.post, "/v1/completions", json=body))
            eventually(is_sent, lambda: f"two have room: {bodies(gateway)}")
        assert 200_000 < bodies(gateway)["bytes"] < 204_000
        assert bodies(gateway)["being_read"] == 0
        assert gateway.http.post("/v1/completions", json=body).status_code == 503
        assert gateway.http.post("/tokenize", json=body).json()["error"]["code"] == "body_room"
        engine.release()
        assert [one.result().status_code for one in running] == [200, 200]
        eventually(lambda: bodies(gateway)["bytes"] == 0, lambda: f"not given back: {bodies(gateway)}")


@pytest.mark.parametrize("size", [1000, 200_000, 1_500_000])
def test_a_client_that_leaves_after_a_body_of_any_size_holds_nothing_more(
    tmp_path: Path, engine: ScriptedEngine, size: int
) -> None:
    """Of a large one the last piece has the server stop reading: it must begin again to hear of an end."""
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold()]
    content = json.dumps({"model": MODEL, "prompt": "x" * size}).encode()
    with bounded(tmp_path, engine) as gateway, connect(gateway) as sender:
        sender.sendall(HEAD % len(content) + content)
        eventually(lambda: len(engine.requests) == 1, "asked")
        assert bodies(gateway)["bytes"] >= size
        sender.shutdown(socket.SHUT_RDWR)
        eventually(lambda: bodies(gateway)["bytes"] == 0, lambda: f"not given back: {bodies(gateway)}")
        eventually(lambda: len(engine.left_early) == 1, "the engine goes on")


def test_what_is_refused_after_it_was_read_gives_its_room_back(tmp_path: Path, engine: ScriptedEngine) -> None:
    with bounded(tmp_path, engine) as gateway:
        for body in ({"model": "absent", "prompt": "x"}, {"model": MODEL}, {"model": MODEL, "prompt": []}):
            assert gateway.http.post("/v1/completions", json=body).status_code in (400, 404)
            assert gateway.http.post("/detokenize", json=body).status_code in (400, 404)
        assert bodies(gateway)["bytes"] == bodies(gateway)["being_read"] == 0
        assert bodies(gateway)["most_bytes"] > 0


def test_bodies_that_are_still_coming_count_as_open_requests(tmp_path: Path, engine: ScriptedEngine) -> None:
    with bounded(tmp_path, engine, open_limit=2) as gateway, connect(gateway) as one, connect(gateway) as other:
        for sender in (one, other):
            sender.sendall(HEAD % 100 + b"{")
        eventually(lambda: bodies(gateway)["being_read"] == 2, lambda: str(bodies(gateway)))
        refused = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")


def test_a_key_at_its_limit_is_refused_before_it_sends_a_body(
    tmp_path: Path, engine: ScriptedEngine, cpu_bound: CpuBound
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: one, key: sk-0123456789abcdef, requestsPerMinute: 1}]")
    mine = {"authorization": "Bearer sk-0123456789abcdef"}
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", keys_path=keys)) as gateway:
        gateway.http.headers.update(mine)
        gateway.serve(group(engine.url))
        body = {"model": MODEL, "prompt": "x"}
        assert gateway.http.post("/v1/completions", json=body).status_code == 200
        held, before = bodies(gateway), gateway.loop_seconds()
        with ExitStack() as stack:
            for _ in range(50):
                raw = stack.enter_context(connect(gateway))
                head = HEAD.replace(b"host: x", b"host: x\r\nauthorization: Bearer sk-0123456789abcdef")
                raw.sendall(head % 4_000_000 + b"{")
                told = raw.recv(65536)
                assert re.match(rb"HTTP/1.1 429 ", told), told
                assert b"retry-after: " in told
                assert b"x-ratelimit-remaining-requests: 0" in told
            spent = gateway.loop_seconds() - before
            assert bodies(gateway) == held, "none of them is read"
        assert cpu_bound.holds(spent, 0.5), f"{spent:.3f} s of the loop for 50 refusals"


def test_connections_are_bounded_in_number(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_SECONDS", 600)
    settings = GatewaySettings(tmp_path / "endpoints.json")
    with running_gateway(settings, connection_limit=5) as gateway, ExitStack() as stack:
        gateway.serve(group(engine.url))
        gateway.http.close()
        connections = gateway.servers.public.server_state.connections
        eventually(lambda: not connections, lambda: f"{len(connections)} are open")
        idle = [stack.enter_context(connect(gateway)) for _ in range(5)]
        eventually(lambda: len(connections) == 5, lambda: f"{len(connections)} are open")
        with connect(gateway) as one_more:
            told = b"".join(iter(lambda: one_more.recv(65536), b""))
        head, _, body = told.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n"), told
        assert b"retry-after: 2" in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        idle[0].close()
        eventually(lambda: len(connections) == 4, lambda: f"{len(connections)} are open")
        assert httpx.get(f"{gateway.url}/healthz", trust_env=False, timeout=60).status_code == 200


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["grow", "come", "end"]), st.integers(0, 60)), max_size=60
)


def begun(memory: BodyMemory) -> HeldBody:
    memory.begin_reading()
    return HeldBody(memory).__enter__()


@given(STEPS)
def test_bytes_held_are_those_of_the_holds_and_never_above_the_limit(steps: list[tuple[int, str, int]]) -> None:
    memory = BodyMemory(limit_bytes=100)
    holds = [begun(memory) for _ in range(4)]
    for index, step, size_bytes in steps:
        hold = holds[index]
        match step:
            case "grow":
                with suppress(ApiError):
                    hold.grow(size_bytes)
            case "come":
                hold.has_come()
            case _:
                hold.give_back()
        assert memory.held_bytes == sum(one.size_bytes for one in holds) <= memory.most_held_bytes <= 100
    for hold in holds:
        hold.__exit__(None, None, None)
    assert (memory.held_bytes, memory.num_reading) == (0, 0)


def test_no_room_is_said_with_a_time_to_come_back() -> None:
    with begun(BodyMemory(limit_bytes=10, retry_after_seconds=3)) as hold, pytest.raises(ApiError) as refused:
        hold.grow(11)
    assert (refused.value.status, refused.value.headers()["retry-after"]) == (503, "3")


def test_a_refusal_holds_nothing_of_what_was_refused() -> None:
    """An error in its context would hold the frames that it was raised through, and so what a body was parsed to."""
    with begun(BodyMemory(limit_bytes=10)) as hold, pytest.raises(ApiError) as refused:
        hold.grow(11)
    assert refused.value.__context__ is None
