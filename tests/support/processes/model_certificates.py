"""Certificates as a Secret of `spec.network.tls` holds them, from an authority of the test's own."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import trustme

from stageline_api.runtime_config import TlsConfig

NAME = "test-stages.default.svc"


def write_certificates(
    directory: Path,
    authority: trustme.CA,
    *names: str,
    expires: datetime | None = None,
    trusted: trustme.CA | None = None,
) -> TlsConfig:
    """Put a Secret's files into `directory`: a certificate of `authority` for `names` (default: the model's), and
    whom its owner trusts (default: the same authority)."""
    directory.mkdir(parents=True, exist_ok=True)
    issued = authority.issue_cert(*(names or (NAME,)), not_after=expires)
    (directory / "tls.crt").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(directory / "tls.key")
    (trusted or authority).cert_pem.write_to_path(directory / "ca.crt")
    return TlsConfig(directory=str(directory), name=NAME)


def expired(directory: Path, authority: trustme.CA) -> TlsConfig:
    """The model's own, but of another year."""
    return write_certificates(directory, authority, expires=datetime(2020, 1, 1, tzinfo=UTC))


def replace_certificates(directory: Path, by: Path) -> None:
    """As a kubelet does when the Secret has changed."""
    for each in by.iterdir():
        shutil.copyfile(each, directory / each.name)
