"""How containers ended, in their own words: the termination messages that pods carry. Pure."""

from collections.abc import Iterator

from stageline_cli.on_call.sources.source import Manifest, Piece


def last_words(pod: Manifest) -> Iterator[Piece]:
    """Termination messages of a pod's containers, of this start and of the one before."""
    status = pod.get("status", {})
    for each in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        for field, suffix in (("state", ""), ("lastState", ".previous")):
            ended = (each.get(field) or {}).get("terminated")
            if ended is not None:
                yield Piece(f"last-words/{pod['metadata']['name']}.{each['name']}{suffix}.yaml", document=ended)
