"""Kubernetes' API server for all parts of Stageline: login, calls, errors.

`client` is for processes with an event loop (the operator, the gateway); `reader` is for commands, which block. Both
use plain manifests and raise `ApiError`. The `kubernetes` library logs in and opens connections; its object models are
not used. Only `places`, `errors` and `resources` can be imported without that library.

The library needs a home directory when it is imported and fails without one: a container's user need not have a passwd
entry or HOME. HOME is then set to `/`, as container runtimes do.
"""

import os
from pathlib import Path


def _have_a_home() -> None:
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"


_have_a_home()
