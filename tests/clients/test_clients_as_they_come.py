"""Clients that nobody here wrote, as they install, against a real group behind the gateway; `make test-clients`.

Each runs as a program of its own in their environment (`scripts/clients-environment`), so that none of their pins
touches ours. A client that is not installed there is skipped by name.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oracles.tiny_models import write_tiny_llama
from processes.gateway_harness import running_gateway
from processes.running_group import running_group
from stageline_gateway.settings import GatewaySettings

pytestmark = pytest.mark.timeout(900)
PROGRAMS = Path(__file__).with_name("programs")
PYTHON = Path(os.environ.get("STAGELINE_CLIENTS_PYTHON", "absent"))
if not PYTHON.exists():
    pytest.skip("needs the clients' environment: make test-clients", allow_module_level=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, with a context for the long prompts that some clients make."""
    return write_tiny_llama(tmp_path_factory.mktemp("model"), context_length=4096)


@pytest.fixture(scope="module")
def base_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway before a group of two stages."""
    directory = tmp_path_factory.mktemp("served")
    settings = GatewaySettings(endpoints_path=directory / "endpoints.json")
    with (
        running_group(directory / "group", model_dir, 2, dtype="float32") as served,
        running_gateway(settings) as gateway,
    ):
        gateway.serve(served.endpoint)
        yield gateway.url


def run(base_url: str, *arguments: str, directory: Path | None = None, **told_too: str) -> str:
    """What a program of the clients' environment prints."""
    told = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    told |= {"BASE_URL": base_url, "NO_PROXY": "*", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused"} | told_too
    done = subprocess.run(arguments, env=told, cwd=directory, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def require(module: str) -> None:
    """Skip unless the clients' environment has `module`."""
    found = subprocess.run(
        [PYTHON, "-c", f"import importlib.util as u; exit(u.find_spec({module!r}) is None)"], check=False
    )
    if found.returncode:
        pytest.skip(f"{module} is not installed in the clients' environment")


def findings(base_url: str, client: str, module: str) -> dict[str, Any]:
    require(module)
    printed = run(base_url, str(PYTHON), str(PROGRAMS / f"ask_{client}.py"))
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


def test_openai(base_url: str) -> None:
    found = findings(base_url, "openai", "openai")
    assert found["ignored"] == "metadata,store,messages.name"
    assert found["whole"] == found["streamed"] != ""
    assert found["texts"] == ["one", "two"]
    assert found["choice"] in ("red", "green")
    assert found["response"]
    assert found["last_event"] in ("response.completed", "response.incomplete")
    call, index = "messages.tool_calls.function.parsed_arguments", "messages.tool_calls.index"
    assert found["second_turns"] == {
        "streamed": "",
        "parsed": "messages.parsed",
        "streamed call": f"{index},{call}",
        "parsed call": call,
        "cut call": "",
    }
    assert found["second_response"] in ("completed", "incomplete")
    for arguments in found["cut"]:
        with pytest.raises(ValueError, match=r"."):
            json.loads(arguments)
    assert found["after_cut"] in ("completed", "incomplete")


def test_anthropic(base_url: str) -> None:
    found = findings(base_url, "anthropic", "anthropic")
    assert found["whole"] == found["streamed"] != ""
    assert (found["stop_reason"], found["output_tokens"]) == ("max_tokens", 6)
    assert found["call"] == ["tool_use", "place", ["town"]]
    assert found["second"] in ("max_tokens", "end_turn")
    assert found["after_cut"] == [["max_tokens", 1, "assistant"], ["max_tokens", 0, "assistant"]]
    assert found["refusal"] == "not_found_error"
    counted, read = found["counted"]
    assert counted == read > 0


def test_litellm(base_url: str) -> None:
    found = findings(base_url, "litellm", "litellm")
    assert found["whole"] == found["streamed"] != ""
    assert found["tokens"] == 6
    assert len(found["second_turns"]) == 4


def test_langchain(base_url: str) -> None:
    found = findings(base_url, "langchain", "langchain_openai")
    assert found["whole"] == found["streamed"] != ""
    assert (found["structured"], found["called"]) == (True, "Town")
    assert found["second_turns"] == [True, True]


def test_instructor(base_url: str) -> None:
    assert findings(base_url, "instructor", "instructor") == {"names": [True, True]}


def test_lm_eval(base_url: str, tmp_path: Path) -> None:
    """A local task of two questions, answered by text."""
    require("lm_eval")
    (tmp_path / "questions.jsonl").write_text('{"q": "2+2?", "a": "4"}\n{"q": "1+1?", "a": "2"}\n')
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: questions.jsonl}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['END'], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]\n"
    )
    url = f"{base_url}/v1/chat/completions"
    model = f"model=tiny,base_url={url},num_concurrent=2,tokenized_requests=False,tokenizer_backend=None"
    command = [str(PYTHON), "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", model]
    command += ["--tasks", "sums", "--include_path", str(tmp_path), "--apply_chat_template"]
    assert "exact_match" in run(base_url, *command, "--output_path", str(tmp_path / "out"), directory=tmp_path)


def test_lm_eval_by_log_probabilities(base_url: str, model_dir: Path, tmp_path: Path) -> None:
    """A local task of two questions with two choices each: the prompts' log probabilities decide, as ids and echoed."""
    require("lm_eval")
    require("transformers")
    (tmp_path / "choices.jsonl").write_text('{"q": "2+2?", "a": 0}\n{"q": "1+1?", "a": 1}\n')
    (tmp_path / "choices.yaml").write_text(
        "task: choices\ndataset_path: json\ndataset_kwargs: {data_files: {test: choices.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: ['four', 'two']\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    model = f"model=tiny,base_url={base_url}/v1/completions,num_concurrent=2,tokenizer={model_dir}"
    command = [
        str(PYTHON),
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        model,
        "--tasks",
        "choices",
    ]
    printed = run(
        base_url, *command, "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), directory=tmp_path
    )
    assert "acc_norm" in printed


def test_aiperf(base_url: str, model_dir: Path, tmp_path: Path) -> None:
    """Twelve streamed chats, four at a time: every request is measured, and each answer has the tokens asked for."""
    require("aiperf")
    command = [str(PYTHON.with_name("aiperf")), "profile", "--model", "tiny", "--url", base_url, "--ui", "simple"]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(model_dir), "--use-server-token-count"]
    command += ["--request-count", "12", "--concurrency", "4", "--isl", "24", "--osl", "8", "--workers-max", "2"]
    command += ["--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(tmp_path / "out")]
    # Offline it takes a tokenizer's directory for a repository's name.
    printed = run(base_url, *command, directory=tmp_path, HF_HUB_OFFLINE="")
    (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == 12, printed[-4000:]
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0, printed[-4000:]
    assert found["output_sequence_length"]["avg"] == 8, printed[-4000:]
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0
