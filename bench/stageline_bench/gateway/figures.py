"""One measurement: a load on a relay, and its figures."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from stageline_api.engine_http import GenerateRequest, SamplingParams, TextPrompt
from stageline_bench.gateway.engine_words import SERVED_NAME
from stageline_bench.gateway.processes import cpu_seconds, memory_bytes, python_module, started
from stageline_bench.gateway.relays import TOKENS_MARK, Relay
from stageline_bench.gateway.stream_clients import Load, Seen

CLIENT_CORE: Final = 1
PATIENCE_SECONDS: Final = 120.0
PROMPT: Final = "Tell me a story about a pipeline."


def measure(
    relay: Relay, directory: Path, *, concurrent: int, tokens: int, tokens_per_second: float, seconds: float
) -> dict[str, Any]:
    """Load `relay`; all times in milliseconds."""
    body = request_body(relay.path, tokens, round(tokens_per_second))
    load = Load(relay.port, relay.path, body, concurrent, tokens, tokens_per_second, seconds, TOKENS_MARK[relay.path])
    memory_before = sum(memory_bytes(pid) for pid in relay.pids)
    cpu_before, began = cpu_seconds(relay.pids), time.monotonic()
    command = python_module("stageline_bench.gateway.stream_clients", json.dumps(asdict(load)))
    with started(command, CLIENT_CORE, directory / "clients.log") as clients:
        time.sleep(0.7 * seconds)
        memory_during = sum(memory_bytes(pid) for pid in relay.pids)
        said, _ = clients.communicate(timeout=seconds + PATIENCE_SECONDS)
    seen = Seen(**json.loads(said))
    cpu = cpu_seconds(relay.pids) - cpu_before
    figures: dict[str, Any] = {
        "relay": relay.name,
        "concurrent": concurrent,
        "tokens": tokens,
        "tokens_per_second": tokens_per_second,
        "streams": seen.streams,
        "broken": seen.broken,
        "streams_per_second": round(seen.streams / seen.seconds, 2),
        "ttft_ms": quantiles(seen.first_token_seconds),
        "gap_beyond_period_ms": quantiles(seen.gap_seconds),
    }
    if relay.pids:
        figures |= {
            "cpu_share": round(cpu / (time.monotonic() - began), 3),
            "cpu_ms_per_stream": round(1e3 * cpu / max(1, seen.streams), 4),
            "memory_bytes_per_stream": round((memory_during - memory_before) / concurrent),
        }
    return figures


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    ordered = sorted(seconds)
    return {
        f"p{percent}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3)
        for percent in (50, 90, 99)
        if ordered
    }


def request_body(path: str, tokens: int, rate: int) -> dict[str, Any]:
    """Body of a request to a relay at `path`, at `rate` tokens a second."""
    if path == "/v1/completions":
        return {"model": SERVED_NAME, "prompt": PROMPT, "max_tokens": tokens, "seed": rate, "stream": True}
    sampling = SamplingParams(max_tokens=tokens, seed=rate)
    request = GenerateRequest(request_id="bench", prompt=TextPrompt(text=PROMPT), sampling=sampling)
    return json.loads(request.to_json())  # type: ignore[no-any-return]
