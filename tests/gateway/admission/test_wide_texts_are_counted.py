"""One emoji makes four megabytes of ASCII sixteen: what a gateway's process holds is what it counts, and is bounded.

At the size that a gateway is given in a cluster, in a process of its own: what the system says of it is the gateway's.
"""

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import pytest

from processes.free_ports import free_port
from processes.gateway_command import gateway_process
from processes.gateway_harness import MODEL, eventually
from processes.scripted_engine import Hold, Say, ScriptedEngine
from stageline_api.engine_http import Admitted
from stageline_gateway.settings import GatewaySettings

MEBIBYTE: Final = 1024 * 1024
SENDERS: Final = 40
TEXT: Final = 4_180_000
ROOM_BYTES: Final = GatewaySettings(None).body_room_bytes
HELD_ROOMS: Final = 2
"""What a process may grow by, in rooms of bodies."""
EMOJI: Final = "\U0001f600"
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
    "arguments of a call": ("/v1/chat/completions", lambda: body(f'"messages":[{_CALL % wide()}]')),
    "a response": ("/v1/responses", lambda: body(f'"input":"{wide()}"')),
    "a response's parts": ("/v1/responses", lambda: body(f'"input":[{parts("input_text")}]')),
    "a message's parts": ("/v1/messages", lambda: body(f'"max_tokens":1,"messages":[{parts("text")}]')),
}


@dataclass(frozen=True)
class Served:
    """A gateway's process."""

    pid: int
    host: str
    port: int
    admin: httpx.Client

    @property
    def resident_bytes(self) -> int:
        """The most that it ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found, status
        return int(found.group(1)) * 1024

    def bodies(self) -> dict[str, int]:
        counted: dict[str, int] = self.admin.get("/status").json()["bodies"]
        return counted


@contextmanager
def served(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Served]:
    admin_port = free_port()
    with (
        gateway_process(tmp_path, engine, "--admin-port", str(admin_port)) as (process, url),
        httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", trust_env=False, timeout=60) as admin,
    ):
        eventually(lambda: admin.get("/readyz").status_code == 200, "it serves nothing")
        yield Served(process.pid, httpx.URL(url).host, httpx.URL(url).port or 0, admin)


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


@pytest.mark.parametrize("name", BODIES)
def test_what_many_large_requests_hold_is_within_twice_the_room(
    tmp_path: Path, engine: ScriptedEngine, name: str
) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Hold()]
    path, content = BODIES[name][0], BODIES[name][1]()
    with served(tmp_path, engine) as gateway, ThreadPoolExecutor(SENDERS) as pool:
        idle_bytes, senders = gateway.resident_bytes, list[socket.socket]()
        address = gateway.host, gateway.port
        asked = [pool.submit(refused, address, path, content, senders) for _ in range(SENDERS)]
        eventually(
            lambda: sum(one.done() for one in asked) + len(engine.requests) == SENDERS,
            lambda: f"{len(engine.requests)} held: {gateway.bodies()}",
        )
        held, grown_bytes, num_held = gateway.bodies(), gateway.resident_bytes - idle_bytes, len(engine.requests)
        for sender in senders:
            with suppress(OSError):  # of those that were refused
                sender.shutdown(socket.SHUT_RDWR)
        told = f"{name}: {grown_bytes // MEBIBYTE} MiB more, {num_held} held, {held}"
        assert sum(one.result() for one in asked) == SENDERS - num_held, told
        assert 0 < num_held < SENDERS, told
        assert held["bytes"] <= held["most_bytes"] <= ROOM_BYTES, told
        assert held["bytes"] >= num_held * TEXT, told
        assert grown_bytes <= HELD_ROOMS * ROOM_BYTES, told
        eventually(lambda: gateway.bodies()["bytes"] == 0, lambda: f"not given back: {gateway.bodies()}")
