"""A devices file means what it says, and what is wrong with one is named by file, field, value and rule."""

from pathlib import Path

import pytest

from stageline_api.errors import UserError
from stageline_runtime.planning.devices import PRESETS, TEN_GIGABIT, ComputeRate, Device, Link, read_hardware

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "devices").glob("*.yaml"))

WHOLE = """
stages:
  - name: mine
    host: a
    memoryBytes: 2Gi
    memoryBandwidthBytesPerSecond: 1.5G
    flopsPerSecond: {float32: 3T, bfloat16: 6000000000000}
    stepOverheadSeconds: 0.25
link: {bandwidthBytesPerSecond: 125M, latencySeconds: 0.001}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "devices.yaml"
    path.write_text(text)
    return path


def test_every_field_is_read(tmp_path: Path) -> None:
    hardware = read_hardware(write(tmp_path, WHOLE), 3)
    device = Device(
        name="mine",
        host="a",
        memory_bytes=2 << 30,
        memory_bandwidth_bytes_per_second=1.5e9,
        flops_per_second=ComputeRate(float32=3e12, bfloat16=6e12),
        step_overhead_seconds=0.25,
    )
    assert hardware.devices == (device, device, device)
    assert hardware.link == Link(bandwidth_bytes_per_second=125e6, latency_seconds=0.001)


def test_an_entry_changes_fields_of_its_preset(tmp_path: Path) -> None:
    text = "stages: [{preset: h100-80gb}, {preset: l4-24gb, memoryBytes: 12G, host: b}]"
    hardware = read_hardware(write(tmp_path, text), 2)
    first, second = hardware.devices
    assert first == PRESETS["h100-80gb"]
    assert (second.memory_bytes, second.host, second.name) == (12 * 10**9, "b", "l4-24gb")
    assert second.flops_per_second == PRESETS["l4-24gb"].flops_per_second
    assert hardware.link == TEN_GIGABIT


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_read(path: Path) -> None:
    stage_count = 8 if path.name == "two_kinds_of_gpu.yaml" else 4
    assert len(read_hardware(path, stage_count).devices) == stage_count


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("link: {}", ["stages: is required"]),
        ("[]", ["must hold one mapping, with stages and link"]),
        ("stages: [", ["line 1, column 10: is not valid YAML"]),
        ("stages: []", ["stages: a list of 0 is not allowed: must have 1 entry or 2, one for each stage"]),
        ("stages: [{}, {}, {}]", ["stages: a list of 3 is not allowed: must have 1 entry or 2"]),
        ("stages: [{preset: h300}]", ['stages[0].preset: "h300" is not allowed: must be one of cpu-core, l4-24gb']),
        ("stages: [{preset: null}]", ["stages[0].preset: null is not allowed: leave the field out"]),
        ("stages: [{preset: l4-24gb, bandwith: 3}]", ["stages[0].bandwith: unknown field"]),
        (
            "stages: [{memoryBytes: 80Gi}]",
            [
                "stages[0].memoryBandwidthBytesPerSecond: is required where there is no preset",
                "stages[0].flopsPerSecond: is required where there is no preset",
            ],
        ),
        (
            "stages: [{preset: l4-24gb}, {preset: l4-24gb, memoryBytes: 80GiB}]",
            ['stages[1].memoryBytes: "80GiB" is not allowed: must be a number from 1 to 1e18'],
        ),
        (
            "stages: [{preset: l4-24gb, stepOverheadSeconds: -1}]",
            ["stages[0].stepOverheadSeconds: -1 is not allowed: must be a number of seconds from 0 to 60"],
        ),
        (
            "{stages: [{preset: l4-24gb}], link: {bandwidthBytesPerSecond: true}}",
            ["link.bandwidthBytesPerSecond: true is not allowed: must be a number from 1 to 1e18"],
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, lines: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as refusal:
        read_hardware(path, 2)
    assert refusal.value.exit_code == 2
    shown = refusal.value.message.splitlines()
    assert [line.startswith(f"{path}: {start}") for line, start in zip(shown, lines, strict=True)] == [True] * len(
        lines
    ), shown


@pytest.mark.parametrize("value", ["0", "-3", ".inf", ".nan", "1e19", "'1e12'", "true", "''", "12 G", "[1]", "1Q"])
def test_no_other_amount_is_taken_for_a_number(tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match=r"stages\[0\]\.memoryBytes: .* must be a number"):
        read_hardware(write(tmp_path, f"stages: [{{preset: l4-24gb, memoryBytes: {value}}}]"), 1)
