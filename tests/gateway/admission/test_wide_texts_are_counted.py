"""One emoji makes four megabytes of ASCII sixteen: what a gateway's process holds is what it counts, and is bounded.

A quarter of a megabyte of empty messages becomes eight likewise. All of it at the size that a gateway is given in a
cluster, in a process of its own: what the system says of it is the gateway's.
"""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from processes.cpu_bounds import CpuBound
from processes.gateway_harness import MODEL, eventually
from processes.lone_gateway import lone_gateway
from processes.scripted_engine import Hold, Say, ScriptedEngine
from stageline_api.engine_http import Admitted
from stageline_gateway.settings import GatewaySettings

MEBIBYTE: Final = 1024 * 1024
SENDERS: Final = 40
TEXT: Final = 4_180_000
ROOM_BYTES: Final = GatewaySettings(None).body_room_bytes
HELD_ROOMS: Final = 2
"""What a process may grow by, in rooms of bodies."""
LOOP_SECONDS: Final = 0.05
"""Of CPU, that each sender may have the event loop for."""
EMOJI: Final = "\U0001f600"
EMPTY: Final = '{"role":"user","content":""}'
_CALL: Final = (
    '{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"id":"c","type":"function",'
    '"function":{"name":"f","arguments":"{\\"a\\":\\"%s\\"}"}}]},{"role":"tool","tool_call_id":"c","content":"x"}'
)


def wide(characters: int = TEXT) -> str:
    return "x" * characters + EMOJI


def body(rest: str) -> bytes:
    return f'{{"model":"{MODEL}",{rest}}}'.encode()


def parts(kind: str) -> str:
    each = ",".join(f'{{"type":"{kind}","text":"{wide(TEXT // 2 - 100)}"}}' for _ in range(2))
    return f'{{"role":"user","content":[{each}]}}'


BODIES: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
    "a text": ("/v1/completions", lambda: body(f'"prompt":"{wide()}"')),
    "a text in ASCII": ("/v1/completions", lambda: body(f'"prompt":"{"x" * TEXT}"')),
    "a text in escapes": ("/v1/completions", lambda: body(f'"prompt":"{"x" * TEXT}\\ud83d\\ude00"')),
    "a chat's parts": ("/v1/chat/completions", lambda: body(f'"top_k":3,"messages":[{parts("text")}]')),
    "a chat of many messages": ("/v1/chat/completions", lambda: body(f'"messages":[{",".join([EMPTY] * 8192)}]')),
    "arguments of a call": ("/v1/chat/completions", lambda: body(f'"messages":[{_CALL % wide()}]')),
    "a response": ("/v1/responses", lambda: body(f'"input":"{wide()}"')),
    "a response's parts": ("/v1/responses", lambda: body(f'"input":[{parts("input_text")}]')),
    "a message's parts": ("/v1/messages", lambda: body(f'"max_tokens":1,"messages":[{parts("text")}]')),
}
USUAL: Final = ("a text", "a chat of many messages")


def refused(address: tuple[str, int], path: str, content: bytes, held: list[socket.socket]) -> bool:
    """Send a request; whether it gets an answer. One that the engine holds gets none before its sender is ended."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(address, timeout=120) as sender:
        held.append(sender)
        try:
            sender.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            told = sender.recv(12)
        except OSError:  # it was refused while it still sent
            return True
        assert told in (b"", b"HTTP/1.1 503"), told
        return bool(told)


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in BODIES]
)
def test_what_many_large_requests_hold_is_within_twice_the_room(
    tmp_path: Path, engine: ScriptedEngine, name: str, cpu_bound: CpuBound
) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold()]
    path, content = BODIES[name][0], BODIES[name][1]()
    with lone_gateway(tmp_path, engine) as gateway, ThreadPoolExecutor(SENDERS) as pool:
        senders, before = list[socket.socket](), gateway.loop_seconds()
        asked = [pool.submit(refused, gateway.address, path, content, senders) for _ in range(SENDERS)]
        eventually(
            lambda: sum(one.done() for one in asked) + len(engine.requests) == SENDERS,
            lambda: f"{len(engine.requests)} held: {gateway.bodies()}",
        )
        held, grown_bytes, num_held = gateway.bodies(), gateway.grown_bytes, len(engine.requests)
        spent = gateway.loop_seconds() - before
        for sender in senders:
            with suppress(OSError):  # of those that were refused
                sender.shutdown(socket.SHUT_RDWR)
        told = f"{name}: {grown_bytes // MEBIBYTE} MiB more, {num_held} held, {held}"
        assert sum(one.result() for one in asked) == SENDERS - num_held, told
        assert 0 < num_held < SENDERS, told
        assert held["bytes"] <= held["most_bytes"] <= ROOM_BYTES, told
        assert held["bytes"] >= num_held * TEXT, told
        assert grown_bytes <= HELD_ROOMS * ROOM_BYTES, told
        assert cpu_bound.holds(spent, SENDERS * LOOP_SECONDS), f"{name}: {spent:.3f} s of the loop"
        eventually(lambda: gateway.bodies()["bytes"] == 0, lambda: f"not given back: {gateway.bodies()}")
