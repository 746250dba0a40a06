"""A small HTTP server on loopback, for fakes of what is elsewhere in life."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Of five, the default, a sixth that connects at the same moment waits a second and more to try again."""


@contextmanager
def loopback_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run an HTTP server on a free loopback port; gives its base URL."""
    with served(_Server(("127.0.0.1", 0), handler)) as url:
        yield url


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server that is bound to loopback in a thread, and close it; gives its base URL."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
