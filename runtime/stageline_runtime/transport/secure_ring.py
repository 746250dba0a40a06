"""How stages meet with `spec.network.tls`: the ring's connections in TLS, both ends with the model's certificate.

Where the next stage is, the engine says in its welcome; nothing goes through torch's TCPStore, which has no TLS.
"""

import socket
import ssl

from stageline_runtime.contract import PodContract, read_identity
from stageline_runtime.tls.certificates import PodIdentity, TlsError, words_of
from stageline_runtime.transport.ring import LinkRefusedError, Meeting, join_ring


def join_secure_ring(contract: PodContract, next_address: str) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """What to send on, and what to receive from.

    Raises:
        RuntimeFailure: class RendezvousTimeout when a neighbour did not come in time, or TLS did not come about.
    """
    identity = read_identity(contract.config)
    assert identity is not None, "it joins by TLS without spec.network.tls"
    meeting = Meeting(
        listen=(contract.pod_ip, contract.master_port),
        find_next=lambda _own: (next_address, contract.master_port),
        wrap=_InTls(identity),
        words=" by TLS",
    )
    after, before = join_ring(contract, meeting)
    assert isinstance(after, ssl.SSLSocket)
    assert isinstance(before, ssl.SSLSocket)
    return after, before


class _InTls:
    """A `Wrap`."""

    def __init__(self, identity: PodIdentity) -> None:
        self._identity = identity

    def __call__(self, connection: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
        identity = self._identity
        context = identity.server if is_server else identity.client
        name = None if is_server else identity.name
        try:
            secure = context.wrap_socket(
                connection, server_side=is_server, server_hostname=name, do_handshake_on_connect=False
            )
        except OSError as error:
            raise LinkRefusedError(words_of(error)) from error
        try:
            secure.do_handshake()
            identity.check_name(secure)
        except (TlsError, OSError) as error:
            secure.close()
            raise LinkRefusedError(str(error) if isinstance(error, TlsError) else words_of(error)) from error
        except BaseException:
            secure.close()
            raise
        return secure
