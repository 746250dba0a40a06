"""`python -m stageline_bench.gpu_check [--page docs/dev/gpu-check.md] [--part NAME …]`: the program of `make
gpu-check`.

Without a CUDA device it prints how to get one, and exits with 0; docs/dev/gpu-check.md then shows no result. The page
requires all parts, so that every row is as recent as its first line.
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from stageline_api.errors import UserError
from stageline_bench.gpu_check.sections import MOST_SECONDS, Section, choose, exit_code, render, run_sections
from stageline_bench.page_section import replace_section

HOW_TO_GET_ONE = (
    "run it on a machine or in a pod with an NVIDIA GPU (resources nvidia.com/gpu: 1); where torch with CUDA is "
    "installed already, GPU_PYTHON=python3 make gpu-check uses it"
)


def sections(directory: Path) -> tuple[Section, ...]:
    """All parts; the device is not used before one runs."""
    from stageline_bench.gpu_check.device_parts import DeviceParts
    from stageline_bench.gpu_check.group_parts import GroupParts
    from stageline_bench.gpu_check.link_parts import LinkParts
    from stageline_bench.gpu_check.rank_parts import RankParts

    device, groups, ranks = DeviceParts(directory), GroupParts(directory), RankParts(directory)
    links = LinkParts(directory)
    parts = (
        ("device", "which hardware and software", device.facts),
        ("attention kernels", "Triton's kernels equal plain torch on the GPU", device.attention),
        ("row kernels", "Triton's norms, rotations and gates equal plain torch on the GPU", device.rows),
        ("sampling", "Triton's kernels draw the CPU's tokens on the GPU", device.sampling),
        ("sampling speed", "what a step's draws take, by rows and vocabulary", device.sampling_speed),
        ("layers", "a stage's tokens on the GPU equal the CPU's", device.layers),
        ("experts", "grouped products over experts equal one expert after the other on the CPU", device.experts),
        ("captured experts", "a mixture's experts replay with other picks than were recorded", device.captured_experts),
        ("graphs", "captured layers give the eager tokens, replay after replay", device.graphs),
        ("memory", "a device that is full says how much was missing", device.shortage),
        ("measured memory", "the largest step takes no more than was measured at load", device.measured),
        ("NCCL", "NCCL starts, and an operation that is overdue is told", device.nccl),
        ("links over NCCL", "plans of drawn sizes in drawn orders arrive byte by byte as they were sent", links.links),
        ("lost peers", "a killed and a stopped peer are noticed, and the stage ends", links.lost_peers),
        (
            "stages over NCCL",
            "two and three stages give one stage's tokens, graphs off, piecewise and full",
            groups.nccl,
        ),
        ("two stages on one device", "staged transport, plans in flight, deferred results", groups.staged),
        (
            "exchanges of two ranks",
            "sums, gathers and scattered sums between two devices, and what a sum takes",
            ranks.exchanges,
        ),
        ("two ranks of a stage", "two ranks that share each layer give one rank's tokens", ranks.tokens),
        ("two ranks of experts", "two ranks that divide experts give one rank's tokens", ranks.expert_tokens),
        ("a lost rank", "a rank killed amid exchanges is named, and its stage ends", ranks.lost_rank),
        ("a draft model", "drafts of a model on the last stage give the tokens without drafts", groups.drafts),
        (
            "attention speed",
            "what a layer's attention takes: many rows, a long one among them, prefill",
            device.attention_speed,
        ),
        ("throughput", "captured against eager", groups.throughput),
        (
            "sampled throughput",
            "temperature and top-p against greedy, a large vocabulary",
            groups.sampled_throughput,
        ),
        ("a draft model's gain", "one request with drafts of a model against without", groups.draft_gain),
    )
    return tuple(Section(name=name, shows=shows, run=run) for name, shows, run in parts)


def no_device() -> str | None:
    """Why nothing can be checked here; None if a device is visible."""
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch"
    if torch.cuda.is_available():
        return None
    built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return f"no CUDA device is visible (torch {torch.__version__}, built {built})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every part; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Show on a GPU what no test on a CPU can.")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    parser.add_argument("--part", action="append", default=[], metavar="NAME", help="run this part alone; repeatable")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="leave models and logs there, for reading")
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=MOST_SECONDS,
        metavar="S",
        help="give a part up after S (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    if options.page is not None and options.part:
        parser.error("--page takes all parts: leave out --part, or --page")
    reason = no_device()
    if reason is not None:
        _say(f"gpu-check: skipped: {reason}; {HOW_TO_GET_ONE}")
        return 0
    os.environ["TRITON_INTERPRET"] = "0"
    with _directory(options.keep) as directory:
        try:
            chosen = choose(sections(directory), options.part)
        except UserError as error:
            parser.error(error.message)
        outcomes = run_sections(chosen, _say, options.most_seconds)
    header = f"{date.today().isoformat()}, Python {platform.python_version()}, {os.cpu_count()} cores."
    table = render(outcomes, header)
    _say(table)
    if options.page is not None:
        try:
            replace_section(options.page, "gpu-check", table)
        except UserError as error:
            _say(f"gpu-check: {error}")
            return 1
    return exit_code(outcomes)


@contextmanager
def _directory(kept: Path | None) -> Iterator[Path]:
    """Directory of models and of groups' logs; absolute, because groups name their models by file:// URIs."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="stageline-gpu-check-") as directory:
            yield Path(directory)
        return
    kept.mkdir(parents=True, exist_ok=True)
    yield kept.resolve()


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the program's answer


if __name__ == "__main__":
    sys.exit(main())
