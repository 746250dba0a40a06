"""Image names that a process node accepts, and the environment that such an image would set."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stageline_api import env

_PASSED_ON: Final = ("HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY")
_PASSED_ON_LOWER: Final = ("HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_PASSED_ON_PREFIXES: Final = (
    "PIP_", "SSL_CERT_", "REQUESTS_CA_", "CURL_CA_", "CUDA_", "OMP_", "MKL_", "UV_", "OTEL_", "STAGELINE_GATEWAY_",
    "STAGELINE_VLLM_", "STAGELINE_LOG_", "VLLM_CPU_",
)  # fmt: skip


@dataclass(frozen=True)
class LocalImages:
    """Known image names and their containers' initial environment; any other name is an `ErrImagePull`."""

    names: frozenset[str]
    env: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, image: str) -> str | None:
        """Why a container of `image` can't be started, or None if it can."""
        if image in self.names:
            return None
        known = ", ".join(sorted(self.names)) or "none"
        return (
            f"image {image!r} is not known to this node, which runs local processes and pulls nothing; known: {known}"
        )


def machine_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment that a Stageline image would provide, from this machine.

    The interpreter's own script directory is first in `PATH`, so that `stageline` is the installed one. Only settings
    of the machine are passed on (locale, proxies, package index, certificates, thread counts), of the gateway, of
    logging and of tracing. The rest of the caller's environment is excluded, above all tokens.
    """
    environ = os.environ if environ is None else environ
    passed = {
        name: value
        for name, value in environ.items()
        if name.upper() in (*_PASSED_ON, *_PASSED_ON_LOWER) or name.upper().startswith(_PASSED_ON_PREFIXES)
    }
    scripts = Path(sys.executable).parent
    path = environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    passed.setdefault(env.LOG_FORMAT, "text")  # for people: no collector reads local logs
    return passed | {"PATH": f"{scripts}{os.pathsep}{path}", "PYTHONUNBUFFERED": "1"}
