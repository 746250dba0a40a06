"""Paths of a chat in the words of the client whose body it was made from."""

import pytest

from stageline_gateway.errors import bad_value
from stageline_gateway.openai_api.client_words import ClientWords

WORDS = ClientWords(
    {"messages": "input", "tools.function.name": "tools.name", "stop": "stop_sequences", "choice.name": "chosen"},
    lambda: {"messages[1]": "input[3]", "messages[1].calls[0]": "input[4]", "messages[11]": "input[12]"},
)


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        ("messages", "input"),
        ("stop", "stop_sequences"),
        ("stop[2]", "stop_sequences"),
        ("messages[1]", "input[3]"),
        ("messages[1].content[2].text", "input[3].content[2].text"),
        ("messages[1].calls[0].arguments", "input[4].arguments"),
        ("messages[1].calls[5]", "input[3].calls[5]"),
        ("messages[11].role", "input[12].role"),
        ("messages[2].role", "messages[2].role"),
        ("tools[7].function.name", "tools[7].name"),
        ("tools[7].function.strict", "tools[7].function.strict"),
        ("temperature", "temperature"),
    ],
)
def test_the_longest_beginning_that_is_known_is_taken(path: str, theirs: str) -> None:
    assert WORDS.of(path) == theirs


def test_a_refusal_says_the_clients_name_in_its_message_too() -> None:
    error = bad_value("messages[1].role", "'messages[1].role' is wrong.")
    told = WORDS.told(error)
    assert (told.status, told.param, told.message) == (400, "input[3].role", "'input[3].role' is wrong.")
    assert ClientWords().told(error) is error


def test_phrases_are_said_as_the_client_knows_them() -> None:
    words = ClientWords({"choice": "chosen"}, phrases={"send 'choice': 'any'": "send a 'choice' of any"})
    named = words.told(bad_value("choice", "'choice' is wrong: send 'choice': 'any'."))
    assert (named.param, named.message) == ("chosen", "'chosen' is wrong: send a 'chosen' of any.")
    other = words.told(bad_value("more", "'more' is wrong: send 'choice': 'any'."))
    assert (other.param, other.message) == ("more", "'more' is wrong: send a 'choice' of any.")


def test_places_are_not_looked_for_where_the_path_has_no_index() -> None:
    def places() -> dict[str, str]:
        raise AssertionError("a whole body is gone through")

    assert ClientWords({"a": "b"}, places).of("a") == "b"
