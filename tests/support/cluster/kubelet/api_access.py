"""Where an API server is and how to be let in, read from a kubeconfig.

Only what a file can say by itself: server, certificate authority, a token or a client certificate. Exec plugins and
auth providers are refused by name rather than ignored.
"""

import base64
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stageline_api.errors import UserError


@dataclass(frozen=True)
class ApiAccess:
    """`headers` carry the token, if any; it is never shown."""

    url: str
    tls: ssl.SSLContext
    headers: dict[str, str]
    authority_base64: str
    """The certificate authority, for handing on."""

    def __repr__(self) -> str:
        return f"ApiAccess({self.url!r})"


def read_kubeconfig(path: Path) -> ApiAccess:
    """The current context's access. Raises `UserError` naming the file and what it lacks."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        context = _named(config, "contexts", config["current-context"])["context"]
        cluster = _named(config, "clusters", context["cluster"])["cluster"]
        user = _named(config, "users", context["user"])["user"]
        authority = base64.b64encode(_content(cluster, "certificate-authority") or b"").decode()
        return ApiAccess(cluster["server"].rstrip("/"), _tls(cluster, user, path), _headers(user, path), authority)
    except OSError as error:
        raise UserError(f"kubeconfig {str(path)!r} can't be read: {error.strerror}") from None
    except (KeyError, TypeError, StopIteration) as error:
        raise UserError(f"kubeconfig {str(path)!r} is incomplete: no {error}") from None


def _named(config: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    found = [each for each in config[kind] if each["name"] == name]
    if not found:
        raise KeyError(f"{kind} entry {name!r}")
    return dict(found[0])


def _headers(user: dict[str, Any], path: Path) -> dict[str, str]:
    for unsupported in ("exec", "auth-provider", "username"):
        if unsupported in user:
            raise UserError(f"kubeconfig {str(path)!r}: users[].user.{unsupported} is not supported here; use a token")
    token = user.get("token")
    if token is None and "tokenFile" in user:
        token = Path(user["tokenFile"]).read_text(encoding="utf-8").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tls(cluster: dict[str, Any], user: dict[str, Any], path: Path) -> ssl.SSLContext:
    if cluster.get("insecure-skip-tls-verify"):
        raise UserError(f"kubeconfig {str(path)!r}: insecure-skip-tls-verify is not supported; name the authority")
    authority = _content(cluster, "certificate-authority")
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    certificate, key = _content(user, "client-certificate"), _content(user, "client-key")
    if certificate and key:
        with tempfile.NamedTemporaryFile(suffix=".pem") as both:
            both.write(certificate + b"\n" + key)
            both.flush()
            tls.load_cert_chain(both.name)
    return tls


def _content(section: dict[str, Any], field: str) -> bytes | None:
    """A field that is given inline as base64 (`field-data`) or as a file's path (`field`)."""
    if f"{field}-data" in section:
        return base64.b64decode(section[f"{field}-data"])
    if field in section:
        return Path(section[field]).read_bytes()
    return None
