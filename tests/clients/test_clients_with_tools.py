"""Agents and client libraries of Node.js and of the JDK, as they install: each calls a tool over two turns.

Behind the gateway is an engine whose model plays its part (`processes.scripted_model`): no model of
a size for tests can be made to call the tools that an agent offers.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from processes.gateway_harness import RunningGateway, group, running_gateway
from processes.scripted_model import ScriptedModel, scripted_model
from stageline_gateway.settings import GatewaySettings

pytestmark = pytest.mark.timeout(900)
PROGRAMS = Path(__file__).with_name("programs")
NODE = Path(os.environ.get("STAGELINE_CLIENTS_NODE", "absent"))
SAID = "It said: wet in Oslo"
TOLD = "fortytwo"
"""What the command that the model has run prints."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedModel]:
    with scripted_model(tmp_path_factory.mktemp("model")) as model:
        yield model


@pytest.fixture(scope="module")
def base_url(model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = GatewaySettings(tmp_path_factory.mktemp("served") / "endpoints.json")
    with running_gateway(settings) as gateway:
        gateway.serve(group(model.url))
        yield gateway.url


def run(*command: str, directory: Path | None = None, **told_too: str) -> str:
    """What a program prints, which knows of no proxy."""
    told = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | {"NO_PROXY": "*"}
    done = subprocess.run(
        command,
        env=told | told_too,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def require(*packages: str) -> None:
    """Skip unless Node.js and these packages of its clients' environment are there."""
    if shutil.which("node") is None:
        pytest.skip("needs Node.js 20 or later with npm (Debian: apt-get install nodejs npm), then make test-clients")
    for package in packages:
        if not (NODE / "node_modules" / package).is_dir():
            pytest.skip(f"{package} is not installed in .clients-node; make test-clients tries that again")


def findings(base_url: str, program: str) -> Any:
    printed = run("node", str(PROGRAMS / program), BASE_URL=base_url, NODE_CLIENTS=str(NODE))
    return json.loads(printed.strip().splitlines()[-1])


def test_openai(base_url: str) -> None:
    require("openai")
    assert findings(base_url, "ask_openai.mjs") == {
        "call": {"town": "Oslo"},
        "second": "It said: wet",
        "runner": SAID,
        "response": "It said: wet",
        "ignored": "tools[web_search]",
    }


def test_anthropic(base_url: str) -> None:
    require("@anthropic-ai/sdk")
    found = findings(base_url, "ask_anthropic.mjs")
    assert (found["counted"], found["has_id"]) == (True, True)
    assert [text.startswith(SAID) for text in found["texts"]] == [True, True], found


def test_ai_sdk(base_url: str) -> None:
    require("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod")
    providers = ("chat", "responses", "compatible", "anthropic")
    assert findings(base_url, "ask_ai_sdk.mjs") == {name: [SAID, SAID] for name in providers}


def test_codex(base_url: str, tmp_path: Path) -> None:
    """With nothing set but where its model is: the tools that it declares are its own."""
    require("@openai/codex")
    (tmp_path / "config.toml").write_text(
        'model = "tiny"\nmodel_provider = "stageline"\n[model_providers.stageline]\nname = "Stageline"\n'
        f'base_url = "{base_url}/v1"\nwire_api = "responses"\nenv_key = "OPENAI_API_KEY"\n'
    )
    program = str(NODE / "node_modules" / ".bin" / "codex")
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Say the word")
    said = run(program, *options, directory=tmp_path, CODEX_HOME=str(tmp_path), OPENAI_API_KEY="unused")
    assert "It said:" in said
    assert TOLD in said


def ask_claude_code(base_url: str, home: Path) -> str:
    told = {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    program = str(NODE / "node_modules" / ".bin" / "claude")
    return run(program, "-p", "Say the word", "--allowedTools", "Bash", "--model", "tiny", directory=home, **told)


def test_claude_code(base_url: str, tmp_path: Path) -> None:
    require("@anthropic-ai/claude-code")
    assert ask_claude_code(base_url, tmp_path).strip() == f"It said: {TOLD}"


def test_claude_code_fits_its_answer_into_a_small_context(model: ScriptedModel, base_url: str, tmp_path: Path) -> None:
    """It asks for 32,000 tokens, and for less when it is told the context in Anthropic's words."""
    require("@anthropic-ai/claude-code")
    for name in ("first", "home", "model"):
        (tmp_path / name).mkdir()
    ask_claude_code(base_url, tmp_path / "first")
    context = model.longest_prompt + 8000
    settings = GatewaySettings(tmp_path / "endpoints.json")
    with scripted_model(tmp_path / "model", context) as small, running_gateway(settings) as gateway:
        gateway.serve(group(small.url))
        assert ask_claude_code(gateway.url, tmp_path / "home").strip() == f"It said: {TOLD}"
        assert refusals(gateway) > 0


def refusals(gateway: RunningGateway) -> float:
    """Requests that were answered with 400."""
    samples = gateway.samples().items()
    return sum(
        value for (name, labels), value in samples if name.endswith("requests_total") and ("code", "400") in labels
    )


def test_jdk(base_url: str, tmp_path: Path) -> None:
    """It offers HTTP/2 with its first request, as each client over it does."""
    if shutil.which("javac") is None or shutil.which("java") is None:
        pytest.skip("needs a JDK of 11 or later (Debian: apt-get install default-jdk-headless), then make test-clients")
    run("javac", "-d", str(tmp_path), str(PROGRAMS / "AskJdk.java"))
    printed = run("java", "-cp", str(tmp_path), "AskJdk", BASE_URL=base_url)
    assert printed.split("\n") == ["It said: wet"] * 4 + ["200", ""]
