"""The API server of Kubernetes as every part of Stageline uses it: where the login is, calls, errors.

`client` is for processes that run an event loop (the operator, the gateway); `reader` is for commands, which block.
Both send plain manifests and raise one `ApiError`. The `kubernetes` library logs in and opens connections; its models
of objects are not used. Only `places`, `errors` and `resources` can be imported where that library is not installed.

That library asks for the home directory when it is imported, and fails where there is none: a container's user need not
be in any passwd file, nor need anybody set HOME. Then it is `/`, as container runtimes have it.
"""

import os
from pathlib import Path


def _have_a_home() -> None:
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"


_have_a_home()
