"""The certificate that a model's pods present to each other, and the checks on the peer's certificate.

All pods of a model have one certificate, for one name. Each end of a connection presents it and checks the peer's:
signed by an authority in `ca.crt`, within its dates, and for exactly that name. So a certificate of another model from
the same authority is rejected. TLS 1.3 only, which hides certificates from eavesdroppers.
"""

import ssl
from pathlib import Path
from typing import Final

from stageline_api.runtime_config import TlsConfig

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
AUTHORITY_FILE: Final = "ca.crt"
"""As cert-manager, and Kubernetes for Secrets of type `kubernetes.io/tls`, name them."""


class TlsError(Exception):
    """The peer's identity is wrong, or the certificate files can't be used; the text contains no secret."""


class PodIdentity:
    """The contexts of both ends, as the files were when it was made. Threads may share it."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises TlsError: a file is missing or can't be used, naming it."""
        self.name = config.name
        directory = Path(config.directory)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, directory)
        self.server.verify_mode = ssl.CERT_REQUIRED
        self.server.num_tickets = 0  # no session resumption
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, directory)

    def check_name(self, end: ssl.SSLObject | ssl.SSLSocket) -> None:
        """Raises TlsError: the certificate at the other end is not for the model's name. Wildcards don't count."""
        shown = end.getpeercert() or {}
        names = [str(each[1]) for each in shown.get("subjectAltName", ()) if each[0] == "DNS"]
        if self.name not in names:
            raise TlsError(f"its certificate is for {', '.join(names) or 'no DNS name'}, not for {self.name}")


def _context(protocol: int, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    load_pair(context, directory)
    _check_readable(directory / AUTHORITY_FILE)
    try:
        context.load_verify_locations(directory / AUTHORITY_FILE)
    except (OSError, ValueError) as error:
        raise TlsError(f"{directory / AUTHORITY_FILE} holds no certificate: {words_of(error)}") from None
    return context


def load_pair(context: ssl.SSLContext, directory: Path) -> None:
    """Have `context` show the certificate in `directory`; raises TlsError."""
    _check_readable(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    try:
        context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE, password=_no_password)
    except (OSError, ValueError) as error:
        detail = f"{CERTIFICATE_FILE} and {KEY_FILE} in {directory} can't be used: {words_of(error)}"
        raise TlsError(detail) from None


def _check_readable(*files: Path) -> None:
    """OpenSSL would not say which of them it is."""
    for each in files:
        try:
            each.read_bytes()
        except OSError as error:
            raise TlsError(f"{each} can't be read: {error.strerror}") from None


def _no_password() -> str:
    """OpenSSL would ask on the terminal for the passphrase of an encrypted key."""
    raise ValueError("the key is encrypted")


_REASONS: Final = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it does not speak TLS",
    "UNEXPECTED_MESSAGE": "it does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "KEY_VALUES_MISMATCH": "they don't belong together",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
}


def words_of(error: Exception) -> str:
    """What went wrong in TLS, for a log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "it broke off"
        if "_ALERT_" in reason:
            alert = reason.partition("_ALERT_")[2].replace("_", " ").lower()
            return f"it does not accept this end's certificate or words: {alert}"
        return _REASONS.get(reason, reason.replace("_", " ").lower())
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
