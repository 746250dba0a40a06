"""Guided decoding: random choices among admitted tokens always give JSON of the schema, then end of sequence."""

import json
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_tokenizer
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
    [sampled], _ = state.sample(plan, torch.zeros(1, VOCAB_SIZE + 3))
    assert sampled.failure is None
    assert tokenizer.token_bytes.of(sampled.token) in (b"e", b"ed")
