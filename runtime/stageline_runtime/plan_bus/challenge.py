"""How a stage proves that it knows the bus's token without ever sending it.

The engine greets each connection with a number drawn for that connection alone; the stage answers with a code over that
number and over who it says it is, made with the token. What somebody on the network hears is of no use to them: not on
another connection, not for another stage, not in another incarnation of the group.
"""

import hashlib
import hmac
import secrets
from typing import Final

from stageline_runtime.plan_bus.place import Place

NONCE_BYTES: Final = 32
GREETING_SECONDS: Final = 30.0
"""How long a connection may take to say who it is."""
MOST_STRANGERS: Final = 64
"""Connections that may not have said so yet."""
GREETING_BYTES: Final = 8 * 1024
"""The longest frame that is taken from one of them."""


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof_of(token: str, nonce: str, place: Place, incarnation: int) -> str:
    """What shows, for one connection, that its other end is a stage of this incarnation."""
    said = f"stageline plan bus\0{nonce}\0{place.stage}\0{place.rank}\0{incarnation}"
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def is_proof(proof: str, token: str, nonce: str, place: Place, incarnation: int) -> bool:
    wanted = proof_of(token, nonce, place, incarnation)
    return hmac.compare_digest(proof.encode(), wanted.encode())


def link_proof(token: str, life: str, numbers: bytes, *, speaker: int, listener: int) -> str:
    """What shows, on one connection between two stages, that this end is `speaker` and takes the other for `listener`,
    both of the incarnation that `life` names. `numbers`: what both ends drew for this connection alone."""
    said = f"stageline link\0{life}\0{speaker}\0{listener}\0{numbers.hex()}"
    return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()


def store_name(token: str, group: str) -> str:
    """Under what the stages of `group` find each other in their store: nobody without the token can guess it."""
    return hmac.new(token.encode(), b"stageline store\0" + group.encode(), hashlib.sha256).hexdigest()
