"""Frames are messages whatever pieces they arrive in; what isn't a message is refused, never guessed."""

import struct
from contextlib import suppress
from enum import Enum
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.plan_bus.bus import MAX_FRAME_BYTES, FrameReader, encode_frame
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    Computing,
    LinkAddress,
    PeerComputes,
    Port,
    Refused,
    Shutdown,
    ToEngine,
    ToStage,
)
from stageline_runtime.plan_bus.step_plan import Count

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Count: st.integers(0, 2**62),
    Port: st.integers(1, 65535),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    NoneType: st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a message's field, whatever messages there are."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, UnionType):
        return st.one_of(*map(values_of, get_args(kind)))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[1:] == (...,):
            return st.lists(values_of(parts[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, parts))
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    assert issubclass(kind, msgspec.Struct | LinkAddress), kind
    return st.builds(
        kind, **{name: values_of(field) for name, field in get_type_hints(kind, include_extras=True).items()}
    )


small = st.integers(0, 2**31)
to_stage: st.SearchStrategy[ToStage] = values_of(ToStage)
to_engine: st.SearchStrategy[ToEngine] = values_of(ToEngine)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(borders)]


@given(st.lists(to_stage, max_size=5), st.lists(small, max_size=30))
def test_messages_to_a_stage(messages: list[ToStage], cuts: list[int]) -> None:
    reader: FrameReader[ToStage] = FrameReader(ToStage)
    read = [each for piece in pieces(b"".join(map(encode_frame, messages)), cuts) for each in reader.feed(piece)]
    assert read == messages


@given(st.lists(to_engine, max_size=5), st.lists(small, max_size=30))
def test_messages_to_the_engine(messages: list[ToEngine], cuts: list[int]) -> None:
    reader: FrameReader[ToEngine] = FrameReader(ToEngine)
    read = [each for piece in pieces(b"".join(map(encode_frame, messages)), cuts) for each in reader.feed(piece)]
    assert read == messages


@pytest.mark.parametrize(
    ("message", "kind"),
    [(Computing(-1), ToEngine), (PeerComputes(-1), ToStage)],
    ids=["computing", "peer computes"],
)
def test_no_message_names_a_plan_before_the_first(message: ToEngine | ToStage, kind: Any) -> None:
    reader: FrameReader[Any] = FrameReader(kind)
    with pytest.raises(BusProtocolError, match=r"Expected `int` >= 0"):
        list(reader.feed(encode_frame(message)))


@given(st.binary(max_size=200))
def test_garbage_in_a_frame_is_a_protocol_error_or_a_message(payload: bytes) -> None:
    reader: FrameReader[ToEngine] = FrameReader(ToEngine)
    with suppress(BusProtocolError):
        assert len(reader.feed(struct.pack("<I", len(payload)) + payload)) == 1


@given(to_engine, st.data())
def test_a_changed_byte_is_never_another_kind_of_error(message: ToEngine, data: st.DataObject) -> None:
    frame = bytearray(encode_frame(message))
    frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    reader: FrameReader[ToEngine] = FrameReader(ToEngine)
    with suppress(BusProtocolError):
        reader.feed(bytes(frame))


def test_text_that_is_not_utf8_is_a_protocol_error() -> None:
    frame = encode_frame(Refused("abcde")).replace(b"abcde", b"\xff\xfe\xfd\xfc\xfb")
    with pytest.raises(BusProtocolError, match="does not decode"):
        FrameReader[ToStage](ToStage).feed(frame)


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone() -> None:
    reader: FrameReader[ToEngine] = FrameReader(ToEngine)
    assert reader.feed(struct.pack("<I", MAX_FRAME_BYTES)) == []
    with pytest.raises(BusProtocolError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes"):
        FrameReader[ToEngine](ToEngine).feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(BusProtocolError):
        FrameReader[ToEngine](ToEngine).feed(encode_frame(Shutdown("no")))
