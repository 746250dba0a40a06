"""The engine's spans of a real group, as a collector gets them: under whoever asks, with the stages' own steps."""

import json
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes.gateway_harness import MODEL, eventually, running_gateway
from processes.running_group import RunningGroup, running_group
from processes.span_collector import ReceivedSpan, SpanCollector, span_collector
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt
from stageline_gateway.settings import GatewaySettings

CLIENT_SPAN = "00f067aa0ba902b7"
PROMPT = tuple(range(5, 45))
CHUNK = 16
TOKENS = 6
SLOW_STAGE = ("-m", "stageline_bench.runtime.group.paced_stage", "0.1", "0")
"""300 tokens of two of them take a minute, so that no answer ends before its group is lost."""
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanCollector]:
    """Where the environment of processes to come sends spans."""
    with span_collector() as collector:
        set_collector(monkeypatch, collector.url)
        yield collector


def set_collector(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)


@contextmanager
def group_of_two(directory: Path, model: Path, **more: Any) -> Iterator[RunningGroup]:
    config: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": CHUNK}
    with running_group(directory / "group", model, 2, **(config | more)) as group:
        yield group


def trace_id(number: int) -> str:
    return f"{number:032x}"


def ask(group: RunningGroup, number: int, *, flags: str = "01", tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    """One answer, asked for within a trace of its own; returns its last event."""
    request = GenerateRequest(
        request_id=f"request-{number}",
        prompt=TokenPrompt(token_ids=PROMPT),
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        traceparent=f"00-{trace_id(number)}-{CLIENT_SPAN}-{flags}",
        **fields,
    )
    answer = httpx.post(f"{group.url}/v1/generate", content=request.to_json(), timeout=120.0)
    assert answer.status_code == 200, answer.text
    return dict(json.loads(answer.text.splitlines()[-1]))


def end_orderly(group: RunningGroup) -> None:
    group.processes["engine"].send_signal(signal.SIGTERM)
    assert group.wait_ended("engine", 60) == 0, group.account()


def wait_sent(collector: SpanCollector, *last: str) -> None:
    """Until spans of these names have come, the last ones there are: who sends them waits for that only shortly."""

    def came() -> Counter[str]:
        return Counter(span.name for span in collector.all_spans())

    eventually(lambda: came() >= Counter(last), lambda: f"{came()} without {last}")


def test_a_request_has_spans_of_its_wait_its_prompt_its_tokens_and_each_stage(
    tmp_path: Path, tiny_llama: Path, collector: SpanCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with group_of_two(tmp_path, tiny_llama) as group:
        ask(group, 1, generated_token_ids=(7, 8))
        ask(group, 2, flags="00")
        ask(group, 3)
        assert collector.bodies == []
        # What waits is sent by an engine that was told to end.
        end_orderly(group)
    wait_sent(collector, "engine.request", "engine.request")
    assert {span.trace for span in collector.all_spans()} == {trace_id(1), trace_id(3)}, "2's client keeps no trace"
    spans: dict[str, list[ReceivedSpan]] = {}
    for span in collector.trace(trace_id(1)):
        spans.setdefault(span.name, []).append(span)
    (request,) = spans["engine.request"]
    (queue,), (prefill,), (decode,) = spans["engine.queue"], spans["engine.prefill"], spans["engine.decode"]
    assert request.parent == CLIENT_SPAN
    assert {queue.parent, prefill.parent, decode.parent} == {request.span}
    assert request.begin <= queue.begin <= queue.end == prefill.begin < prefill.end == decode.begin < decode.end
    assert decode.end <= request.end
    check_attributes(request, prefill)
    check_steps(spans["stage.step"], prefill, decode)


def check_attributes(request: ReceivedSpan, prefill: ReceivedSpan) -> None:
    expected = {
        "gen_ai.request.model": "tiny",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": TOKENS - 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "stageline.request_id": "request-1",
        "stageline.resumed_tokens": 2,
        "stageline.preemptions": 0,
    }
    assert {name: request.attributes.get(name) for name in expected} == expected
    assert request.resource["service.name"] == "stageline-engine"
    assert request.resource["stageline.incarnation"] == "1"
    assert request.events == ("first token",)
    assert not request.is_error
    assert prefill.attributes == {"stageline.slot": 0, "stageline.cohort": 0}


def check_steps(steps: list[ReceivedSpan], prefill: ReceivedSpan, decode: ReceivedSpan) -> None:
    """42 inputs in chunks of 16 are three plans, and then comes the first decode, on each of two stages."""
    of_prefill = [step for step in steps if step.parent == prefill.span]
    of_decode = [step for step in steps if step.parent == decode.span]
    assert [step.attributes["stageline.stage"] for step in of_decode] == [0, 1]
    by_plan: dict[int, list[ReceivedSpan]] = {}
    for step in of_prefill:
        by_plan.setdefault(step.attributes["stageline.plan"], []).append(step)
    assert len(by_plan) == 3, steps
    for first, second in by_plan.values():
        assert (first.attributes["stageline.stage"], second.attributes["stageline.stage"]) == (0, 1)
        assert first.begin < first.end
        assert first.begin < second.begin < second.end
        assert first.attributes["stageline.busy_seconds"] > 0
    assert all(prefill.begin <= step.begin and step.end <= prefill.end for step in of_prefill), (prefill, of_prefill)


def test_a_resumed_answer_is_one_trace_of_the_gateway_and_both_engines(
    tmp_path: Path, tiny_llama: Path, collector: SpanCollector
) -> None:
    """Under one span of the client's own: the gateway's, its two runs, and what each of the engines did of them."""
    body = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    body["logit_bias"] = {str(3 + 67): 10}  # a letter, which paced stages would not say by themselves
    headers = {"traceparent": f"00-{trace_id(4)}-{CLIENT_SPAN}-01"}
    with (
        group_of_two(tmp_path / "first", tiny_llama, stage_command=SLOW_STAGE) as first,
        group_of_two(tmp_path / "second", tiny_llama, index=1) as second,
        running_gateway(GatewaySettings(tmp_path / "endpoints.json")) as gateway,
    ):
        groups = (first.endpoint, second.endpoint)
        gateway.serve(groups[0])
        with gateway.http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as answer:
            lines = answer.iter_lines()
            assert any('"text"' in line for line in lines)
            first.kill("stage-1")
            gateway.serve(*groups)
            rest = list(lines)
        assert "data: [DONE]" in rest, rest[-3:]
        first.wait_ended("engine", 60)
        end_orderly(second)
    wait_sent(collector, "POST /v1/completions", "engine.request", "engine.request")
    found = collector.trace(trace_id(4))
    (whole,) = [span for span in found if span.name == "POST /v1/completions"]
    lost, *others, went_on = collector.runs(trace_id(4))
    by_run = {span.parent: span for span in found if span.name == "engine.request"}
    assert whole.parent == CLIENT_SPAN
    assert {lost.parent, went_on.parent} == {whole.span}
    assert not went_on.is_error, went_on
    assert all(run.is_error for run in (lost, *others)), "between them the first group may have been tried again"
    assert set(by_run) == {lost.span, went_on.span}, found
    begun, continued = by_run[lost.span], by_run[went_on.span]
    assert (begun.is_error, begun.attributes["error.type"]) == (True, "group_lost")
    assert not continued.is_error
    resumed = continued.attributes["stageline.resumed_tokens"]
    assert 0 < resumed == went_on.attributes["stageline.resumed_tokens"] <= begun.attributes[OUTPUT_TOKENS]
    assert resumed + continued.attributes[OUTPUT_TOKENS] == 300
    assert {span.attributes["stageline.stage"] for span in found if span.name == "stage.step"} == {0, 1}


def test_a_collector_that_is_down_costs_spans_alone(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        set_collector(monkeypatch, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with group_of_two(tmp_path, tiny_llama) as group:  # connections are taken, and nothing is ever answered
            for number in range(6, 12):
                assert ask(group, number)["completion_tokens"] == TOKENS
            end_orderly(group)
