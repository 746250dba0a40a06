"""Events as the API server takes them: it counts bytes of UTF-8."""

from datetime import UTC, datetime
from typing import Any

import pytest

from stageline_operator.controller.loop.event_recorder import cut_to_bytes, event_manifest
from stageline_operator.planner.types import PlannedEvent

MODEL = {"metadata": {"namespace": "here", "name": "tiny", "uid": "u-1"}}


def event(message: str, instance: str = "pod_1", reason: str = "GroupFailed") -> dict[str, Any]:
    return event_manifest(MODEL, PlannedEvent("Warning", reason, message), instance, datetime.now(UTC))


@pytest.mark.parametrize("letter", ["a", "é", "无", "😀"])
def test_what_an_event_says_fits_in_any_script(letter: str) -> None:
    posted = event(letter * 3000, instance=letter * 200, reason=letter * 200)
    limits = {"note": 1024, "reportingInstance": 128, "reason": 128}
    assert {name: len(posted[name].encode()) <= limit for name, limit in limits.items()} == dict.fromkeys(limits, True)
    assert posted["note"].startswith(letter * (1000 // len(letter.encode())))


def test_what_fits_is_left_as_it_is_and_what_does_not_ends_in_a_whole_character() -> None:
    assert cut_to_bytes("x" * 1024, 1024) == "x" * 1024
    assert cut_to_bytes("无" * 341, 1024) == "无" * 341
    assert cut_to_bytes("无" * 342, 1024) == "无" * 340 + "…"


def test_a_message_that_is_no_unicode_is_posted_all_the_same() -> None:
    assert event("half a pair: \ud83d")["note"] == "half a pair: ?"


def test_two_long_messages_that_differ_only_at_their_end_are_two_events() -> None:
    one, other = (event("无" * 2000 + end)["metadata"]["name"] for end in "ab")
    assert one != other
