"""Grammars that are dear to follow cost others little: they are refused, or their own answers end."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from processes.cpu_bounds import CpuBound
from stageline_api.engine_http import GRAMMAR_MARK, REGEX_MARK
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.schema_check import SchemaCheck
from stageline_runtime.guided.grammar_walk import TOO_SLOW
from stageline_runtime.guided.guide import Guide, GuideMaker
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.guided.mask_time import (
    ANSWER_SECONDS,
    AVOIDED_SECONDS,
    CALL_SECONDS,
    SHARED_SECONDS,
    SHARED_SHARE,
    SURE_SECONDS,
    TOKEN_SECONDS,
    AnswerMaskTime,
    GrammarVerdict,
    SharedMaskTime,
)
from stageline_runtime.guided.rehearsal import rehearse
from stageline_runtime.guided.watched_calls import OverrunError, WatchedCalls
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.stage.step.sampling_state import SamplingState

GAP_SECONDS: Final = 0.25
"""For which nobody's tokens may pause because of another's request."""
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
WORDS: Final = [
    start + "".join(word) for length in (1, 2, 3) for word in product(LETTERS, repeat=length) for start in ("", "Ġ")
]
VOCABULARY: Final = list(dict.fromkeys(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]))
VOCAB_SIZE: Final = 49_152
"""SmolLM2's; the last quarter of it has no token here, and three of four of the others are words of three letters."""


def ambiguous(most: int, letter: str = "/[a-z]/") -> str:
    """As many ways to read a text as there are to divide it into up to `most` - 1 parts, each divided again."""
    rules = " | ".join(" ".join(["s"] * count) for count in range(2, most))
    return f'start: s\ns: {rules} | {letter} | ""\n'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("words")
    merges = [(word[:-1], word[-1]) for word in WORDS if len(word) > 1]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(VOCABULARY)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def grammars(model_dir: Path) -> JsonGrammars:
    grammars = JsonGrammars(model_dir, VOCAB_SIZE, [0])
    grammars.load()
    return grammars


def rehearsed(grammars: JsonGrammars, text: str) -> str | None:
    return rehearse(lambda: grammars.matcher(text), grammars.vocab_size, grammars.eos_token_ids)


def step(guides: dict[int, Guide], chooser: random.Random) -> None:
    """One token of each answer that goes on; the others leave."""
    for number, guide in list(guides.items()):
        logits = torch.zeros(VOCAB_SIZE)
        guide.mask(logits)
        admitted = (logits == 0).nonzero().squeeze(1)
        if guide.failure is not None or admitted.tolist() == [0]:
            del guides[number]
            continue
        guide.take((int(admitted[chooser.randrange(len(admitted))]),))


HOSTILE: Final = {
    "few rules": 'start: s\ns: s s | s s s | /[a-z]/ | " " | ""\n',
    "any letter": 'start: s\ns: s s s s | s s s | s s | /./ | ""\n',
    "up to 14": ambiguous(15),
    "up to 21": ambiguous(22),
    "of each other": "start: a\n"
    + "".join(
        f'{one}: {two} {three} | {three} {two} | /./ | ""\n'
        for one, two, three in zip("abcdefgh", "bcdefgha", "cdefghab", strict=True)
    ),
    "words of words": "start: s*\ns: "
    + " | ".join(f"w{at}" for at in range(200))
    + "\n"
    + "".join(f"w{at}: /[a-z]{{1,{at + 1}}}/ s?\n" for at in range(200)),
    "many that may be empty": "start: s\ns: "
    + " ".join(f"n{at}" for at in range(400))
    + "\n"
    + "".join(f'n{at}: /[a-z]/ | ""\n' for at in range(400)),
}
ENDS_EARLY: Final = "of each other"
"""The library gives it up cheaply, with most tokens."""


@pytest.mark.parametrize("grammar", [HOSTILE[name] for name in HOSTILE if name != ENDS_EARLY])
def test_a_grammar_that_is_dear_to_follow_is_refused_before_any_answer(
    grammars: JsonGrammars, grammar: str, cpu_bound: CpuBound
) -> None:
    began = time.thread_time()
    fault = rehearsed(grammars, GRAMMAR_MARK + grammar)
    spent = time.thread_time() - began
    assert fault is not None
    assert "too long to follow" in fault or "too complex to follow" in fault
    assert "\n" not in fault
    assert cpu_bound.holds(spent, 2.0), f"{spent:.2f} s of CPU, which the engine would have given up before"


@pytest.mark.thorough
def test_one_whose_first_mask_takes_a_minute_is_refused_with_the_reason(model_dir: Path) -> None:
    async def run() -> str:
        check = SchemaCheck(model_dir, VOCAB_SIZE, [0])
        try:
            with pytest.raises(PromptError) as refused:
                await check.check(GRAMMAR_MARK + ambiguous(110))
            await check.check(REGEX_MARK + "[a-z]+")
        finally:
            await check.close()
        return refused.value.message

    assert "grammar can't guide an answer: it takes too long to compile, or to follow" in asyncio.run(run())


@pytest.fixture
def maker(grammars: JsonGrammars) -> Iterator[GuideMaker]:
    maker = GuideMaker(grammars)
    yield maker
    maker.close()


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE.keys())
def test_many_choices_of_one_take_no_more_of_a_step_than_a_gap_may_last(
    grammars: JsonGrammars, grammar: str, cpu_bound: CpuBound
) -> None:
    """As if it had not been rehearsed.

    The least of three: whoever is to leave a call behind may be late itself where others load the machine, and the call
    goes on meanwhile.
    """
    text = GRAMMAR_MARK + grammar
    grammars.matcher(text)
    seconds: list[float] = []
    while not seconds or (len(seconds) < 3 and not cpu_bound.holds(min(seconds), GAP_SECONDS)):
        seconds.append(slowest_step_of_31(grammars, text))
    assert cpu_bound.holds(min(seconds), GAP_SECONDS), f"seconds of CPU for one step, in three tries: {seconds}"


def slowest_step_of_31(grammars: JsonGrammars, text: str) -> float:
    """Seconds of CPU, with another's answer among them."""
    maker = GuideMaker(grammars)
    hostile, chooser = {number: maker.start(text) for number in range(31)}, random.Random(1)
    other = maker.start(REGEX_MARK + "[a-z ]+")
    slowest, steps = 0.0, 0
    while hostile and steps < 60:
        began = maker.calls.cpu_seconds
        step(hostile, chooser)
        step({0: other}, chooser)
        slowest, steps = max(slowest, maker.calls.cpu_seconds - began), steps + 1
    assert other.failure is None, "another's answer goes on"
    assert not hostile, f"it is followed after {steps} tokens"
    assert maker.calls.num_left <= 2
    maker.close()
    return slowest


def test_one_that_turns_dear_late_ends_its_own_answer_alone(grammars: JsonGrammars, cpu_bound: CpuBound) -> None:
    """No rehearsal comes there: it takes one token of eighteen thousand."""
    rules = ambiguous(30).removeprefix("start: s\n")
    late = GRAMMAR_MARK + f'start: /[a-z]+/ "~" s\n{rules}'
    assert rehearsed(grammars, late) is None
    maker = GuideMaker(grammars)
    state = SamplingState(maker)
    begun = tuple(VOCABULARY.index(letter) for letter in "a~")
    sampling = [
        RequestSampling(0.0, 1.0, 0, 0, 0, json_schema=late, num_prompt_tokens=1),
        RequestSampling(0, 1, 0, 0, 0),
    ]
    rows = tuple(PlanRow(slot, 1, 0, 3, (5, *begun), True) for slot in range(2))
    fills = tuple(SlotFill(slot, 1, each) for slot, each in enumerate(sampling))
    plan = StepPlan(0, 0, fills, rows, 6, -1, False, False)
    state.accept(plan)
    before = maker.calls.cpu_seconds
    drawn, _ = state.sample(plan, torch.zeros(2, VOCAB_SIZE))
    sampled = drawn.rows()
    assert cpu_bound.holds(maker.calls.cpu_seconds - before, GAP_SECONDS)
    assert [row.failure for row in sampled] == [TOO_SLOW, None]
    maker.close()


@pytest.mark.bench
@pytest.mark.parametrize("most", [4, 15, 30, 45, 60, 110])
@pytest.mark.parametrize("letter", ["/[a-z]/", "/./"])
def test_what_is_left_behind_ends_soon(grammars: JsonGrammars, most: int, letter: str, cpu_bound: CpuBound) -> None:
    """Nothing could end it, and it takes a core from the steps."""
    rules = ambiguous(most, letter).removeprefix("start: s\n")
    matcher = grammars.matcher(GRAMMAR_MARK + f'start: /[a-z]+/ "~" s\n{rules}')
    matcher.consume_tokens([VOCABULARY.index(begun) for begun in "a~"])
    slowest = 0.0
    for _ in range(20):
        began = time.thread_time()
        matcher.compute_bitmask()
        matcher.consume_tokens([VOCABULARY.index("abc")])
        slowest = max(slowest, time.thread_time() - began)
    assert cpu_bound.holds(slowest, 1.0), f"{slowest:.2f} s of CPU for one token"


def _objects(count: int) -> list[dict[str, Any]]:
    return [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{at}"}, f"q{at}": {"type": "integer"}},
            "required": ["kind"],
        }
        for at in range(count)
    ]


NODE: Final = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["v"],
}
SCHEMAS: Final[dict[str, Any]] = {
    "anything": {},
    "a string": {"type": "string", "minLength": 20, "maxLength": 8000},
    "nested": {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": _objects(3)}}}},
    "a large enum": {"type": "object", "properties": {"k": {"enum": [f"value {at}" for at in range(2000)]}}},
    "refs": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "more properties": {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "number"}},
    "wide": {"type": "object", "properties": {f"field_{at}": {"type": "string"} for at in range(300)}},
    "sixty tools": {"type": "array", "minItems": 1, "items": {"anyOf": _objects(60)}},
    "formats": {"type": "array", "prefixItems": [{"type": "string", "format": "date-time"}, {"format": "email"}]},
}
GRAMMARS: Final = {
    "json": r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" WS (pair (WS "," WS pair)*)? WS "}"
array: "[" WS (value (WS "," WS value)*)? WS "]"
pair: STRING WS ":" WS value
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt])*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
WS: /[ \n\t]{0,8}/
""",
    "arithmetic": r"""
start: expr
expr: expr "+" term | expr "-" term | term
term: term "*" factor | term "/" factor | factor
factor: NUMBER | NAME | "(" expr ")" | "-" factor | NAME "(" (expr ("," expr)*)? ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z_][a-z0-9_]*/
%ignore / +/
""",
    "arithmetic of two readings": 'start: e\ne: e "+" e | e "*" e | e "-" e | "(" e ")" | /[0-9]+/ | /[a-z]+/\n',
    "sql": r"""
start: select ";"
select: "SELECT"i cols "FROM"i table join* ("WHERE"i cond)? ("ORDER"i "BY"i expr ("," expr)*)? ("LIMIT"i INT)?
cols: "*" | expr ("," expr)*
table: NAME ("AS"i? NAME)? | "(" select ")" "AS"i NAME
join: ("LEFT"i|"INNER"i)? "JOIN"i table "ON"i cond
cond: cond "AND"i cond | cond "OR"i cond | "NOT"i cond | "(" cond ")" | expr OP expr | expr "IN"i "(" select ")"
expr: expr "+" expr | expr "*" expr | "(" expr ")" | NAME ("." NAME)? | INT | STR | FUNC "(" (expr | "*") ")"
FUNC: /(count|sum|avg|min|max|lower|upper|coalesce)/i
OP: /(=|<>|!=|<=|>=|<|>)/
NAME: /[a-zA-Z_][a-zA-Z0-9_]{0,60}/
INT: /[0-9]{1,20}/
STR: /'([^'])*'/
%ignore /[ \n\t]+/
""",
    "a list": 'start: item+\nitem: "- " /[^\\n]+/ "\\n"\n',
    "prose": "start: (word | mark)+\nword: /[A-Za-z]+/ ws?\nmark: /[.,;!?]/ ws?\nws: / +/\n",
    "chess": 'root ::= ([1-9] ". " move " " move "\\n")+\nmove ::= [NBKQR]? "x"? [a-h] [1-8] [+#]? | "O-O" "-O"?',
}
SENSIBLE: Final = {
    **{f"schema: {name}": json.dumps(schema) for name, schema in SCHEMAS.items()},
    **{f"grammar: {name}": GRAMMAR_MARK + grammar for name, grammar in GRAMMARS.items()},
    "expression: a date": REGEX_MARK + r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d+)?Z)?",
    "expression: an end": REGEX_MARK + r"(?s:.*)answer: (yes|no|maybe)\.",
    "expression: a thousand choices": REGEX_MARK + "|".join(f"the {at}th choice" for at in range(1000)),
}


@pytest.mark.parametrize("text", SENSIBLE.values(), ids=SENSIBLE.keys())
def test_what_people_write_is_followed_by_many_at_once(grammars: JsonGrammars, maker: GuideMaker, text: str) -> None:
    assert rehearsed(grammars, text) is None
    guides, chooser = [maker.start(text) for _ in range(8)], random.Random(3)
    going = dict(enumerate(guides))
    for _ in range(40):
        step(going, chooser)
    assert [guide.failure for guide in guides] == [None] * 8
    assert maker.calls.num_left == 0


def test_a_call_that_takes_too_long_is_left_behind_and_the_next_one_made() -> None:
    calls, is_over = WatchedCalls(), threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    try:
        with pytest.raises(OverrunError):
            calls.make(spin, CALL_SECONDS)
        assert calls.make(lambda: "next", CALL_SECONDS).result == "next", "while the first goes on"
        assert calls.num_left == 1
    finally:
        is_over.set()
        calls.close()


def test_a_call_that_waits_without_using_cpu_is_waited_for() -> None:
    """As on a machine that has no time for it."""
    calls = WatchedCalls()
    made = calls.make(lambda: time.sleep(3 * CALL_SECONDS), CALL_SECONDS)
    assert made.seconds < CALL_SECONDS
    with pytest.raises(ZeroDivisionError):
        calls.make(lambda: 1 // 0, CALL_SECONDS)
    calls.close()


def test_an_answer_has_its_time_by_its_tokens() -> None:
    answer = AnswerMaskTime()
    assert answer.left == CALL_SECONDS
    answer.use(ANSWER_SECONDS)
    assert answer.left <= 0
    answer.use(0.0, num_tokens=1)
    assert answer.left == pytest.approx(TOKEN_SECONDS)
    answer.use(0.0, num_tokens=1000)
    assert answer.left <= CALL_SECONDS


def test_what_all_answers_share_fills_up_with_the_clock_and_leaves_each_its_sure_time() -> None:
    now = 0.0
    shared = SharedMaskTime(lambda: now)
    first, second = AnswerMaskTime(shared), AnswerMaskTime(shared)
    first.use(SHARED_SECONDS)
    assert second.left == SURE_SECONDS
    now = 0.05
    assert second.left == pytest.approx(now * SHARED_SHARE)
    now = 1.0
    first.use(SHARED_SECONDS)
    assert second.left == SURE_SECONDS, "a call that lasted long on a busy machine"
    now = 10.0
    assert shared.left == SHARED_SECONDS
    # In any quarter of a second, beside what every answer surely has.
    assert SHARED_SECONDS + GAP_SECONDS * SHARED_SHARE < 0.7 * GAP_SECONDS


def test_a_grammar_is_avoided_after_one_long_call_or_several_that_had_less_time() -> None:
    now = 0.0
    verdict = GrammarVerdict(lambda: now)
    for limits in ((CALL_SECONDS,), (SURE_SECONDS, SURE_SECONDS)):
        for limit in limits:
            assert not verdict.is_too_slow
            verdict.overran(limit)
        assert verdict.is_too_slow
        now += AVOIDED_SECONDS
        assert not verdict.is_too_slow
