"""A board as Grafana's own classes know it: what they don't know is lost on the way through them.

For the tests. It is here because only this package may import the SDK: it bears the advice that the SDK gives then.
"""

import json
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def through_the_schema(board: dict[str, Any]) -> Any:
    """The JSON of `board` as the classes write what they read; equal to it where they know all of it."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
