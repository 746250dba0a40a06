"""Speedup by a draft model that mostly agrees, on real layers, and the cost of one that does not.

There is no small model with the demo model's vocabulary, so both kinds are derived from it. The draft model is its
first layers: once of the unchanged model (they rarely agree), and once of a copy with later layers that add little
(they mostly agree). Such a copy takes as long as the model, layer for layer; its output is meaningless.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stageline_api.runtime_config import SpeculativeConfig
from stageline_bench.runtime.group.bench_group import GroupShape
from stageline_bench.runtime.record.results import Result, this_machine, today
from stageline_bench.runtime.speculation import (
    DRAFTS,
    FULL_REQUESTS,
    PLAIN,
    Case,
    chat_order,
    measure_cases,
    targets_of,
)

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS: Final = "model.safetensors"
DRAFT_LAYERS: Final = 3
LATE_SHARE: Final = 0.003
"""Remaining share of what the copy's later layers add to the residual stream."""
AGREEING_FLOOR, UNLIKE_FLOOR, FULL_FLOOR = 1.5, 0.95, 0.97


def run_draft_model(
    model_dir: Path,
    *,
    cores: Sequence[int],
    rounds: int,
    dtype: str,
    directory: Path,
    say: Callable[[str], None],
) -> Result:
    """Measure one request, four and sixteen with a draft model that agrees, and one with a draft model that doesn't."""
    machine = this_machine()
    measured, targets = [], []
    for name, share, cases in (
        ("agreeing", LATE_SHARE, {1: AGREEING_FLOOR, 4: None, FULL_REQUESTS: FULL_FLOOR}),
        ("unlike", 1.0, {1: UNLIKE_FLOOR}),
    ):
        target, draft = write_pair(model_dir, directory / name, share)
        shapes = {each: _shape(each, cores, dtype, draft) for each in (PLAIN, DRAFTS)}
        order = chat_order(target)
        own = [
            Case(
                f"{name} draft model, {count} request{'s' if count > 1 else ''}",
                order.model_copy(update={"prompts": order.prompts * count, "stop_token_ids": ()}),
                (PLAIN, DRAFTS),
                {} if floor is None else {DRAFTS: floor},
            )
            for count, floor in cases.items()
        ]
        found = measure_cases(target, shapes, own, rounds, directory / f"{name}-groups", say)
        measured += found
        targets += targets_of(own, found, f"P = {len(cores)}")
    return Result(
        program="draft-model",
        date=today(),
        machine=machine,
        parameters={
            "model": model_dir.name,
            "dtype": dtype,
            "cores": list(cores),
            "rounds": rounds,
            "draft_layers": DRAFT_LAYERS,
        },
        rounds=measured,
        targets=targets,
    )


def write_pair(model_dir: Path, directory: Path, late_share: float) -> tuple[Path, Path]:
    """Write the model with its later layers scaled by `late_share`, and its first layers as a separate model; returns
    both directories.
    """
    from safetensors.torch import load_file

    weights = load_file(model_dir / WEIGHTS)
    for name, tensor in weights.items():
        if _layer(name) >= DRAFT_LAYERS and ("o_proj" in name or "down_proj" in name):
            tensor *= late_share
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    first = {name: tensor for name, tensor in weights.items() if _layer(name) < DRAFT_LAYERS}
    target = _write(model_dir, directory / "target", config, weights)
    return target, _write(model_dir, directory / "draft", config | {"num_hidden_layers": DRAFT_LAYERS}, first)


def _layer(name: str) -> int:
    """Layer of a weight; -1 if it belongs to none."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1


def _write(model_dir: Path, directory: Path, config: dict[str, object], weights: dict[str, "Tensor"]) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, directory)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def _shape(name: str, cores: Sequence[int], dtype: str, draft: Path) -> GroupShape:
    return GroupShape(
        name=name,
        stage_cores=tuple(cores),
        dtype=dtype,
        max_num_seqs=FULL_REQUESTS,
        speculative=None if name == PLAIN else SpeculativeConfig(draft_source=f"file://{draft}"),
    )
