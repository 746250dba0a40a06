"""Paths of a chat in the words of the client whose body it was made from."""

import pytest

from stageline_gateway.errors import ApiError, bad_value
from stageline_gateway.openai_api.client_names import ClientNames

NAMES = ClientNames(
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
    assert NAMES.of(path) == theirs


def test_an_error_is_rendered_with_the_clients_names_and_whatever_values_it_has() -> None:
    error = bad_value("messages[1].role", "= 'messages[1].role' is wrong beside", other="stop")
    told = error.renamed(NAMES.of)
    assert (told.status, told.param) == (400, "input[3].role")
    assert told.message == "'input[3].role' = 'messages[1].role' is wrong beside 'stop_sequences'."


def test_an_engines_sentence_stays_and_the_clients_field_is_put_before_it() -> None:
    refusal = ApiError(400, "stop is wrong.", param="stop", code="invalid_value")
    assert refusal.renamed(NAMES.of).message == "'stop_sequences': stop is wrong."
    assert refusal.renamed(ClientNames().of) is refusal


def test_places_are_not_looked_for_where_the_path_has_no_index() -> None:
    def places() -> dict[str, str]:
        raise AssertionError("a whole body is gone through")

    assert ClientNames({"a": "b"}, places).of("a") == "b"
