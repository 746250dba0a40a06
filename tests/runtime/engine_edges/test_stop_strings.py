"""Stop strings end the text where a plain search says, whatever the pieces, and nothing of one ever leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.engine.text.detokenizer import StopStrings

few_letters = st.text(alphabet="ab😀\n", max_size=5)


def plain_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and it; of several ending there, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, negative_length, stop = min(ends)
    return text[: end + negative_length], stop


@given(pieces=st.lists(few_letters, max_size=10), stops=st.lists(few_letters.filter(bool), max_size=4))
def test_any_pieces_give_what_a_search_of_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    scanner = StopStrings(stops)
    released, matched = "", False
    expected, expected_stop = plain_search("".join(pieces), stops)
    for piece in pieces:
        match = scanner.push(piece)
        released, matched = released + match.text, match.matched
        assert expected.startswith(released), f"{released!r} shows more than {expected!r}"
    if not matched:
        released += scanner.flush()
    assert (released, scanner.found) == (expected, expected_stop)
    assert matched == (expected_stop is not None)


@given(pieces=st.lists(few_letters, max_size=10), stops=st.lists(few_letters.filter(bool), min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    scanner, text, released = StopStrings(stops), "", ""
    for piece in pieces:
        match = scanner.push(piece)
        if match.matched:
            return
        text, released = text + piece, released + match.text
        held = text[len(released) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops), f"{held!r} of {text!r}"


@pytest.mark.parametrize(
    ("stops", "pieces", "released"),
    [
        pytest.param(["END"], ["one E", "N", "D two"], ["one ", "", ""], id="across-three-pieces"),
        pytest.param(["END"], ["one E", "Nx"], ["one ", "ENx"], id="false-alarm-is-released"),
        pytest.param(["aab"], ["aaa", "b"], ["a", ""], id="restart-inside-itself"),
        pytest.param(["bc", "abcd"], ["ab", "cd"], ["", "a"], id="complete-first-wins"),
        pytest.param(["bc", "abc"], ["abc"], [""], id="longest-of-those-that-end-together"),
    ],
)
def test_pieces_are_released_as_early_as_possible(stops: list[str], pieces: list[str], released: list[str]) -> None:
    scanner = StopStrings(stops)
    assert [scanner.push(piece).text for piece in pieces] == released


def test_nothing_follows_a_match() -> None:
    scanner = StopStrings(["x"])
    assert scanner.push("axb").text == "a"
    assert scanner.push("more").text == ""
    assert scanner.flush() == ""
