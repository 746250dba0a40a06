"""Tags of calls and thoughts show in an answer that is read for them, whether they are control tokens or plain ones."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from oracles.tokenizer_models import write_byte_level
from stageline_api.engine_http import ThoughtStart, ToolCallFormat
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.text.output_text import OutputText
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.plan_bus.messages import RequestSampling

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<other>")
SAID = "<think>a</think><other>b<tool_call>{}</tool_call>[TOOL_CALLS][]<|python_tag|>c"


def tokenizer(directory: Path, is_special: bool) -> EngineTokenizer:
    write_byte_level(directory)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens([AddedToken(tag, special=is_special, normalized=False) for tag in TAGS])
    backend.save(str(directory / "tokenizer.json"))
    assert json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return EngineTokenizer.load(directory)


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(
    ("form", "thoughts", "control", "plain"),
    [
        (None, None, "ab{}[]c", SAID),
        (None, ThoughtStart.TAGGED, "<think>a</think>b{}[]c", SAID),
        (None, ThoughtStart.OPEN, "<think>a</think>b{}[]c", SAID),
        (ToolCallFormat.TAGGED, None, "ab<tool_call>{}</tool_call>[]c", SAID),
        (ToolCallFormat.ARRAY, None, "ab{}[]c", SAID.replace("[TOOL_CALLS]", "")),
        (ToolCallFormat.OBJECT, None, "ab{}[]c", SAID.replace("<|python_tag|>", "")),
        (ToolCallFormat.TAGGED, ThoughtStart.TAGGED, "<think>a</think>b<tool_call>{}</tool_call>[]c", SAID),
    ],
)
def test_what_is_looked_for_shows_and_nothing_else(
    tmp_path: Path,
    is_special: bool,
    form: ToolCallFormat | None,
    thoughts: ThoughtStart | None,
    control: str,
    plain: str,
) -> None:
    loaded = tokenizer(tmp_path, is_special)
    request = AdmittedRequest(
        request_id="r",
        prompt_token_ids=loaded.encode("hi", add_special_tokens=False),
        sampling=RequestSampling(),
        max_new_tokens=100,
        stop_token_ids=frozenset((1,)),
        tool_call_format=form,
        thoughts=thoughts,
    )
    output = OutputText(loaded, request)
    pieces = [output.push((index,)).text for index in loaded.encode(SAID, add_special_tokens=False)]
    assert "".join([*pieces, output.finish().text]) == (control if is_special else plain)
