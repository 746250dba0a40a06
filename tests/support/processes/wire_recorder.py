"""Stands between two processes and keeps what crosses: what somebody on the network would hear."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

CONNECT_SECONDS = 60.0


@dataclass(slots=True)
class Recording:
    heard: bytearray = field(default_factory=bytearray)
    """All bytes of all connections, in both directions."""


@contextmanager
def recorded_wire(listen: tuple[str, int], forward: tuple[str, int]) -> Iterator[Recording]:
    """Pass on what comes to `listen` for the length of the block."""
    recording = Recording()
    listener = socket.create_server(listen)
    open_sockets: list[socket.socket] = [listener]

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                open_sockets.append(near)
                threading.Thread(target=join, args=(near,), daemon=True).start()

    def join(near: socket.socket) -> None:
        far = _connected(forward)
        open_sockets.append(far)
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(*pair, recording.heard), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield recording
    finally:
        for each in open_sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _connected(address: tuple[str, int]) -> socket.socket:
    """Tries until somebody listens, as who connected here would."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection(address)
            connection.settimeout(None)
            return connection
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _pump(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            heard += data
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
