"""The rest of what the real vLLM must do: four starts of minutes, so only by `make test-vllm ARGS=all`.

All but the last two tests share a start, and run in order.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from processes.serving_command import descendants, wait_gone
from processes.vllm_served import Served, served_by_vllm

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(4 * 3600)]
STEP_SECONDS = 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by_vllm(tmp_path_factory.mktemp("vllm")) as running:
        yield running


def test_the_openai_client_streams_what_it_gets_at_once(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.command.url}/v1", api_key="none", timeout=300)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 3, pieces
    assert "".join(pieces) == served.chat("What is the capital of France?", max_tokens=24)


def test_decodes_are_spread_over_the_stages(served: Served) -> None:
    """16 answers of 32 tokens: in one cohort they would be 32 steps of 16, evened out they are 64 of 8."""
    before = served.samples(0)["stageline_stage_steps_total"]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: served.chat(f"Count from {n}.", max_tokens=32, ignore_eos=True), range(16)))
    after = served.samples(0)["stageline_stage_steps_total"]
    decodes = sum(value - before[labels] for labels, value in after.items() if 'kind="decode"' in labels)
    assert decodes >= 48, (before, after)


def steps_of(served: Served, stage: int) -> float:
    return sum(served.samples(stage)["stageline_stage_steps_total"].values())


def states_of(served: Served, stage: int) -> float:
    """Seconds in all states of a stage."""
    samples = served.samples(stage)
    return sum(sum(samples[f"stageline_stage_{state}_seconds_total"].values()) for state in ("busy", "wait", "idle"))


def test_a_worker_killed_under_load_is_noticed_and_named_and_the_group_comes_back(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        for number in range(4):
            pool.submit(served.chat, f"Write a long story about {number} ships.", max_tokens=400, ignore_eos=True)
        steps = steps_of(served, 1)
        served.wait("decoding", lambda: steps_of(served, 1) > steps + 20, timeout_seconds=600)
        noticed = served.kill_worker(1)
        failure = served.failures()[0]
        assert (failure["failureClass"], failure["stage"]) == ("Killed", 1), served.failures()
        assert noticed.is_in_time, (noticed, failure, served.logs())
    served.wait_back()
    assert "Paris" in served.capital_of_france()


def test_ending_it_drains_and_leaves_nothing_behind(served: Served) -> None:
    children, failed = descendants(served.command.process.pid), len(served.failures())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.chat, "Count to twenty.", max_tokens=48, ignore_eos=True)
        steps = steps_of(served, 1)
        served.wait("decoding", lambda: steps_of(served, 1) > steps + 4, timeout_seconds=600)
        assert served.command.end() == 0, served.logs()
        assert answer.result()
    wait_gone(children)
    assert len(served.failures()) == failed, served.failures()


def test_a_stopped_worker_is_found_by_the_watchdog_and_named(tmp_path: Path) -> None:
    """It still has its sockets: only that its steps don't advance gives it away."""
    with served_by_vllm(tmp_path, {"stepSeconds": STEP_SECONDS}) as served, ThreadPoolExecutor(1) as pool:
        pool.submit(served.chat, "Write a long story about a lighthouse.", max_tokens=400, ignore_eos=True)
        steps = steps_of(served, 1)
        served.wait("decoding", lambda: steps_of(served, 1) > steps + 20, timeout_seconds=600)
        worker = served.worker_pid(1)
        os.kill(worker, signal.SIGSTOP)
        try:
            seconds = served.wait("failed", lambda: bool(served.failures()), timeout_seconds=STEP_SECONDS * 4)
        finally:
            os.kill(worker, signal.SIGCONT)
        failure = served.failures()[0]
        assert (failure["failureClass"], failure["stage"]) == ("StepTimeout", 1), served.failures()
        assert seconds <= STEP_SECONDS + 10, (seconds, served.failures())


def test_three_workers_share_the_heads_of_one_stage(tmp_path: Path) -> None:
    """vLLM's tensor parallelism inside one pod: over several pods its own code breaks on a CPU. SmolLM2 has 9 heads."""
    with served_by_vllm(tmp_path, parallelism={"pipeline": 1, "tensor": 3}) as served:
        assert "Paris" in served.capital_of_france()
        assert len(served.worker_pids(0)) == 3
        before, began = states_of(served, 0), time.monotonic()
        served.chat("Count from 1.", max_tokens=16, ignore_eos=True)
        spent, wall = states_of(served, 0) - before, time.monotonic() - began
        assert spent == pytest.approx(wall, abs=0.2), served.samples(0)
        served.kill_worker(0, rank=2)
        failure = served.failures()[0]
        assert (failure["failureClass"], failure["stage"]) == ("Killed", 0), served.failures()
