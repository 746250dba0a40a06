"""An engine container's edge and core on a loopback port, in a thread, over a stand-in for vLLM."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE
from processes.vllm_stand_in import MAX_MODEL_LEN, StandIn
from stageline_runtime.engine.edge.multiplexed import MultiplexedConnections
from stageline_runtime.engine.edge.routes import build_app
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.engine.text.schema_check import SchemaCheck


@contextmanager
def engine_over(vllm: StandIn) -> Iterator[str]:
    """Serve for the length of the block; gives the engine's base URL."""
    reader = PromptReader.load(
        vllm.model_dir, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=[EOS_TOKEN_ID]
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()
        started = threading.Event()

        async def serve() -> None:
            core = vllm.core()
            schemas = SchemaCheck(vllm.model_dir, VOCAB_SIZE, [EOS_TOKEN_ID])
            connections = MultiplexedConnections()
            app = build_app(core, reader, schemas.check, connections)
            settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
            server = uvicorn.Server(settings)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            started.set()
            await asyncio.to_thread(stop.wait)
            connections.leave()
            server.should_exit = True
            await serving
            await core.close()
            await schemas.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert started.wait(60)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join(60)
            assert not thread.is_alive(), "the engine did not stop"
