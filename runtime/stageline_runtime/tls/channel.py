"""One end of a TLS connection without its socket: bytes from the wire go in, bytes for the wire come out.

So the plan bus keeps its own sockets, limits and times, and a connection counts from when it is accepted, not from the
end of its handshake. What is sealed before the handshake is done waits for it. Threads may share a channel; the order
of what it puts out is the order in which it must be sent.
"""

import ssl
import threading
from typing import Final

from stageline_runtime.tls.certificates import PodIdentity, TlsError, words_of

_READ_BYTES: Final = 1 << 18


class TlsChannel:
    def __init__(self, identity: PodIdentity, *, is_server: bool) -> None:
        self._identity = identity
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = identity.server if is_server else identity.client
        self._end = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=is_server,
            server_hostname=None if is_server else identity.name,
        )
        self._waiting = bytearray()
        self._lock = threading.RLock()  # a signal may come within, and its handler may send
        self._is_agreed = False
        self.is_open = False
        """Whether both ends have authenticated."""
        if not is_server:
            self._shake_hands()  # `outgoing` then holds its first words

    def opened(self, data: bytes) -> bytes:
        """Plaintext of the complete records in `data`. `outgoing` may hold an answer.

        Raises:
            TlsError: the peer's identity is wrong, or it closed the handshake; `outgoing` may hold an alert for it.
        """
        with self._lock:
            self._incoming.write(data)
            if not self.is_open and not self._shake_hands():
                return b""
            return self._read()

    def seal(self, data: bytes) -> None:
        """Encrypt into `outgoing`; held back until the handshake is done."""
        with self._lock:
            self._waiting += data
            if self.is_open:
                self._write_waiting()

    def refuse(self, words: bytes) -> None:
        """After a TlsError of a certificate's name, which TLS itself knows no word for: tell the other end."""
        with self._lock:
            if self._is_agreed and not self.is_open:
                self._end.write(words)

    def outgoing(self) -> bytes:
        """What is to be sent now; handed out once."""
        return self._outgoing.read()

    def _shake_hands(self) -> bool:
        try:
            self._end.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsError(words_of(error)) from None
        self._is_agreed = True
        self._identity.check_name(self._end)
        self.is_open = True
        self._write_waiting()
        return True

    def _read(self) -> bytes:
        parts: list[bytes] = []
        try:
            while part := self._end.read(_READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            # What came before it is lost too: it ends the connection.
            raise TlsError(words_of(error)) from None
        return b"".join(parts)

    def _write_waiting(self) -> None:
        with memoryview(bytes(self._waiting)) as data:
            sent = 0
            while sent < len(data):
                sent += self._end.write(data[sent:])
        self._waiting.clear()
