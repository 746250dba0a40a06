"""The gateway's benchmark measures real streams, and its page shows what was measured."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from processes.free_ports import free_port
from stageline_api.errors import UserError
from stageline_bench.gateway import __main__ as gateway_bench
from stageline_bench.gateway import relays
from stageline_bench.gateway.figures import measure, quantiles
from stageline_bench.gateway.processes import python_module, started
from stageline_bench.gateway.report import added_ms, result_of, token_cost, update_page

LOAD: dict[str, Any] = {"concurrent": 2, "tokens": 5, "tokens_per_second": 50.0, "seconds": 4.0}


@pytest.fixture
def on_any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test machine may have one core, or others than 0 and 1."""
    monkeypatch.setattr("stageline_bench.gateway.processes.os.sched_setaffinity", lambda *_: None)


@pytest.mark.usefixtures("on_any_core")
def test_streams_are_whole_with_and_without_a_gateway(tmp_path: Path) -> None:
    port = free_port()
    with started(python_module("stageline_bench.gateway.synthetic_engine"), 0, tmp_path / "engine.log") as engine:
        assert engine.stdout is not None
        engine_port = int(engine.stdout.readline())
        direct = measure(relays.direct(engine_port), tmp_path, **LOAD)
        with relays.gateway(engine_port, port, tmp_path) as relay:
            through = measure(relay, tmp_path, **LOAD)
    for figures in (direct, through):
        assert figures["broken"] == 0, figures
        assert figures["streams"] >= 2, figures
        assert len(figures["ttft_ms"]) == 3, figures
    assert through["cpu_ms_per_stream"] > 0


def figures(relay: str, ttft_ms: float, **more: float) -> dict[str, Any]:
    """A measurement at 64 streams."""
    times = {"p50": ttft_ms, "p90": 2 * ttft_ms, "p99": 3 * ttft_ms}
    return {"relay": relay, "concurrent": 64, "tokens": 25, "ttft_ms": times, "gap_beyond_period_ms": times, **more}


def test_the_page_shows_what_the_gateway_adds_and_whether_the_targets_are_met(tmp_path: Path) -> None:
    relayed = {"cpu_share": 0.5, "memory_bytes_per_stream": 2048.0, "cpu_ms_per_stream": 2.0}
    paced = [figures("direct", 1.0), figures("gateway", 4.0, **relayed)]
    assert added_ms(paced, 64, "p50") == 3.0
    saturated = [figures("nginx", 1.0, streams_per_second=100.0, **relayed | {"cpu_ms_per_stream": 0.25})]
    tokens = []
    for more_ms in (2.0, 9.0, 2.5):
        long = figures("gateway", 4.0, **relayed | {"cpu_ms_per_stream": 2.0 + more_ms}) | {"tokens": 125}
        tokens.append(token_cost(paced[1], long))
    result = result_of(paced, saturated, tokens, 0.1)
    assert [target["met"] for target in result["targets"]] == [False, False, True]
    assert result["targets"][-1]["measured"] == 25.0
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin gateway -->\nold\n<!-- end gateway -->\nafter\n")
    update_page(page, result)
    text = page.read_text()
    assert "| 64 | gateway | 4.00 / 12.00 | 3.00 / 9.00 |" in text
    assert "| nginx | 64 | 100 | 2500 | 0.25 | 50% |" in text
    assert "| gateway | 3 | 25.0 (20.0 to 90.0) |" in text
    assert "p50, ms | ≤ 0.7 | 3 | **no** |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    page.write_text("no section")
    with pytest.raises(UserError, match="has no section"):
        update_page(page, result)
    with pytest.raises(UserError, match=r"missing\.md: No such file"):
        update_page(tmp_path / "missing.md", result)


@pytest.mark.parametrize("has_nginx", [True, False])
def test_every_start_has_processes_of_its_own_and_orders_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_nginx: bool
) -> None:
    opened: list[str] = []
    loads: list[tuple[str, int]] = []

    @contextmanager
    def open_relay(name: str, *_: object) -> Iterator[relays.Relay | None]:
        opened.append(name)
        yield relays.Relay(name, 1, "/v1/completions") if name == "gateway" or has_nginx else None

    def measured(relay: relays.Relay, _: Path, **load: Any) -> dict[str, Any]:
        if load["seconds"] != 3:  # the warm-up's
            loads.append((relay.name, load["tokens"]))
        cost = {"cpu_ms_per_stream": load["tokens"] / 50}
        return {"relay": relay.name, "tokens": load["tokens"], "concurrent": load["concurrent"], **cost}

    for name in ("gateway", "nginx"):
        monkeypatch.setattr(relays, name, partial(open_relay, name))
    monkeypatch.setattr(gateway_bench, "measure", measured)
    costs = [one["cpu_us_per_token"] for one in gateway_bench._tokens(1, 16.0, tmp_path)]
    assert costs == [20.0] * (10 if has_nginx else 5)
    assert opened == [
        "nginx",
        "gateway",
        "gateway",
        "nginx",
        "nginx",
        "gateway",
        "gateway",
        "nginx",
        "nginx",
        "gateway",
    ]
    assert [tokens for name, tokens in loads if name == "gateway"] == [25, 125, 25, 125, 125, 25, 125, 25, 25, 125]
    opened.clear()
    saturated = [(one["relay"], one["concurrent"]) for one in gateway_bench._saturated(1, 16.0, tmp_path)]
    assert saturated == [("nginx", 64), *[("gateway", 64)] * 4][not has_nginx :]
    assert opened == ["nginx", *["gateway"] * 4]


def test_a_saturated_stream_is_the_median_of_all_starts() -> None:
    more = {"streams_per_second": 1.0, "cpu_share": 0.5}
    rows = [figures("gateway", 1.0, cpu_ms_per_stream=cost, **more) for cost in (1.0, 2.0, 4.0, 8.0)]
    result = result_of([], [figures("nginx", 1.0, cpu_ms_per_stream=9.0, **more), *rows], [], 0.1)
    assert [target["measured"] for target in result["targets"]] == [3.0]
    assert [(row["relay"], row["cpu_ms_per_stream"]) for row in result["saturated"]] == [
        ("nginx", 9.0),
        ("gateway", 2.0),
    ]


def test_quantiles_are_of_the_ordered_values() -> None:
    assert quantiles([index / 1000 for index in range(100, 0, -1)]) == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert quantiles([0.007]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}


@pytest.mark.parametrize("program", ["stageline_bench.gateway", "stageline_bench.runtime"])
def test_an_option_that_is_not_there_is_named_without_a_traceback(program: str) -> None:
    ended = subprocess.run([sys.executable, "-m", program, "--odd"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--odd" in ended.stderr
    assert "Traceback" not in ended.stderr
