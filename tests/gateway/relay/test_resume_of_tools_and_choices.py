"""Calls of tools and answers of several choices, broken off after every token: what the client gets is the same.

Both engines run one script: what begins is killed in mid-answer, what is continued goes on from the ids it is handed.
Each answer is compared with that of an engine that nothing happens to.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Drop, Say, ScriptedEngine, Step
from stageline_api.engine_http import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
    ToolCallFormat,
    TopLogprob,
)
from stageline_gateway.settings import GatewaySettings

WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Rain in Oslo?"}], "tools": [WEATHER, TIME]}
TAGGED = 'Let me see. <tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
LISTED = '[{"name":"time","arguments":{}}, {"name":"weather","arguments":{"place":"Oslo"}}]'
NAMED = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
TOOLS: dict[str, tuple[str, ToolCallFormat | None, dict[str, Any]]] = {
    "auto": (TAGGED, ToolCallFormat.TAGGED, {}),
    "required": (LISTED, None, {"tool_choice": "required"}),
    "named": ('{"place": "Oslo", "days": 3}', None, NAMED),
}
PIECE_CHARACTERS = 6
CHOICES = ("The heron waits.", "Rain, rain and rain again.", "")
RESUMES = "stageline_gateway_resumes_total"
Cut = Callable[[GenerateRequest], int | None]


def token(index: int, text: str) -> TokenLogprob:
    """The token of a piece, with one other that might have been."""
    own = tuple(text.encode())
    other = TopLogprob(token_id=index + 500, bytes=own[::-1], logprob=-2.5 - index)
    return TokenLogprob(token_id=index, bytes=own, logprob=-0.5 - index, top_logprobs=(other,))


def from_ids(request: GenerateRequest, text: str, cut: int | None, form: ToolCallFormat | None = None) -> list[Step]:
    """`text` in tokens of some characters, from the first that wasn't generated; broken off after token `cut`."""
    pieces = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]
    begun = len(request.generated_token_ids)
    assert request.generated_token_ids == tuple(range(begun))
    assert (request.generated_characters or 0) == len("".join(pieces[:begun]))
    logprobs = request.sampling.top_logprobs is not None
    deltas: list[Step] = [
        Say(Delta(text=piece, token_ids=(index,), logprobs=(token(index, piece),) if logprobs else ()))
        for index, piece in enumerate(pieces)
    ]
    admitted = Say(Admitted(prompt_tokens=3, tool_call_format=form))
    if cut is not None and not begun:
        return [admitted, *deltas[:cut], Drop()]
    return [
        admitted,
        *deltas[begun:],
        Say(Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=len(pieces))),
    ]


def num_tokens(text: str) -> int:
    return -(-len(text) // PIECE_CHARACTERS)


@pytest.fixture
def pair(tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine) -> Any:
    """A gateway before two groups."""
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", resume_window_seconds=60)) as gateway:
        gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
        yield gateway


def chunks_of(body: str) -> list[dict[str, Any]]:
    """The data of a stream that must have ended well."""
    data = [block.removeprefix("data: ") for block in body.split("\n\n") if block.startswith("data: ")]
    assert data[-1] == "[DONE]", body
    chunks = [json.loads(one) for one in data[:-1]]
    assert not [one for one in chunks if "error" in one], body
    return chunks


def calls_of(gateway: RunningGateway, asked: dict[str, Any], stream: bool) -> Any:
    """Content, calls without their ids, and finish reason."""
    if not stream:
        [choice] = gateway.http.post("/v1/chat/completions", json=asked).json()["choices"]
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in choice["message"]["tool_calls"]]
        return choice["message"]["content"], calls, choice["finish_reason"]
    content, named, reason = "", dict[int, list[str]](), None
    for chunk in chunks_of(gateway.http.post("/v1/chat/completions", json=asked | {"stream": True}).text):
        [choice] = chunk["choices"]
        content += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].get("tool_calls") or []:
            one = named.setdefault(call["index"], [call["function"].get("name", ""), ""])
            one[1] += call["function"].get("arguments") or ""
    return content or None, [(name, arguments) for name, arguments in named.values()], reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", TOOLS)
def test_calls_of_tools_are_the_same_wherever_the_engine_dies(
    pair: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, kind: str, stream: bool
) -> None:
    text, form, extra = TOOLS[kind]
    engine.script = other_engine.script = lambda request: from_ids(request, text, None, form)
    undisturbed = calls_of(pair, ASK | extra, stream)
    assert undisturbed[1], "there are calls"
    assert undisturbed[2] == "tool_calls"
    for cut in range(1, num_tokens(text) + 1):
        engine.script = other_engine.script = lambda request, cut=cut: from_ids(request, text, cut, form)  # type: ignore[misc]
        assert calls_of(pair, ASK | extra, stream) == undisturbed, f"killed after token {cut}"
    assert pair.sample(RESUMES, model_name=MODEL, outcome="resumed") == num_tokens(text)


def summary(gateway: RunningGateway, path: str, asked: dict[str, Any], stream: bool) -> tuple[Any, dict[str, int]]:
    """All that the client learns of its choices, and usage."""
    if not stream:
        answered = gateway.http.post(path, json=asked).json()
        return answered["choices"], answered["usage"]
    chosen: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in chunks_of(gateway.http.post(path, json=asked | options).text):
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            one = chosen.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": []})
            one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            one["logprobs"] += [choice["logprobs"]] if choice["logprobs"] else []
            one["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    usage.pop("stageline_resumes", None)
    return chosen, usage


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
MANY: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x", "logprobs": 1, "n": len(CHOICES)},
    "/v1/chat/completions": {"model": MODEL, "n": len(CHOICES)} | MESSAGES,
}
CUTS: dict[str, Cut] = {
    "the first": lambda request: 1 if request.sampling.choice == 0 else None,
    "the second": lambda request: 3 if request.sampling.choice == 1 else None,
    "each at another token": lambda request: (2, 4, 0)[request.sampling.choice],
    "all at their ends": lambda request: num_tokens(CHOICES[request.sampling.choice]),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", MANY)
def test_choices_usage_and_log_probabilities_are_exact_wherever_engines_die(
    pair: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, path: str, stream: bool
) -> None:
    def run(cut: Cut) -> tuple[Any, dict[str, int]]:
        def script(request: GenerateRequest) -> list[Step]:
            is_first = request.request_id.count(".") == 0  # later runs of a request have a number behind a dot
            return from_ids(request, CHOICES[request.sampling.choice], cut(request) if is_first else None)

        engine.script = other_engine.script = script
        return summary(pair, path, MANY[path], stream)

    undisturbed, usage = run(lambda _: None)
    assert usage["completion_tokens"] == sum(map(num_tokens, CHOICES))
    assert usage["prompt_tokens"] == 3, "one prompt, however many choices"
    for name, cut in CUTS.items():
        assert run(cut) == (undisturbed, usage), f"killed: {name}"
    resumed = pair.sample(RESUMES, model_name=MODEL, outcome="resumed")
    moved = pair.sample(RESUMES, model_name=MODEL, outcome="moved")
    assert (resumed, moved) == (6, 2), "an empty choice has nothing to continue: it is only moved"
