"""The real vLLM over two stages: one start that answers, is measured, goes on from ids, and loses a worker.

The tests of this file share the start and run in order; the last but one ends it. `make test-vllm` runs them.
"""

import itertools
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import stageline_api
import stageline_vllm
from processes.repository_files import ROOT
from processes.serving_command import engine_authorization
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
    headers = {"content-type": "application/json", "authorization": engine_authorization(served.command.process.pid)}
    answer = httpx.post(url, content=request.to_json(), headers=headers, timeout=300.0, trust_env=False)
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


def completion(served: Served, **options: object) -> list[dict[str, Any]]:
    """Choices of one answer by the gateway, in order."""
    body = {"model": "smollm2", "prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, **options}
    answer = httpx.post(f"{served.command.url}/v1/completions", json=body, timeout=300.0, trust_env=False)
    assert answer.status_code == httpx.codes.OK, f"{answer.text}\n{served.logs()}"
    return sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))


def test_a_bias_forces_a_token_and_a_list_holds_the_answer_to_its_own(served: Served) -> None:
    forced = SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True, logit_bias={PROMPT[1]: 100.0})
    assert generated(served, forced).token_ids == (PROMPT[1],) * 4
    allowed = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, allowed_token_ids=PROMPT)
    drawn = generated(served, allowed).token_ids
    assert set(drawn) <= set(PROMPT), drawn
    assert len(set(drawn)) > 1, drawn


def test_log_probabilities_are_of_the_tokens_that_were_taken(served: Served) -> None:
    (choice,) = completion(served, logprobs=3, ignore_eos=True)
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == 12, told
    assert "".join(told["tokens"]) == choice["text"]
    for taken, best in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        # Greedy: what was taken is the likeliest of the three.
        assert taken == pytest.approx(max(best.values()), abs=1e-5), told
        assert sum(math.exp(each) for each in best.values()) <= 1.0 + 1e-5, told


def test_choices_of_one_request_differ(served: Served) -> None:
    texts = [choice["text"] for choice in completion(served, n=3, temperature=1.2, seed=11, ignore_eos=True)]
    assert len(set(texts)) == 3, texts


def test_penalties_keep_an_answer_from_repeating_itself(served: Served) -> None:
    def commonest(**penalty: Any) -> int:
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, **penalty)
        ids = generated(served, sampling).token_ids
        return max(ids.count(each) for each in ids)

    free = commonest()
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert commonest(**penalty) < free, (penalty, free)


def test_an_answer_is_held_to_a_schema(served: Served) -> None:
    properties = {"city": {"type": "string", "maxLength": 12}, "is_large": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema, "strict": True}}
    text = served.chat("What is the capital of France?", response_format=wanted, max_tokens=64)
    found = json.loads(text)
    assert found.keys() == properties.keys(), text
    assert isinstance(found["is_large"], bool), text


def test_an_answer_waits_for_a_schema_that_takes_long_to_compile(served: Served) -> None:
    schema = {"type": "integer", "multipleOf": 80021, "minimum": 0}
    wanted = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}}
    text = served.chat("Which number?", response_format=wanted, max_tokens=16)
    assert text.isdigit(), text


def test_a_stop_string_ends_an_answer_before_itself(served: Served) -> None:
    (whole,) = completion(served, ignore_eos=True)
    words = whole["text"].split()
    assert len(words) > 3, whole
    (stopped,) = completion(served, ignore_eos=True, stop=words[2])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole["text"][: whole["text"].index(words[2])]


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
