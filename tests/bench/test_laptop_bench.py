"""Stageline beside llama.cpp: the driver answers for every stream, figures are of pairs, a failed set-up says why."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from processes.repository_files import ROOT
from stageline_api.errors import UserError
from stageline_bench.laptop import llama_environment
from stageline_bench.laptop.comparison import DRIVER, LLAMA_CPP
from stageline_bench.laptop.llama_environment import ensure_llama
from stageline_bench.runtime.peers.peer_bench import STAGELINE
from stageline_bench.runtime.record.report import render
from stageline_bench.runtime.record.results import Result, this_machine

HERE = ROOT / llama_environment.DIRECTORY
needs_llama = pytest.mark.skipif(
    not (HERE / "stageline-peer").is_file(), reason="llama.cpp is not built here: make bench-laptop builds it once"
)


@needs_llama
def test_the_driver_samples_every_stream_to_its_end() -> None:
    python, model = ensure_llama(HERE, pytest.fail)
    command = [str(python), str(DRIVER), "--model", str(model), "--threads", "1", "--streams", "3"]
    three = {"prompts": [[504, 260, 1343], [504], [504, 260] * 40], "output_tokens": 5}
    orders = [three, {"prompts": [[9]], "output_tokens": 2}]
    done = subprocess.run(
        [*command, "--stream-tokens", "128", "--step-tokens", "32"],
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ready, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ready == {"ready": True}
    assert [answer["output_tokens"] for answer in answers] == [15, 2]
    assert all(answer["seconds"] > 0 for answer in answers)


def test_the_table_has_a_row_for_each_number_of_cores_and_streams() -> None:
    def one(engine: str, start: int, stages: int, rate: float) -> dict[str, object]:
        return {"start": start, "engine": engine, "stages": stages, "rates": {"8 at once": [rate, rate + 2, rate + 1]}}

    rounds = [
        *(one(STAGELINE, start, stages, 100.0 * stages) for start in (0, 1) for stages in (1, 2)),
        *(one(LLAMA_CPP, start, stages, 50.0) for start in (0, 1) for stages in (1, 2)),
    ]
    result = Result(
        program="laptop", date="2026-11-24", machine=this_machine(), parameters={}, rounds=rounds, targets=[]
    )
    table = render(result)
    assert "| 1 | 8 at once | 101 (101 to 101) | 51 (51 to 51) | 1.98 |" in table
    assert "| 2 | 8 at once | 201 (201 to 201) | 51 (51 to 51) | 3.94 |" in table


def test_an_environment_that_cannot_be_made_says_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    said: list[str] = []
    with pytest.raises(UserError, match=r"could not be made: .*llama-cpp-python.*C\+\+ compiler") as raised:
        ensure_llama(tmp_path / "environment", said.append)
    assert str(tmp_path / "environment") in str(raised.value)
    assert "this compiles llama.cpp once" in said[0]
