"""The main job as a person does it: `stageline up examples/smollm2.yaml`, then the pages' own snippets against it.

One real SmolLM2 over two real stage processes behind the real gateway; the tests share it and run in order of the file.
"""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from processes.free_ports import free_port
from processes.page_commands import blocks, commands
from processes.serving_command import ServingCommand, descendants, run_stageline, serving, wait_gone

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2.yaml"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def served(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingCommand]:
    with serving(EXAMPLE, tmp_path_factory.mktemp("up"), smollm2_dir.parent) as command:
        command.wait_serving()
        yield command


@pytest.fixture
def client(served: ServingCommand) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_it_says_where_it_serves_and_how_to_ask(served: ServingCommand) -> None:
    for said in (served.url, "curl ", "from openai import OpenAI"):
        served.wait_for(said)


def test_the_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or ""), answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_comes_in_pieces_and_equals_the_whole_answer(client: openai.OpenAI) -> None:
    request = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    whole = client.chat.completions.create(**request).choices[0].message.content  # type: ignore[call-overload]
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request)  # type: ignore[call-overload]
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == whole
    # Seven tokens; what a busy machine lets come together is one piece.
    assert len(pieces) > 1, pieces
    assert chunks[-1].usage.completion_tokens > 3


def test_the_pages_python_snippet_runs_as_it_stands(served: ServingCommand) -> None:
    (block,) = blocks("docs/quickstart-local.md", "python")
    snippet = block.replace("127.0.0.1:8080", f"127.0.0.1:{served.port}")
    result = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")
def test_the_readmes_curl_line_runs_as_it_stands(served: ServingCommand) -> None:
    (command,) = [each for each in commands("README.md") if each.startswith("curl ") and '"smollm2"' in each]
    line = command.replace("127.0.0.1:8080", f"127.0.0.1:{served.port}")
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def test_every_stage_exports_seconds_that_sum_to_wall(served: ServingCommand, client: openai.OpenAI) -> None:
    client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=32, temperature=0)
    addresses = sorted(set(re.findall(r"127\.\d+\.\d+\.\d+", "\n".join(environment_of(served)))))
    stages = [address for address in addresses if reachable(f"http://{address}:9100/metrics")]
    assert len(stages) == 2, addresses
    for address in stages:
        seconds = dict.fromkeys(("busy", "wait", "idle", "wall"), 0.0)
        text = httpx.get(f"http://{address}:9100/metrics", timeout=60).text
        for family in text_string_to_metric_families(text):
            for state in seconds:
                if family.name == f"stageline_stage_{state}_seconds":
                    seconds[state] += sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
        spent = seconds["busy"] + seconds["wait"] + seconds["idle"]
        assert seconds["busy"] > 0, text
        assert spent == pytest.approx(seconds["wall"], rel=0.01), seconds


def test_the_gateway_exports_the_times_a_user_feels(served: ServingCommand) -> None:
    found = re.search(r"admin on (http://\S+)", next(served.state_dir.rglob("gateway.log")).read_text())
    assert found, "the gateway logs its admin port"
    names = {
        family.name for family in text_string_to_metric_families(httpx.get(f"{found[1]}/metrics", timeout=60).text)
    }
    expected = {
        "stageline_time_to_first_token_seconds",
        "stageline_request_time_per_output_token_seconds",
        "stageline_inter_token_latency_seconds",
        "stageline_e2e_request_latency_seconds",
    }
    assert expected <= names, names


def test_ctrl_c_leaves_no_process_and_no_port_behind(served: ServingCommand) -> None:
    children = descendants(served.process.pid)
    assert len(children) >= 4, children  # two stages, an engine, a gateway
    assert served.end(signal.SIGINT) == 0, served.output()
    wait_gone(children)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{served.url}/healthz", timeout=60)
    assert "Traceback" not in served.output()


@pytest.mark.thorough
def test_detach_serves_in_the_background_until_down(smollm2_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    state = str(tmp_path / "state")
    cache = str(smollm2_dir.parent)
    up = run_stageline("up", str(EXAMPLE), "--detach", "--port", str(port), "--state-dir", state, "--cache", cache)
    try:
        assert up.returncode == 0, up.stderr
        assert "stageline down" in up.stdout + up.stderr
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).json()
        assert [model["id"] for model in models["data"]] == ["smollm2"]
        again = run_stageline("up", str(EXAMPLE), "--state-dir", state, "--cache", cache)
        assert again.returncode != 0
        assert "Traceback" not in again.stderr
    finally:
        down = run_stageline("down", str(EXAMPLE), "--state-dir", state)
    assert down.returncode == 0, down.stderr
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60)
    assert run_stageline("down", "--state-dir", state).returncode == 0


def environment_of(served: ServingCommand) -> list[str]:
    """Environment and command lines of the children: where the stages' addresses stand."""
    texts = []
    for pid in descendants(served.process.pid):
        try:
            texts.append(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return texts


def reachable(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60).status_code == 200
    except httpx.ConnectError:
        return False
