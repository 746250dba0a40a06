"""A board as Grafana's own classes parse it: they drop unknown fields.

For the tests. It is here because only this package may import the SDK: it handles the SDK's warnings.
"""

import json
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def through_the_schema(board: dict[str, Any]) -> Any:
    """The JSON of `board` after parsing and serializing; equal to it if the classes know every field."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
