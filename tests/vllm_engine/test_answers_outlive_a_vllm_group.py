"""Through the gateway, over two groups of vLLM: a group that dies in the middle of an answer changes no token of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes.engine_over_vllm import engine_over
from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.vllm_stand_in import StandIn, stand_in
from stageline_gateway.settings import GatewaySettings

SLOWLY = {"FAKE_VLLM_STEP_SECONDS": "0.2"}
"""A group dies in the middle of its answer, even if whoever kills it stands still for ten seconds."""
LENGTH = 60
BODY: dict[str, Any] = {"model": MODEL, "prompt": [5, 9, 33, 120], "max_tokens": LENGTH, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": BODY | {"temperature": 0},
    "sampled": BODY | {"temperature": 0.9, "seed": 11, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 2},
    "two choices": BODY | {"temperature": 1.0, "seed": 12, "n": 2},
}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway that waits for a group, and long for a busy machine."""
    settings = GatewaySettings(
        endpoints_path=tmp_path / "endpoints.json", probe_interval_seconds=0.05, hold_seconds=60,
        resume_window_seconds=60, most_losses=4,
    )  # fmt: skip
    with running_gateway(settings) as running:
        yield running


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[str]:
    """URL of the engine of the group that stays."""
    with stand_in(tmp_path / "spare") as vllm, engine_over(vllm) as url:
        yield url


def answer(events: list[dict[str, Any]]) -> dict[int, tuple[str, str | None, list[Any]]]:
    """By choice: its text, how it ended, its log probabilities."""
    told: dict[int, tuple[str, str | None, list[Any]]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, reason, logprobs = told.get(choice["index"], ("", None, []))
        listed = (choice.get("logprobs") or {}).get("tokens") or []
        reason = choice["finish_reason"] or reason
        told[choice["index"]] = (text + choice["text"], reason, logprobs + listed)
    return told


def stream(gateway: RunningGateway, body: dict[str, Any], dies: StandIn | None = None) -> list[dict[str, Any]]:
    """Events of one answer; after the tenth, `dies` is killed."""
    events: list[dict[str, Any]] = []
    with (
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response,
    ):
        assert response.status_code == 200, response.read().decode()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                assert "error" not in events[-1], events[-1]
                if len(events) == 10 and dies is not None:
                    dies.kill()
    return events


@pytest.mark.parametrize(
    "name", ["sampled", *(pytest.param(name, marks=pytest.mark.thorough) for name in ASKED if name != "sampled")]
)
def test_a_killed_group_changes_no_token(gateway: RunningGateway, spare: str, tmp_path: Path, name: str) -> None:
    gateway.serve(group(spare, 1))
    undisturbed = answer(stream(gateway, ASKED[name]))
    (tmp_path / "doomed").mkdir()
    with stand_in(tmp_path / "doomed", environment=SLOWLY) as doomed, engine_over(doomed) as url:
        first = group(url, 0)
        gateway.serve(first)
        # Only it can take the request; the other one is there by the time it dies.
        continued = answer(stream_while(gateway, ASKED[name], doomed, first, spare))
    assert continued == undisturbed
    assert gateway.sample("stageline_gateway_resumes_total", model_name=MODEL, outcome="resumed") >= 1, (
        gateway.samples()
    )


def stream_while(
    gateway: RunningGateway, body: dict[str, Any], doomed: StandIn, first: Any, spare: str
) -> list[dict[str, Any]]:
    class Dies(StandIn):
        def kill(self) -> None:
            gateway.serve(first, group(spare, 1))
            super().kill()

    return stream(gateway, body, Dies(doomed.model_dir, doomed.port, doomed.process, doomed.log_file))
