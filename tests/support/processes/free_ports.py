"""Ports for servers that are told their port and bind it later, in another process.

The kernel hands out ports of its own range to whoever asks for any port or connects, so one of those that was free a
moment ago may be taken before the server binds it. Ports below that range are taken only by who names them. Who draws
one here claims it by a name in the kernel's own table of names (Linux's abstract sockets), which belongs to the same
network as the ports: so no two processes are given the same port, however late it is bound.
"""

import random
import socket
from typing import Final

_CHOICES: Final = range(20_000, 29_000)
"""Below the kernel's range (from 32768 on), and without the fixed ports of pods."""
_TRIES: Final = 200
_CLAIMS: Final[list[socket.socket]] = []
"""Of the ports that this process was given; they end with it."""


def free_port(in_a_row: int = 1) -> int:
    """A loopback port that nobody listens on at this moment, and that nobody else gets while this process lives.

    So are those that come after it, `in_a_row` altogether.

    Raises:
        OSError: none of the ports tried is free.
    """
    # Not from the seed of a test: two processes must not draw the same ports.
    draw = random.SystemRandom()
    for _ in range(_TRIES):
        port = draw.choice(_CHOICES)
        if all(_claimed(each) for each in range(port, port + in_a_row)):
            return port
    raise OSError(f"no free port among {_TRIES} drawn from {_CHOICES}")


def _claimed(port: int) -> bool:
    """Whether it is this process's from now on: nobody listens there, and no other process has been given it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0stageline test port {port}")
        with socket.create_server(("127.0.0.1", port)):
            _CLAIMS.append(claim)
            return True
    except OSError:
        claim.close()
        return False
