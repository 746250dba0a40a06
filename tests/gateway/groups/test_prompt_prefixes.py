"""The names of a prompt's beginnings: the same for the same beginning, others for all that a cache keeps apart."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stageline_api.engine_http import (
    MAX_PREFIXES,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ToolFunction,
)
from stageline_gateway.groups.prompt_prefixes import STEP, prefixes_of


def names(prompt: Prompt, salt: str | None = None, adapter: str | None = None) -> list[str]:
    request = GenerateRequest(request_id="r", prompt=prompt, cache_salt=salt, adapter=adapter)
    prefixes = prefixes_of(request)
    # As an engine would read them.
    GenerateRequest.from_json(structs.replace(request, prefixes=prefixes).to_json())
    shares = [share for _, share in prefixes]
    assert shares == sorted(set(shares)), "the shortest first"
    return [name for name, _ in prefixes]


def chat(*contents: str, **fields: object) -> ChatPrompt:
    roles = ("system", *("user", "assistant") * len(contents))
    messages = tuple(ChatMessage(role=role, content=text) for role, text in zip(roles, contents, strict=False))
    return msgspec.convert({"kind": "chat", "messages": messages, **fields}, ChatPrompt)


TEXTS = st.text(max_size=3000)


@given(TEXTS, TEXTS, TEXTS)
def test_prompts_share_the_names_of_what_they_share(same: str, one: str, other: str) -> None:
    first, second = names(TextPrompt(text=same + one)), names(TextPrompt(text=same + other))
    shared = len(same.encode())
    most = max(len((same + each).encode()) for each in (one, other))
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    even = min(shared, STEP * 16) // STEP
    assert common >= even, "every step of what is shared has its name"
    assert not set(first[common:]) & set(second[common:]), most


@given(st.lists(TEXTS, min_size=2, max_size=5), TEXTS, TEXTS)
def test_the_next_turn_of_a_chat_has_the_name_of_the_turn_before(turns: list[str], answer: str, more: str) -> None:
    before = names(chat(*turns))
    after = names(chat(*turns, answer, more))
    length = sum(len(text.encode()) for text in turns)
    assert not before or length < STEP or before[-1] in after


@given(TEXTS)
def test_what_a_cache_keeps_apart_has_names_of_its_own(text: str) -> None:
    long = text + "x" * STEP
    prompts = (TextPrompt(text=long), chat(long), TokenPrompt(token_ids=tuple(map(ord, long))))
    sets = [set(names(prompt, salt, adapter)) for prompt in prompts for salt, adapter in APART]
    assert all(sets)
    assert len(set().union(*sets)) == sum(map(len, sets)), "no name in two of them"


APART = [(None, None), ("salt", None), ("other", None), (None, "adapter"), ("salt", "adapter")]


def test_tools_and_arguments_of_the_template_come_before_the_messages() -> None:
    text = "x" * STEP
    tool = ToolFunction(name="look", parameters={})
    kinds = [
        chat(text),
        chat(text, tools=(tool,)),
        chat(text, template_arguments={"a": 1}),
        chat(text, reasoning_effort="low"),
    ]
    assert len({names(each)[0] for each in kinds}) == len(kinds)


def test_a_short_prompt_has_no_names_and_the_longest_few_enough() -> None:
    assert names(TextPrompt(text="x" * (STEP - 1))) == []
    assert names(TextPrompt(text="")) == []
    many = names(chat(*("word " * 400_000 for _ in range(3))))
    assert 30 < len(many) <= MAX_PREFIXES
    assert 30 < len(names(chat(*("y" * 700 for _ in range(8000))))) <= MAX_PREFIXES


def test_an_id_that_is_in_no_vocabulary_is_no_error_here() -> None:
    assert names(TokenPrompt(token_ids=(2**40,) * 100)) == []
    assert names(TokenPrompt(token_ids=(-1,) * 100)) != []
