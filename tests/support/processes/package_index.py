"""A package index on loopback, and wheels to put into it, so that the real pip is what runs."""

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from processes.loopback_server import loopback_server


def build_wheel(
    directory: Path, files: dict[str, Path], *, name: str = "tiny_model", version: str = "1.0", lie: bool = False
) -> Path:
    """Write a wheel that holds `files` by their path in the wheel. With `lie` its RECORD gives wrong hashes."""
    info = f"{name}-{version}.dist-info"
    contents = {path: source.read_bytes() for path, source in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    contents[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{path},sha256={_digest(content, lie)},{len(content)}" for path, content in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    return wheel


@contextmanager
def package_index(
    wheel: Path, *, promised_sha256: str | None = None, page_status: int = 200
) -> Iterator[dict[str, str]]:
    """Serve `wheel`, its page with `page_status`; gives the environment that makes pip use this index alone."""
    sha256 = promised_sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
    project = wheel.name.split("-")[0].replace("_", "-")
    page = f'<!DOCTYPE html><html><body><a href="/files/{wheel.name}#sha256={sha256}">{wheel.name}</a></body></html>'
    served = {f"/simple/{project}/": ("text/html", page.encode())}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == f"/files/{wheel.name}":
                self._answer(200, "application/octet-stream", wheel.read_bytes())
            elif self.path in served:
                self._answer(page_status, *served[self.path])
            else:
                self._answer(404, "text/plain", b"no such project")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    with loopback_server(Handler) as url:
        yield {
            "PIP_INDEX_URL": f"{url}/simple",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_CACHE_DIR": "1",
        }


def _digest(content: bytes, lie: bool) -> str:
    digest = hashlib.sha256(content + (b"!" if lie else b"")).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
