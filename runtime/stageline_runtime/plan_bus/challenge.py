"""How a stage proves that it knows the bus's token without ever sending it.

The engine greets each connection with a number drawn for that connection alone. The stage answers with a code over that
number and its own identity, made with the token. An eavesdropper can't reuse the code: not on another connection, not
for another stage, not in another incarnation of the group.
"""

import hashlib
import hmac
import secrets
from typing import Final

from stageline_runtime.plan_bus.messages import Place

NONCE_BYTES: Final = 32
GREETING_SECONDS: Final = 30.0
"""How long a connection may take to authenticate."""
MOST_STRANGERS: Final = 64
"""Maximum number of unauthenticated connections."""
GREETING_BYTES: Final = 8 * 1024
"""The longest frame that is taken from one of them."""


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof_of(token: str, nonce: str, place: Place, incarnation: int) -> str:
    """What shows, for one connection, that its other end is a stage of this incarnation."""
    return _code(token, "plan bus", nonce, place.stage, place.rank, incarnation)


def is_proof(proof: str, token: str, nonce: str, place: Place, incarnation: int) -> bool:
    return hmac.compare_digest(proof.encode(), proof_of(token, nonce, place, incarnation).encode())


def link_proof(token: str, life: str, numbers: bytes, *, speaker: int, listener: int) -> str:
    """What shows, on one connection between two stages, that this end is `speaker` and takes the other for `listener`,
    both of the incarnation that `life` names. `numbers`: what both ends drew for this connection alone."""
    return _code(token, "link", life, speaker, listener, numbers.hex())


def store_name(token: str, group: str) -> str:
    """Name under which the stages of `group` find each other in the store. It can't be guessed without the token."""
    return _code(token, "store", group)


def _code(token: str, purpose: str, *said: object) -> str:
    words = "\0".join((f"stageline {purpose}", *map(str, said)))
    return hmac.new(token.encode(), words.encode(), hashlib.sha256).hexdigest()
