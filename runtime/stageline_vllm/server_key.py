"""The API key of vLLM's own server; the engine and the supervisor beside it each derive it.

The key is a code computed with the group's token, so it needs no transfer between pods and reveals nothing of the
token. It is passed in the environment of the node with the server and in the header `Authorization`; never on a
command line, which every process of a machine can read, and never in a log. Each incarnation has a different key.
"""

import hashlib
import hmac
from typing import Final

KEY_VARIABLE: Final = "VLLM_API_KEY"
"""vLLM's own name for it, which vLLM keeps out of its logs and caches. Alone it would guard some paths only: see
`plugin.asks_for_key`."""


def server_key(token: str, group: int, incarnation: int) -> str:
    said = f"stageline vllm server\0{group}\0{incarnation}"
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def authorization(key: str) -> str:
    """Value of the Authorization header for a client with the key."""
    return f"Bearer {key}"
