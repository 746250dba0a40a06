"""Keys of engines: which texts are keys, what is shown, and who is let in."""

import pytest

from stageline_api.engine_access import authorization, is_admitted, is_loopback, read_keys

OLD, NEW = "old-key-0123456789", "new-key-0123456789"


def test_a_key_a_line_in_order_and_blank_lines_count_for_nothing() -> None:
    assert read_keys(f"\n {NEW} \r\n\n{OLD}\n") == (NEW, OLD)
    assert read_keys(" \n") == ()


@pytest.mark.parametrize("bad", ["short", "has a space in the middle", "ключ-0123456789012", "key\x000123456789012345"])
def test_a_key_that_no_header_may_carry_is_refused_and_not_shown(bad: str) -> None:
    with pytest.raises(ValueError, match="key 2 must be 16 or more printable ASCII") as caught:
        read_keys(f"{NEW}\n{bad}")
    assert bad not in str(caught.value)


def test_the_first_is_shown_and_each_is_taken() -> None:
    keys = (NEW, OLD)
    assert authorization(keys) == f"Bearer {NEW}"
    assert is_admitted(keys, {"authorization": authorization(keys)})
    assert is_admitted(keys, {"authorization": f"Bearer {OLD}"})


@pytest.mark.parametrize(
    "shown", [None, "", NEW, "Bearer ", f"Bearer {NEW}x", f"Bearer {NEW[:-1]}", f"bearer {NEW}", "Bearer \xff"]
)
def test_everything_else_is_not(shown: str | None) -> None:
    assert not is_admitted((NEW, OLD), {} if shown is None else {"authorization": shown})


def test_without_keys_everybody_is_let_in_and_nothing_is_shown() -> None:
    assert is_admitted((), {})
    assert authorization(()) == ""


@pytest.mark.parametrize(
    ("address", "is_own"),
    [("127.0.0.1", True), ("127.64.3.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False),
     ("0.0.0.0", False), ("::", False), ("pod-0.svc", False)],
)  # fmt: skip
def test_which_addresses_only_this_machine_reaches(address: str, is_own: bool) -> None:
    assert is_loopback(address) == is_own
