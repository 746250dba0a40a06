"""Drawn bodies by the short way for plain requests and by the general one: whatever the short way takes, both make the
same of. And it takes what clients send.
"""

import json
from itertools import combinations
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stageline_api.engine_http import FinishReason
from stageline_gateway.admission.body_sizes import shape_of, shape_with_written
from stageline_gateway.admission.request_body import parse_object
from stageline_gateway.engine_client.written_request import written
from stageline_gateway.openai_api.answer_shapes import AnswerShape
from stageline_gateway.openai_api.plain_requests import Plain, plain_chat, plain_completion
from stageline_gateway.openai_api.translate import Asked, Prepare, Prepared, prepare_chat, prepare_completion

APIS: Final[dict[str, tuple[Plain, Prepare]]] = {
    "completion": (plain_completion, prepare_completion),
    "chat": (plain_chat, prepare_chat),
}
REQUIRED: Final = {
    "completion": ['"prompt":"x"'],
    "chat": ['"messages":[{"role":"user","content":"x"}]'],
}
COUNTS: Final = ("1", "16", "2147483647", "2147483648", "0", "-1", "1.0", "1e1", "true", "null", '"5"')
NUMBERS: Final = (
    "0",
    "-0",
    "-0.0",
    "1",
    "0.5",
    "1.0",
    "1e-3",
    "2",
    "2.0",
    "-2",
    "2.1",
    "1e400",
    "1e-400",
    "null",
    "true",
)
SWITCHES: Final = ("true", "false", "null", "1", '"true"')
TEXTS: Final = (
    '"x"', '""', '"\\u00fc\\u0000"', '"ü\U0001f600"', '"\\ud83d\\ude00"', '"\\ud83d"', '"\\ude00"', '"a\tb"', '"\\/"',
    '"\\x"', "1", "null", '["x"]', "{}",
)  # fmt: skip
SEEDS: Final = (
    "7", "-1", "0", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "1" + "0" * 400, "1.0", "null", "true",
)  # fmt: skip
STOPS: Final = (
    '"x"', '""', "[]", '["a","b"]', '["a",""]', "null", json.dumps("ü" * 256), json.dumps("ü" * 257),
    json.dumps(["x"] * 16), json.dumps(["x"] * 17), "[1]", "[null]",
)  # fmt: skip
OPTIONS: Final = (
    "null", "{}", '{"include_usage":true}', '{"include_usage":null}', '{"include_usage":1}', '{"include_usage":false}',
    '{"include_usage":true,"include_obfuscation":false}', '{"continuous_usage_stats":true}', '{"unknown":1}',
)  # fmt: skip
MESSAGES: Final = (
    '{"role":"user","content":"x"}',
    '{"content":"ü","role":"assistant"}',
    '{"role":"system","content":""}',
    '{"role":"user","content":"x","role":"assistant"}',
    '{"role":"developer","content":"x"}',
    '{"role":"user","content":null}',
    '{"role":"user","content":[{"type":"text","text":"x"}]}',
    '{"role":"user","content":"x","name":"bo"}',
    '{"role":"assistant","content":"x","tool_calls":[]}',
    '{"role":"assistant","content":"x","refusal":null}',
    '{"role":"tool","content":"x","tool_call_id":"c"}',
    '{"role":"other","content":"x"}',
    '{"role":"user"}',
    "1",
)
STRAY: Final = (b"\xff", b"\xed\xa0\x80", b"\x00", b"\n", b" ", b'"', b",", b"}", b"0", b"1")
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "model": TEXTS,
    "prompt": TEXTS,
    "max_tokens": COUNTS,
    "max_completion_tokens": COUNTS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "frequency_penalty": NUMBERS,
    "presence_penalty": NUMBERS,
    "n": ("1", "2", "0", "1.0", "true", "null"),
    "seed": SEEDS,
    "stop": STOPS,
    "ignore_eos": SWITCHES,
    "stream": SWITCHES,
    "stream_options": OPTIONS,
    "logprobs": ("null", "1", "true", "false"),
    "user": ('"bo"', '""', "null"),
    "best_of": ("1", "2"),
    "top_k": ("3",),
    "temprature": ("1",),
    "Model": ('"m"',),
}


def plain_field(name: str) -> st.SearchStrategy[str]:
    """One of the values of a field: the first ones, which are mostly good, more often."""
    values = FIELDS[name]
    return st.sampled_from(values[:4] * 6 + values).map(lambda value: f'"{name}":{value}')


ONE_FIELD: Final = st.one_of(
    st.sampled_from(list(FIELDS)[:15]).flatmap(plain_field),
    st.sampled_from(list(FIELDS)).flatmap(plain_field),
    st.lists(st.sampled_from(MESSAGES[:3] * 6 + MESSAGES), max_size=4).map(
        lambda said: f'"messages":[{",".join(said)}]'
    ),
    st.text(max_size=6).map(lambda text: f'"prompt":{json.dumps(text)}'),
    st.text(max_size=6).map(lambda text: f'"prompt":{json.dumps(text, ensure_ascii=False)}'),
    st.floats().map(lambda number: f'"temperature":{json.dumps(number)}'),
    st.floats(0, 1).map(lambda number: f'"top_p":{number!r}'),
    st.integers().map(lambda number: f'"seed":{number}'),
)


@st.composite
def bodies(draw: st.DrawFn, api: str) -> bytes:
    fields = ['"model":"m"', *REQUIRED[api], *draw(st.lists(ONE_FIELD, max_size=5))]
    if draw(st.integers(0, 9)) == 0:
        fields = draw(st.permutations(fields))[: draw(st.integers(1, len(fields)))]
    raw = ("{" + draw(st.sampled_from([",", ", ", "\n,\t"])).join(fields) + "}").encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = (
            raw[:at]
            + draw(st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\x00", b"\n", b" ", b'"', b",", b"}", b"0"]))
            + raw[at:]
        )
    return raw


def written_by(shape: AnswerShape) -> tuple[object, ...]:
    return (
        type(shape),
        shape.whole_kind,
        shape.chunk_kind,
        shape.tells_prompt_at_top,
        shape.is_plain,
        shape.opening(),
        shape.prompt([]),
        shape.piece("a", None),
        shape.piece("b", []),
        shape.held_back(FinishReason.STOP),
        shape.closing(FinishReason.STOP),
        shape.whole("ab", FinishReason.LENGTH),
    )


def effect(prepared: Prepared, seed: int | None) -> dict[str, object]:
    """All that the rest of the gateway sees of a request, but for what was drawn; `seed` stands for one that was."""
    asked, generate = prepared.asked, prepared.generate
    kind, drawn_id = generate.request_id.split("-")
    sampling = generate.sampling.model_copy(update={} if seed is None else {"seed": seed})
    told = generate.model_copy(update={"request_id": "r", "sampling": sampling})
    shown = {name: getattr(asked, name) for name in vars(Asked) if not name.startswith("_")}
    assert shown["model"] is not None, "the protocol's names were not found"
    return shown | {
        "id": (kind, len(drawn_id)),
        "generate": told,
        "as JSON": told.model_dump_json(),  # 1 is equal to 1.0 and to True, and -0.0 to 0.0
        "line": written(told),
        "shape": written_by(prepared.shape_of(0)),
        "rest": (prepared.ignored, prepared.prompts, prepared.dialect, prepared.words),
    }


def is_taken(api: str, raw: bytes) -> bool:
    """Whether the short way takes `raw`; what it makes of it is compared then."""
    plain, prepare = APIS[api]
    short = plain(bytearray(raw))
    if short is None:
        return False
    fields = parse_object(raw)
    assert shape_with_written(shape_of(raw), fields) == shape_of(raw), "it holds more than is counted"
    seed = 5 if fields.get("seed") is None else None
    for strict in (False, True):
        assert effect(short, seed) == effect(prepare(fields, strict), seed)
    return True


@given(st.sampled_from(list(APIS)).flatmap(lambda api: st.tuples(st.just(api), bodies(api))))
@example(("completion", b'{"model":"m","prompt":"x","stream":true,"stream_options":{"include_usage":true}}'))
def test_both_ways_make_the_same_of_whatever_the_short_one_takes(drawn: tuple[str, bytes]) -> None:
    is_taken(*drawn)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FIELDS for value in FIELDS[name]])
def test_both_ways_agree_on_each_value_by_itself(api: str, name: str, value: str) -> None:
    field = f'"{name}":{value}'
    is_taken(api, f'{{"model":"m",{REQUIRED[api][0]},{field}}}'.encode())
    is_taken(api, f'{{"model":"m",{REQUIRED[api][0]},"stream":true,{field}}}'.encode())


@pytest.mark.parametrize("api", APIS)
def test_both_ways_agree_on_each_two_fields(api: str) -> None:
    """Some exclude each other, or need each other."""
    for first, second in combinations(FIELDS, 2):
        fields = ",".join(f'"{name}":{FIELDS[name][0]}' for name in (first, second))
        is_taken(api, f'{{"model":"m",{REQUIRED[api][0]},{fields}}}'.encode())


@pytest.mark.parametrize("message", MESSAGES)
def test_both_ways_agree_on_each_message(message: str) -> None:
    is_taken("chat", f'{{"model":"m","messages":[{message},{message}]}}'.encode())


TALK: Final = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Ünïcode\n"},
]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("completion", {"model": "m", "prompt": "x"}),
        ("completion", {"model": "m", "prompt": "x", "max_tokens": 9, "temperature": 0, "stop": ["\n"], "seed": -1}),
        ("completion", {"model": "m", "prompt": "x", "n": 1, "top_p": 0.9, "stream": True, "frequency_penalty": 0.5}),
        (
            "completion",  # `vllm bench serve`
            {
                "model": "m", "prompt": "x", "temperature": 0.0, "max_tokens": 128, "logprobs": None, "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True,
            },
        ),
        ("chat", {"model": "m", "messages": TALK}),
        ("chat", {"model": "m", "messages": TALK, "max_completion_tokens": 9, "stop": "END", "presence_penalty": -1}),
        ("chat", {"model": "m", "messages": TALK, "stream": True, "stream_options": {"include_usage": True}}),
        ("chat", {"model": "m", "messages": TALK, "max_tokens": 5, "temperature": 0.7, "seed": 2**63 - 1}),
    ],
)  # fmt: skip
def test_what_clients_send_is_taken(api: str, body: dict[str, Any]) -> None:
    assert is_taken(api, json.dumps(body).encode())
    assert is_taken(api, json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())


def test_every_request_draws_an_id_and_a_seed_of_its_own() -> None:
    made = [plain_completion(b'{"model":"m","prompt":"x"}') for _ in range(100)]
    generates = [one.generate for one in made if one is not None]
    assert len({one.request_id for one in generates}) == len({one.sampling.seed for one in generates}) == 100
    assert all(0 <= one.sampling.seed < 2**63 for one in generates)
