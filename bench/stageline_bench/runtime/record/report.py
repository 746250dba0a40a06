"""Renders results as the tables of docs/dev/benchmarks.md."""

from pathlib import Path
from statistics import median
from typing import Any

from stageline_bench.laptop.comparison import LLAMA_CPP
from stageline_bench.page_section import replace_section
from stageline_bench.runtime.peers.peer_bench import STAGELINE, VLLM, start_medians
from stageline_bench.runtime.peers.speculation_peers import ENGINES as LOOKUP_ENGINES
from stageline_bench.runtime.peers.speculation_peers import ratios
from stageline_bench.runtime.peers.vllm_engine import ENGINES, FLOORS, LATENCIES, burst_medians
from stageline_bench.runtime.ranks import EXCHANGE_CASE
from stageline_bench.runtime.record.results import Result, Target
from stageline_bench.runtime.serve import MEASURES
from stageline_bench.runtime.speculation import DRAFTS, PLAIN, WRONG

_VARIANTS = (PLAIN, DRAFTS, WRONG)


def update_page(page: Path, result: Result) -> None:
    """Replace the section of the result's program. Raises like `replace_section`."""
    replace_section(page, result.program, render(result))


def render(result: Result) -> str:
    """The section of one result: machine and date, figures, targets."""
    machine = result.machine
    header = (
        f"{result.date}, {machine.cpu}, {machine.cores} cores, torch {machine.torch}, Python {machine.python}; "
        f"load average before the first round {machine.load_average}.\n\n"
    )
    tables = {
        "pipeline": _pipeline_table,
        "peers": _peers_table,
        "serve": _serve_table,
        "prefix-reuse": _prefix_reuse_table,
        "laptop": _laptop_table,
        "paced": _paced_table,
        "ranks": _ranks_table,
        "vllm-engine": _vllm_engine_table,
        "speculation": _speculation_table,
        "paced-speculation": _speculation_table,
        "draft-model": _speculation_table,
        "speculation-peers": _speculation_peers_table,
    }
    table = header + tables[result.program](result)
    return f"{table}\n{_targets_table(result.targets)}" if result.targets else table


def _targets_table(targets: list[Target]) -> str:
    lines = ["| Target | Wanted | Measured | Met |", "|---|---|---|---|"]
    for target in targets:
        wanted = f"≥ {target.at_least:g}" if target.at_least is not None else f"≤ {target.at_most:g}"
        measured = "not measured" if target.measured is None else f"{target.measured:.4g}"
        met = {True: "yes", False: "**no**", None: "-"}[target.met]
        lines.append(f"| {target.name} | {wanted} | {measured} | {met} |")
    return "\n".join(lines) + "\n"


def _pipeline_table(result: Result) -> str:
    rounds = result.rounds
    rows: list[tuple[str, list[float], list[dict[str, Any]] | None]] = [
        ("two P = 1 at once (ceiling), common window", [one["ceiling_tokens_per_second"] for one in rounds], None)
    ]
    for name, key in (("P = 2", "pipeline"), ("P = 1 alone on one core", "alone")):
        rows.append((name, [one[key]["tokens_per_second"] for one in rounds], [one[key] for one in rounds]))
    lines = [
        "| Engine | tok/s median (lowest to highest) | Bubble | Bottleneck share | Imbalance | Host ms/step |",
        "|---|---|---|---|---|---|",
    ]
    for name, rates, engines in rows:
        lines.append(f"| {name} | {_spread(rates)} | {' | '.join(_window_cells(engines))} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _paced_table(result: Result) -> str:
    lines = [
        "| Window | Bubble | Bottleneck share | Imbalance | Host ms/step |",
        "|---|---|---|---|---|",
        f"| steady decode | {' | '.join(_window_cells(result.rounds, 'steady'))} |",
        f"| whole burst | {' | '.join(_window_cells(result.rounds, 'whole'))} |",
    ]
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _ranks_table(result: Result) -> str:
    lines = ["| Case | Rates, tok/s, median (lowest to highest) | Ratio, median of pairs |", "|---|---|---|"]
    for case in dict.fromkeys(one["case"] for one in result.rounds if "tokens_per_second" in one):
        pairs = [one["tokens_per_second"] for one in result.rounds if one["case"] == case]
        base, other = pairs[0]  # in this order in the first round
        shown = "; ".join(f"{name}: {_fine_spread([one[name] for one in pairs])}" for name in (base, other))
        lines.append(f"| {case} | {shown} | {median(one[other] / one[base] for one in pairs):.2f} |")
    sums = [one["microseconds"] for one in result.rounds if one["case"] == EXCHANGE_CASE]
    lines.append(f"| {EXCHANGE_CASE} | {_fine_spread(sums)} µs | - |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _speculation_table(result: Result) -> str:
    lines = [
        "| Case | Variants, tok/s of a request, median | Ratio, median of pairs | Equal answers |",
        "|---|---|---|---|",
    ]
    for case in dict.fromkeys(one["case"] for one in result.rounds):
        rounds = [one for one in result.rounds if one["case"] == case]
        base, other = [name for name in _VARIANTS if name in rounds[0]["tokens_per_second"]]
        rates = {name: [one["tokens_per_second"][name] for one in rounds] for name in (base, other)}
        ratio = median(high / low for low, high in zip(rates[base], rates[other], strict=True))
        shown = ", ".join(f"{name} {median(each):.1f}" for name, each in rates.items())
        equal = sum(one["equal_answers"] for one in rounds)
        lines.append(f"| {case} | {shown} | {ratio:.2f} | {equal} of {sum(one['answers'] for one in rounds)} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _speculation_peers_table(result: Result) -> str:
    lines = [
        "| Prompt | " + " | ".join(f"{engine}: tok/s without, with, ratio" for engine in LOOKUP_ENGINES) + " |",
        "|---|" + "---|" * len(LOOKUP_ENGINES),
    ]
    for case in dict.fromkeys(one["case"] for one in result.rounds):
        found = [ratios(result.rounds, engine, case) for engine in LOOKUP_ENGINES]
        cells = ["-" if one is None else f"{one[0]:.1f}, {one[1]:.1f}, {one[2]:.2f}" for one in found]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _peers_table(result: Result) -> str:
    lines = ["| P | Workload | Stageline tok/s | vLLM tok/s | Ratio, median of pairs |", "|---|---|---|---|---|"]
    counts = sorted({one["stages"] for one in result.rounds})
    for stages in counts:
        for name, text in result.parameters["workloads"].items():
            ours, theirs = (start_medians(result.rounds, engine, stages, name) for engine in (STAGELINE, VLLM))
            if not ours:
                continue
            ratio = median(one / other for one, other in zip(ours, theirs, strict=True))
            lines.append(f"| {stages} | {text} | {_spread(ours)} | {_spread(theirs)} | {ratio:.2f} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _laptop_table(result: Result) -> str:
    lines = [
        "| Cores | Streams | Stageline tok/s | llama.cpp tok/s | Ratio, median of pairs |",
        "|---|---|---|---|---|",
    ]
    for cores in sorted({one["stages"] for one in result.rounds}):
        for name in result.rounds[0]["rates"]:
            ours, theirs = (start_medians(result.rounds, engine, cores, name) for engine in (STAGELINE, LLAMA_CPP))
            ratio = median(one / other for one, other in zip(ours, theirs, strict=True))
            lines.append(f"| {cores} | {name} | {_spread(ours)} | {_spread(theirs)} | {ratio:.2f} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _serve_table(result: Result) -> str:
    lines = [
        "| Server | TTFT ms mean | TTFT ms p99 | TPOT ms mean | TPOT ms p99 |",
        "|---|---|---|---|---|",
    ]
    for engine in (STAGELINE, VLLM):
        starts = [one for one in result.rounds if one["engine"] == engine]
        cells = [f"{median(one[name] for one in starts) * 1e3:.1f}" for name in MEASURES]
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _prefix_reuse_table(result: Result) -> str:
    lines = ["| Load | Server | Of prompts from the cache | TTFT ms mean | TTFT ms p99 |", "|---|---|---|---|---|"]
    for load in dict.fromkeys(one["load"] for one in result.rounds):
        for engine in (STAGELINE, VLLM):
            starts = [one for one in result.rounds if (one["load"], one["engine"]) == (load, engine)]
            hits = f"{median(one['hit_ratio'] for one in starts):.0%}"
            first = [f"{median(one[name] for one in starts) * 1e3:.0f}" for name in MEASURES[:2]]
            lines.append(f"| {load} | {engine} | {hits} | {' | '.join(first)} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _vllm_engine_table(result: Result) -> str:
    lines = [
        "| Server | " + " | ".join(f"{one} requests, tok/s" for one in FLOORS) + " | TTFT ms mean | TPOT ms mean |",
        "|---|" + "---|" * (len(FLOORS) + 2),
    ]
    for engine in ENGINES:
        starts = [one for one in result.rounds if one["engine"] == engine]
        if not starts:
            continue
        rates = [burst_medians(result.rounds, engine, requests) for requests in FLOORS]
        cells = [_spread(one) if one else "-" for one in rates]
        cells += [f"{median(one[name] for one in starts) * 1e3:.1f}" for name in LATENCIES]
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return f"{_parameters(result)}\n\n" + "\n".join(lines) + "\n"


def _window_cells(engines: list[dict[str, Any]] | None, window: str = "whole") -> list[str]:
    """Medians of the rounds with such a window; a very short round has no steady one."""
    if engines is None:
        return ["-"] * 4
    figures = [one[window] for one in engines if one[window]]
    if not figures:
        return ["-"] * 4
    cells = [
        f"{median(one[name] for one in figures):.3f}" for name in ("bubble_ratio", "bottleneck_share", "imbalance")
    ]
    return [*cells, f"{median(one['host_seconds_per_step'] for one in figures) * 1e3:.2f}"]


def _spread(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _fine_spread(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _parameters(result: Result) -> str:
    plain = {name: value for name, value in result.parameters.items() if name != "workloads"}
    return "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items()) + "."
