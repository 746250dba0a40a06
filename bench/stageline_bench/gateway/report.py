"""The benchmark's result: a JSON file, and a table in docs/dev/benchmarks.md between its markers."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from statistics import median
from typing import Any, Final

from stageline_bench.page_section import cpu_name, replace_section

PROGRAM: Final = "gateway"
TARGET_CONCURRENT: Final = 64
MOST_CONCURRENT: Final = 512
TARGET_ADDED_MS: Final = (
    (TARGET_CONCURRENT, "p50", 0.7),
    (TARGET_CONCURRENT, "p99", 3.0),
    (MOST_CONCURRENT, "p50", 60.0),
)
TARGET_STREAM_MS: Final = 1.0
"""CPU time of a saturated gateway for a stream of 50 tokens."""
TARGET_TOKEN_US: Final = 30.0
"""CPU time for one more token of a paced stream."""


def result_of(
    paced: list[dict[str, Any]], saturated: list[dict[str, Any]], tokens: list[dict[str, Any]], load_average: float
) -> dict[str, Any]:
    """All measurements and their targets; `tokens` are the `token_cost` of each start."""
    return {
        "program": PROGRAM,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "uvicorn": importlib.metadata.version("uvicorn"),
            "load_average": round(load_average, 2),
        },
        "paced": paced,
        "saturated": medians(saturated),
        "tokens": tokens,
        "targets": _targets(paced, saturated, tokens),
    }


def _targets(
    paced: list[dict[str, Any]], saturated: list[dict[str, Any]], tokens: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    measured = {one["concurrent"] for one in paced}
    targets = [
        _target(f"added TTFT at {streams} streams, {quantile}, ms", added_ms(paced, streams, quantile), at_most)
        for streams, quantile, at_most in TARGET_ADDED_MS
        if streams in measured
    ]
    if costs := [float(one["cpu_ms_per_stream"]) for one in saturated if one["relay"] == "gateway"]:
        targets.append(
            _target("CPU for a saturated stream of 50 tokens, ms", round(median(costs), 4), TARGET_STREAM_MS)
        )
    if costs := costs_of("gateway", tokens):
        name = f"CPU for a token of {TARGET_CONCURRENT} paced streams, µs"
        targets.append(_target(name, round(median(costs), 2), TARGET_TOKEN_US))
    return targets


def medians(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per relay: the one with the lower median of its CPU time per stream."""
    of_relays: dict[str, list[dict[str, Any]]] = {}
    for one in measured:
        of_relays.setdefault(one["relay"], []).append(one)
    ordered = (sorted(each, key=lambda one: float(one["cpu_ms_per_stream"])) for each in of_relays.values())
    return [each[(len(each) - 1) // 2] for each in ordered]


def token_cost(short: dict[str, Any], long: dict[str, Any]) -> dict[str, Any]:
    """CPU time of one more token: long streams compared with as many short ones through the same process."""
    more_ms = long["cpu_ms_per_stream"] - short["cpu_ms_per_stream"]
    per_token_us = round(1e3 * more_ms / (long["tokens"] - short["tokens"]), 2)
    return {"relay": short["relay"], "cpu_us_per_token": per_token_us, "short": short, "long": long}


def costs_of(relay: str, tokens: list[dict[str, Any]]) -> list[float]:
    """Cost of a token in this relay, per start."""
    return [float(one["cpu_us_per_token"]) for one in tokens if one["relay"] == relay]


def added_ms(paced: list[dict[str, Any]], concurrent: int, quantile: str, what: str = "ttft_ms") -> float:
    """Latency that the gateway adds at one quantile: its own minus that of a direct connection."""
    of = {one["relay"]: one for one in paced if one["concurrent"] == concurrent}
    return float(round(of["gateway"][what][quantile] - of["direct"][what][quantile], 3))


def _target(name: str, measured: float, at_most: float) -> dict[str, Any]:
    return {"name": name, "measured": measured, "at_most": at_most, "met": measured <= at_most}


def write_result(result: dict[str, Any], directory: Path) -> Path:
    """Write `<date>-gateway.json`; a later run of the same day replaces it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result['date']}-{PROGRAM}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def update_page(page: Path, result: dict[str, Any]) -> None:
    """Replace the page's section. Raises like `replace_section`."""
    replace_section(page, PROGRAM, render(result))


def render(result: dict[str, Any]) -> str:
    """The section."""
    machine = result["machine"]
    lines = [
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, "
        f"uvicorn {machine['uvicorn']}; load average before {machine['load_average']}.",
        "",
        "| Streams | Through | TTFT p50 / p99 ms | Added p50 / p99 ms | Gap beyond 40 ms p50 / p99 ms | Core busy | "
        "KiB per stream |",
        "|---|---|---|---|---|---|---|",
        *(_paced_row(one, result["paced"]) for one in result["paced"]),
        "",
        "| 1,000 tokens a second, 50 in all | Streams at once | Streams/s | Tokens/s | CPU ms per stream | Core busy |",
        "|---|---|---|---|---|---|",
        *(_saturated_row(one) for one in result["saturated"]),
        "",
        f"| {TARGET_CONCURRENT} paced streams through | Starts | CPU µs per token, median (lowest to highest) |",
        "|---|---|---|",
        *(_token_row(relay, costs_of(relay, result["tokens"])) for relay in _relays_of(result["tokens"])),
        "",
        "| Target | Wanted | Measured | Met |",
        "|---|---|---|---|",
        *(
            f"| {one['name']} | ≤ {one['at_most']:g} | {one['measured']:.3g} | {'yes' if one['met'] else '**no**'} |"
            for one in result["targets"]
        ),
    ]
    return "\n".join(lines) + "\n"


def _paced_row(one: dict[str, Any], paced: list[dict[str, Any]]) -> str:
    ttft, gap, streams = one["ttft_ms"], one["gap_beyond_period_ms"], one["concurrent"]
    has_added = one["relay"] == "gateway"
    added = f"{added_ms(paced, streams, 'p50'):.2f} / {added_ms(paced, streams, 'p99'):.2f}" if has_added else "-"
    busy = f"{one['cpu_share']:.0%}" if "cpu_share" in one else "-"
    memory = f"{one['memory_bytes_per_stream'] / 1024:.0f}" if "memory_bytes_per_stream" in one else "-"
    return (
        f"| {streams} | {one['relay']} | {ttft['p50']:.2f} / {ttft['p99']:.2f} | {added} | "
        f"{gap['p50']:.2f} / {gap['p99']:.2f} | {busy} | {memory} |"
    )


def _relays_of(tokens: list[dict[str, Any]]) -> list[str]:
    return sorted({str(one["relay"]) for one in tokens})


def _token_row(relay: str, costs: list[float]) -> str:
    return f"| {relay} | {len(costs)} | {median(costs):.1f} ({min(costs):.1f} to {max(costs):.1f}) |"


def _saturated_row(one: dict[str, Any]) -> str:
    tokens = one["streams_per_second"] * one["tokens"]
    return (
        f"| {one['relay']} | {one['concurrent']} | {one['streams_per_second']:.0f} | {tokens:.0f} | "
        f"{one['cpu_ms_per_stream']:.2f} | {one['cpu_share']:.0%} |"
    )
