"""The model's certificate at the engine's HTTP port: read again when its files change.

Gateways connect at any time, so this end must follow a renewal, unlike the group's own connections. If a pair can't be
used (half written, of different keys), the previous pair stays in force. The log reports it once, and it is retried.
"""

import logging
import ssl
from pathlib import Path
from typing import Final

from stageline_api.runtime_config import TlsConfig
from stageline_runtime.tls.certificates import CERTIFICATE_FILE, KEY_FILE, load_pair, words_of

logger = logging.getLogger(__name__)

_Fingerprint = tuple[tuple[int, int, int], ...]


class ServedCertificate:
    def __init__(self, config: TlsConfig) -> None:
        """Raises TlsError: a file is missing or can't be used, naming it."""
        self._directory: Final = Path(config.directory)
        self._problem = ""
        self._seen = self._fingerprint()
        self.context = _new_context(self._directory)
        """For a server; clients present no certificate, but send the engine's key with each request."""

    def look(self) -> None:
        """Take up new files, if there are any."""
        try:
            found = self._fingerprint()
            if found == self._seen and not self._problem:
                return
            _new_context(self._directory)  # one that does not fit would leave a context with half of it
            load_pair(self.context, self._directory)
        except Exception as error:  # external input; the previous certificate stays in use
            if (reason := words_of(error)) != self._problem:
                logger.warning("the certificate can't be read again, the one before stays in force: %s", reason)
            self._problem = reason
            return
        self._seen, self._problem = found, ""
        logger.info("certificate read again")

    def _fingerprint(self) -> _Fingerprint:
        try:
            found = [(self._directory / name).stat() for name in (CERTIFICATE_FILE, KEY_FILE)]
        except OSError:
            return ()  # the code that reads the files reports it
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)


def _new_context(directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, directory)
    return context
