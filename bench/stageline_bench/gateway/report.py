"""The benchmark's result: a JSON file, and a table in docs/benchmarks.md between its markers."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
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
"""CPU of a saturated gateway for a stream of 50 tokens."""
TARGET_SHARED: Final = 1.1
"""CPU for a saturated stream of a gateway with two workers, in that of one."""
TWO_WORKERS: Final = "gateway, 2 workers"
TARGET_TOKEN_US: Final = 30.0
"""CPU for one more token of a paced stream."""


def result_of(
    paced: list[dict[str, Any]], saturated: list[dict[str, Any]], long: list[dict[str, Any]], load_average: float
) -> dict[str, Any]:
    """Everything measured, and the targets of what was; `long` are paced streams of more tokens."""
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
        "saturated": saturated,
        "long": long,
        "targets": _targets(paced, saturated, long),
    }


def _targets(
    paced: list[dict[str, Any]], saturated: list[dict[str, Any]], long: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    measured = {one["concurrent"] for one in paced}
    targets = [
        _target(f"added TTFT at {streams} streams, {quantile}, ms", added_ms(paced, streams, quantile), at_most)
        for streams, quantile, at_most in TARGET_ADDED_MS
        if streams in measured
    ]
    of_relays = {one["relay"]: one["cpu_ms_per_stream"] for one in saturated}
    if (alone := of_relays.get("gateway")) is not None:
        targets.append(_target("CPU for a saturated stream of 50 tokens, ms", alone, TARGET_STREAM_MS))
        if (by_two := of_relays.get(TWO_WORKERS)) is not None:
            name = "CPU for a saturated stream with two workers, in that with one"
            targets.append(_target(name, round(by_two / alone, 3), TARGET_SHARED))
    if TARGET_CONCURRENT in measured:
        name = f"CPU for a token of {TARGET_CONCURRENT} paced streams, µs"
        targets += [_target(name, cpu_us_per_token(paced, one), TARGET_TOKEN_US) for one in long]
    return targets


def medians(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each relay: that whose CPU time for a stream is the lower median of its own."""
    of_relays: dict[str, list[dict[str, Any]]] = {}
    for one in measured:
        of_relays.setdefault(one["relay"], []).append(one)
    ordered = (sorted(each, key=lambda one: float(one["cpu_ms_per_stream"])) for each in of_relays.values())
    return [each[(len(each) - 1) // 2] for each in ordered]


def cpu_us_per_token(paced: list[dict[str, Any]], long: dict[str, Any]) -> float:
    """CPU of one more token: of long streams beside short ones, as many at once."""
    [short] = [one for one in paced if (one["relay"], one["concurrent"]) == (long["relay"], long["concurrent"])]
    more_ms = long["cpu_ms_per_stream"] - short["cpu_ms_per_stream"]
    return float(round(1e3 * more_ms / (long["tokens"] - short["tokens"]), 2))


def added_ms(paced: list[dict[str, Any]], concurrent: int, quantile: str, what: str = "ttft_ms") -> float:
    """What the gateway adds at one quantile: its own less that of clients who talk to the engine."""
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
    """Replace the page's section. As `replace_section`."""
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
        "| Saturated, 50 tokens a stream | Streams/s | Tokens/s | CPU ms per stream | Core busy |",
        "|---|---|---|---|---|",
        *(_saturated_row(one) for one in result["saturated"]),
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


def _saturated_row(one: dict[str, Any]) -> str:
    tokens = one["streams_per_second"] * one["tokens"]
    return (
        f"| {one['relay']} | {one['streams_per_second']:.0f} | {tokens:.0f} | {one['cpu_ms_per_stream']:.2f} | "
        f"{one['cpu_share']:.0%} |"
    )
