"""Guided decoding: random choices among admitted tokens always give JSON of the schema, then end of sequence."""

import ast
import json
import random
import re
import time
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_tokenizer
from processes.cpu_bounds import CpuBound
from stageline_api.engine_http import GRAMMAR_MARK, REGEX_MARK
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.guided.guide import Guide, GuideMaker
from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.stage.step.sampling_state import SamplingState

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "gr\u00fcn"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def grammars(model_dir: Path) -> JsonGrammars:
    """Grammars of that tokenizer, for an embedding with rows that no token has."""
    return JsonGrammars(model_dir, VOCAB_SIZE + 3, [EOS_TOKEN_ID])


def guide_of(matcher: LLMatcher) -> Guide:
    compiled: Future[LLMatcher] = Future()
    compiled.set_result(matcher)
    return Guide(compiled)


def admitted(guide: Guide) -> list[int]:
    logits = torch.zeros(VOCAB_SIZE + 3)
    guide.mask(logits)
    assert guide.failure is None
    return [int(token) for token in (logits == 0).nonzero().squeeze(1)]


@pytest.mark.parametrize("seed", range(20))
def test_any_walk_ends_in_json_of_the_schema(grammars: JsonGrammars, model_dir: Path, seed: int) -> None:
    chooser = random.Random(seed)
    guide = guide_of(grammars.matcher(json.dumps(SCHEMA)))
    output: list[int] = []
    while not output or output[-1] != EOS_TOKEN_ID:
        token = chooser.choice(admitted(guide))
        guide.take((token,))
        output.append(token)
        assert len(output) < 2000
    token_bytes = EngineTokenizer.load(model_dir).token_bytes
    answer = json.loads(b"".join(token_bytes.of(token) for token in output[:-1]))
    assert answer.keys() == {"colour", "count"}
    assert answer["colour"] in ("red", "gr\u00fcn")
    assert 0 <= answer["count"] <= 99


@pytest.mark.parametrize("expression", [r"[a-c]{2,3}-\d+(x|yz)?!", "gr\u00fcn|ja|a/b", r"(ab|cd)*e"])
@pytest.mark.parametrize("seed", range(3))
def test_any_walk_ends_in_a_text_that_matches(
    grammars: JsonGrammars, model_dir: Path, expression: str, seed: int
) -> None:
    chooser = random.Random(seed)
    guide = guide_of(grammars.matcher(REGEX_MARK + expression))
    output: list[int] = []
    while not output or output[-1] != EOS_TOKEN_ID:
        output.append(chooser.choice(admitted(guide)))
        guide.take((output[-1],))
        assert len(output) < 2000
    token_bytes = EngineTokenizer.load(model_dir).token_bytes
    text = b"".join(token_bytes.of(token) for token in output[:-1]).decode()
    assert re.fullmatch(expression, text), text


DENSE_WORDS = ["".join(word) for length in range(2, 11) for word in product("ab", repeat=length)]
DENSE_VOCABULARY = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *DENSE_WORDS]


@pytest.fixture(scope="module")
def dense_grammars(tmp_path_factory: pytest.TempPathFactory) -> JsonGrammars:
    """Grammars of a tokenizer whose tokens are all words of up to 10 letters `a` and `b`: a mask tries each."""
    directory = tmp_path_factory.mktemp("dense")
    merges = [(word[:-1], word[-1]) for word in DENSE_WORDS]
    model = models.BPE({token: index for index, token in enumerate(DENSE_VOCABULARY)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return JsonGrammars(directory, len(DENSE_VOCABULARY), [0])


def test_an_expression_with_ever_more_states_ends_in_an_error_early(
    dense_grammars: JsonGrammars, cpu_bound: CpuBound
) -> None:
    chooser = random.Random(1)
    guide = guide_of(dense_grammars.matcher(REGEX_MARK + "(a|b)*a(a|b){20}"))
    slowest, steps = 0.0, 0
    while guide.failure is None and steps < 200:
        logits = torch.zeros(len(DENSE_VOCABULARY))
        began = time.thread_time()
        guide.mask(logits)
        slowest = max(slowest, time.thread_time() - began)
        choices = [int(token) for token in (logits == 0).nonzero().squeeze(1) if int(token) != 0]
        if guide.failure is None:
            guide.take((chooser.choice(choices),))
        steps += 1
    assert guide.failure is not None, f"it goes on after {steps} tokens"
    assert "too complex to follow: lexer error: too many states" in guide.failure
    # Without a limit of our own it goes on for five times as long.
    assert steps < 60, f"{steps} tokens, {slowest:.3f} s at most for one"
    assert cpu_bound.holds(slowest, 0.5), f"{slowest:.3f} s of CPU for one mask"


def test_a_long_string_is_no_such_expression(grammars: JsonGrammars, model_dir: Path) -> None:
    guide = guide_of(grammars.matcher('{"type": "string", "maxLength": 8000}'))
    [letter] = EngineTokenizer.load(model_dir).encode("a", add_special_tokens=False)
    guide.take((EngineTokenizer.load(model_dir).encode('"', add_special_tokens=False)[0],))
    for at in range(8000):
        if at % 100 == 0:
            guide.mask(torch.zeros(VOCAB_SIZE + 3))
        guide.take((letter,))
    assert guide.failure is None


SUMS = {
    "lark": 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/',
    "gbnf": 'root ::= term ("+" term)*\nterm ::= num | "(" root ")"\nnum ::= [0-9] [0-9]?',
}


@pytest.mark.parametrize("grammar", SUMS.values(), ids=SUMS.keys())
def test_a_grammar_admits_what_an_expression_can_not_say(grammars: JsonGrammars, model_dir: Path, grammar: str) -> None:
    """Brackets that are closed as often as they are opened."""
    tokenizer, chooser = EngineTokenizer.load(model_dir), random.Random(2)
    guide, text = guide_of(grammars.matcher(GRAMMAR_MARK + grammar)), ""
    while True:
        # One that closes or ends is taken where it may stand, so that the walk ends.
        admitted_now = admitted(guide)
        ends = [token for token in admitted_now if token == EOS_TOKEN_ID or tokenizer.decode([token])[:1] == ")"]
        token = chooser.choice(ends if ends and len(text) > 30 else admitted_now)
        guide.take((token,))
        if token == EOS_TOKEN_ID:
            break
        text += tokenizer.decode([token])
        assert len(text) < 2000, text
    assert "(" in text
    value = ast.parse(re.sub(r"\b0+(?=\d)", "", text), mode="eval")
    assert all(isinstance(node, ast.Expression | ast.BinOp | ast.Add | ast.Constant) for node in ast.walk(value)), text


@pytest.mark.parametrize("grammar", ["", "no grammar", 'root ::= "\\', "root ::= (", "start: missing", "(" * 30000])
def test_a_grammar_that_is_none_is_refused_in_one_line(grammars: JsonGrammars, grammar: str) -> None:
    with pytest.raises(GrammarError) as refused:
        grammars.matcher(GRAMMAR_MARK + grammar)
    message = str(refused.value)
    assert message
    assert "\n" not in message
    assert len(message) < 300


def test_an_expression_that_is_none_is_named(grammars: JsonGrammars) -> None:
    with pytest.raises(GrammarError, match="regex"):
        grammars.matcher(REGEX_MARK + "(")


def test_end_of_sequence_only_where_the_grammar_may_end(grammars: JsonGrammars, model_dir: Path) -> None:
    tokenizer = EngineTokenizer.load(model_dir)
    guide = guide_of(grammars.matcher('{"type": "integer"}'))
    assert EOS_TOKEN_ID not in admitted(guide)
    guide.take(tokenizer.encode("12", add_special_tokens=False))
    assert EOS_TOKEN_ID in admitted(guide)
    guide.take((EOS_TOKEN_ID, 5, 6))
    assert guide.failure is None, "rows after the end run dead"


def test_a_token_that_the_grammar_does_not_admit_fails_the_request(grammars: JsonGrammars) -> None:
    guide = guide_of(grammars.matcher('{"type": "integer"}'))
    guide.take((EOS_TOKEN_ID,))
    assert guide.failure is not None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"type": "strin"}', "strin"),
        ('{"$ref": "#/nowhere"}', "nowhere"),
        ('{"type": "string", "pattern": "("}', "regex"),
        ('{"type": "array", "unevaluatedItems": false}', "unevaluatedItems"),
        ("5", "object"),
        ("{", ""),
    ],
)
def test_a_schema_that_cannot_guide_is_refused_with_a_sentence(grammars: JsonGrammars, schema: str, said: str) -> None:
    with pytest.raises(GrammarError) as refused:
        grammars.matcher(schema)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_without_end_of_sequence_cannot_be_guided(model_dir: Path) -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        JsonGrammars(model_dir, VOCAB_SIZE, []).matcher("{}")


def test_the_state_is_rebuilt_from_ids_behind_the_border(grammars: JsonGrammars, model_dir: Path) -> None:
    """A resumed request goes on where its output had come to."""
    tokenizer = EngineTokenizer.load(model_dir)
    prompt, output = (5, 9), tokenizer.encode('{"colour":"r', add_special_tokens=False)
    sampling = RequestSampling(0.0, 1.0, 0, 0, 0, json_schema=json.dumps(SCHEMA), num_prompt_tokens=len(prompt))
    state = SamplingState(GuideMaker(grammars))
    row = PlanRow(0, 1, 0, len(prompt + output), prompt + output, True)
    plan = StepPlan(0, 0, (SlotFill(0, 1, sampling),), (row,), row.num_tokens, -1, False, False)
    state.accept(plan)
    drawn, _ = state.sample(plan, torch.zeros(1, VOCAB_SIZE + 3))
    [sampled] = drawn.rows()
    assert sampled.failure is None
    assert tokenizer.token_bytes.of(sampled.token) in (b"e", b"ed")
