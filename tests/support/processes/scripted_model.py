"""A real engine edge, template and tokenizer over a model that plays a part: it calls a tool, then tells the result.

No model of a size for tests can be made to call the tools that an agent offers.
"""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn

from oracles.tokenizer_models import write_byte_level
from processes.scripted_core_server import EOS_TOKEN_ID, FIRST_BYTE_ID, VOCAB_SIZE, ScriptedCore, says
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent
from stageline_runtime.engine.edge.multiplexed import MultiplexedConnections
from stageline_runtime.engine.edge.routes import build_app
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.engine.text.schema_check import SchemaCheck

CONTEXT_TOKENS: Final = 1024 * 1024
"""A token is a byte, and an agent's first prompt has a hundred thousand of them."""
TEMPLATE: Final = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS: Final[dict[str, dict[str, Any]]] = {
    "weather": {"town": "Oslo"},
    "exec_command": {"cmd": "echo forty''two"},
    "shell": {"command": ["bash", "-c", "echo forty''two"]},
    "Bash": {"command": "echo forty''two", "description": "Say it"},
}
"""What it calls, the first that is offered. What is echoed doesn't stand in the call itself."""
_RESULT: Final = re.compile(r"<\|tool\|>((?:(?!<\|).)*)<\|assistant\|>$", re.DOTALL)


def answer_to(prompt: str) -> str:
    """What the model says."""
    if (told := _RESULT.search(prompt)) is not None:
        return f"It said: {told[1].strip()}"
    offered = prompt.partition("<|tools|>")[2].partition("<|")[0].split()
    name = next((name for name in CALLS if name in offered), None)
    if name is None:
        return "Nothing to call."
    return f"<tool_call>{json.dumps({'name': name, 'arguments': CALLS[name]})}</tool_call>"


async def _play(request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
    prompt = bytes(token - FIRST_BYTE_ID for token in request.prompt_token_ids if token >= FIRST_BYTE_ID).decode()
    async for event in says(answer_to(prompt), tokens_per_event=4)(request):
        yield event


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """One that serves."""

    url: str
    """Of its engine."""
    core: ScriptedCore

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt that it answered."""
        return max(len(request.prompt_token_ids) for request in self.core.submitted)


@contextmanager
def scripted_model(directory: Path, context_tokens: int = CONTEXT_TOKENS) -> Iterator[ScriptedModel]:
    """Serve it on a loopback port."""
    core = ScriptedCore(_play)
    write_byte_level(directory, chat_template=TEMPLATE)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        started, servers = threading.Event(), list[uvicorn.Server]()
        serving = _serve(core, _reader(directory, context_tokens), directory, listener, servers, started)
        thread = threading.Thread(target=lambda: asyncio.run(serving), daemon=True)
        thread.start()
        assert started.wait(60), "the scripted model did not start"
        yield ScriptedModel(f"http://127.0.0.1:{listener.getsockname()[1]}", core)
        servers[0].should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the scripted model did not stop"


def _reader(directory: Path, context_tokens: int) -> PromptReader:
    return PromptReader.load(
        directory, vocab_size=VOCAB_SIZE, max_model_len=context_tokens, eos_token_ids=[EOS_TOKEN_ID]
    )


async def _serve(
    core: ScriptedCore,
    reader: PromptReader,
    directory: Path,
    listener: socket.socket,
    servers: list[uvicorn.Server],
    started: threading.Event,
) -> None:
    schemas = SchemaCheck(directory, VOCAB_SIZE, [EOS_TOKEN_ID])
    connections = MultiplexedConnections()
    app = build_app(core, reader, schemas.check, connections, keys=(), max_body_bytes=8 * 1024 * 1024)
    settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
    servers.append(server := uvicorn.Server(settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    started.set()
    await serving
    connections.leave()
    await schemas.close()
