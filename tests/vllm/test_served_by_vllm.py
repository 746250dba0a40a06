"""The real vLLM over two stages: one start that answers, is measured, goes on from ids, and loses a worker.

The tests of this file share the start and run in order; the last but one ends it. `make test-vllm` runs them.
"""

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

import stageline_api
import stageline_vllm
from processes.repository_files import ROOT
from processes.vllm_served import Served, served_by_vllm, vllm_python
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt
from stageline_runtime.metric_names import STAGE_METRICS
from stageline_vllm.plugin_path import write_plugin_path
from stageline_vllm.versions import installed_vllm, require_supported

pytestmark = pytest.mark.timeout(3600)
STATES = (
    "stageline_stage_busy_seconds_total",
    "stageline_stage_wait_seconds_total",
    "stageline_stage_idle_seconds_total",
)
WALL = ("stageline_stage_wall_seconds_total",)
PROMPT = (504, 3575, 282, 4649, 314)
"""`The capital of France is`."""
EXPRESSION = r" (London|Paris|Rome), [0-9]{4}\."
NUMBERS = itertools.count()


class Answer(NamedTuple):
    text: str
    token_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by_vllm(tmp_path_factory.mktemp("vllm")) as running:
        yield running


def generated(served: Served, sampling: SamplingParams, given: tuple[int, ...] = ()) -> Answer:
    """What the engine streams for the prompt, from its beginning or from behind the tokens `given`."""
    request = GenerateRequest(
        request_id=f"asked-{next(NUMBERS)}",
        prompt=TokenPrompt(token_ids=PROMPT),
        sampling=sampling,
        generated_token_ids=given,
    )
    url = f"http://{served.stage_address(0)}:8000/v1/generate"
    answer = httpx.post(url, content=request.model_dump_json(), timeout=300.0, trust_env=False)
    assert answer.status_code == httpx.codes.OK, f"{answer.text}\n{served.logs()}"
    events = [json.loads(line) for line in answer.text.splitlines() if line]
    assert events[-1]["type"] == "finished", (events[-1], served.logs())
    deltas = [event for event in events if event["type"] == "delta"]
    return Answer("".join(one["text"] for one in deltas), tuple(i for one in deltas for i in one["token_ids"]))


def test_every_name_inside_vllm_that_we_use_is_there_and_looks_as_we_know_it(tmp_path: Path) -> None:
    interpreter = vllm_python()
    installed = installed_vllm(interpreter)
    require_supported(installed)
    paths = [str(Path(str(one.__file__)).parent.parent) for one in (stageline_vllm, stageline_api)]
    done = subprocess.run(
        [str(interpreter), "-m", "stageline_vllm.seams"],
        env={**os.environ, "PYTHONPATH": ":".join([str(write_plugin_path(tmp_path / "path", installed)), *paths])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


ARGUMENTS = """
import json, logging
logging.disable(logging.CRITICAL)
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps([name for action in actions for name in action.option_strings]))
"""


def test_every_argument_of_vllm_was_looked_at(tmp_path: Path) -> None:
    """One that a new version brings is passed on until somebody decides: here is where it shows."""
    interpreter = vllm_python()
    path = write_plugin_path(tmp_path / "path", installed_vllm(interpreter))
    done = subprocess.run(
        [str(interpreter), "-c", ARGUMENTS],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((ROOT / "tests/vllm_engine/recorded/serve_arguments.json").read_text())
    assert set(json.loads(done.stdout.splitlines()[-1])) == {*record["refused"], *record["passed"]}


def test_the_capital_of_france_is_paris(served: Served) -> None:
    assert "Paris" in served.capital_of_france()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5, seed=9, max_tokens=16, ignore_eos=True),
    ],
    ids=["greedy", "sampled", "restricted and penalised"],
)
def test_an_answer_goes_on_from_its_tokens_as_it_would_have(served: Served, sampling: SamplingParams) -> None:
    """vLLM by itself continues greedy ones only: its noise begins anew with each request."""
    whole = generated(served, sampling)
    assert len(whole.token_ids) == 16, whole
    assert whole == generated(served, sampling)
    rest = generated(served, sampling, whole.token_ids[:6])
    assert whole.token_ids[6:] == rest.token_ids


def test_a_guided_answer_matches_its_expression_and_goes_on_from_its_tokens(served: Served) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=32, regex=EXPRESSION)
    whole = generated(served, sampling)
    assert re.fullmatch(EXPRESSION, whole.text), whole
    rest = generated(served, sampling, whole.token_ids[:3])
    assert whole.token_ids[3:] == rest.token_ids, whole


def total(samples: dict[str, dict[str, float]], names: tuple[str, ...]) -> float:
    return sum(sum(samples[name].values()) for name in names)


def test_each_stages_seconds_sum_to_wall_and_its_series_are_those_of_any_stage(served: Served) -> None:
    for stage in (0, 1):
        began, earlier = time.monotonic(), served.samples(stage)
        working = time.monotonic()
        generated(served, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        worked, samples = time.monotonic(), served.samples(stage)
        ended = time.monotonic()
        for names in (STATES, WALL):
            counted = total(samples, names) - total(earlier, names)
            assert worked - working <= counted <= ended - began, (names, "no other clock's time")
        assert total(samples, STATES) == pytest.approx(total(samples, WALL), abs=1e-3)
        steps = samples["stageline_stage_steps_total"]
        assert sum(steps.values()) > 16, steps
        page = served.stage_page(stage, "metrics")
        missing = [one.name for one in STAGE_METRICS if f"# TYPE {one.family}" not in page]
        assert missing == [], page


def test_a_killed_worker_is_noticed_in_two_seconds_though_nobody_asks_and_its_cause_is_named(served: Served) -> None:
    """vLLM by itself goes on answering 200 to health checks until the next request, and then for minutes."""
    noticed = served.kill_worker(1)
    failure = served.failures()[0]
    assert (failure["failureClass"], failure["stage"]) == ("Killed", 1), served.failures()
    assert noticed.is_in_time, (noticed, failure, served.logs())


@pytest.mark.thorough
def test_the_group_that_was_lost_while_idle_comes_back_by_itself(served: Served) -> None:
    """One more start of more than a minute, so only with `ARGS=all`."""
    served.wait_back()
    assert "Paris" in served.capital_of_france()
    assert [failure["failureClass"] for failure in served.failures()] == ["Killed"], served.failures()
