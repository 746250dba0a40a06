"""Every command of the README and of the quick starts is one that a machine runs; see `page_commands` for where.

What runs in `.ci/run`, and what the pages show besides commands, is compared here.
"""

import json
import re
import shlex
import subprocess

import pytest
import yaml

from processes.page_commands import PAGES, SHAPES, Place, blocks, commands, commands_at, places_of
from processes.repository_files import ROOT, environment_outside_make
from stageline_api.resource.pipeline_model import PipelineModel

MAX_README_LINES = 120
MAX_USER_WORDS = 50_000
ALL = sorted({command for page in PAGES for command in commands(page)})
TARGETS = sorted({shlex.split(command)[-1] for command in ALL if "make" in shlex.split(command)})
SERVED = {"README.md": {"smollm2", "qwen3-8b"}, "docs/quickstart-gpu.md": {"qwen3-8b"}}
CURLS = [(page, command) for page in PAGES for command in commands(page) if command.startswith("curl ")]


@pytest.mark.parametrize("command", ALL, ids=lambda command: command[:60])
def test_every_command_is_run_in_one_place(command: str) -> None:
    assert len(places_of(command)) == 1, f"{command!r} is run at {places_of(command)}: see page_commands.SHAPES"


def test_a_command_that_nothing_runs_is_seen() -> None:
    assert places_of("kubectl get plm") == []


def test_every_shape_is_of_some_command() -> None:
    unused = [
        shape.pattern for shape in SHAPES if not any(re.search(shape.pattern, " ".join(each.split())) for each in ALL)
    ]
    assert set(unused) <= {r"^make (up|test|check|help)$"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_commands_and_no_block_that_is_read_as_something_else(page: str) -> None:
    assert commands(page)
    assert len(blocks(page, "sh")) == (ROOT / page).read_text(encoding="utf-8").count("```sh")


def test_ci_runs_what_it_has_to() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in {each for page in PAGES for each in commands_at(Place.CI, page)}:
        target = command.removeprefix("make ")
        assert re.search(rf"\bmake (--\S+ )?{target}\b", script), f".ci/run doesn't run {command!r}"


def test_real_nodes_type_the_air_gapped_section() -> None:
    text = (ROOT / "tests" / "node" / "test_from_an_empty_cluster_to_an_answer.py").read_text(encoding="utf-8")
    assert 'documented("Without the internet"' in text
    (page,) = [page for page in PAGES if any("claim.yaml" in each for each in commands_at(Place.REAL_NODES, page))]
    assert page == "docs/quickstart-cluster.md"


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target],
        cwd=ROOT,
        env=environment_outside_make(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_file_that_a_command_names_exists() -> None:
    named = {word for command in ALL for word in shlex.split(command) if re.match(r"(examples|charts|docs)/", word)}
    assert named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_the_readme_fits_a_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_manifest_shown_is_the_example() -> None:
    (shown,) = blocks("docs/quickstart-cluster.md", "yaml")
    example = (ROOT / "examples" / "smollm2.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(shown) == yaml.safe_load(example)
    assert PipelineModel.model_validate(yaml.safe_load(shown)).spec.parallelism.pipeline == 2


@pytest.mark.parametrize(("page", "command"), CURLS, ids=[page for page, _ in CURLS])
def test_every_page_asks_the_same_question(page: str, command: str) -> None:
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    first = json.loads(shlex.split(CURLS[0][1])[-1])
    assert body == first | {"model": body["model"]}
    assert body["model"] in SERVED.get(page, {"smollm2"})
    assert words[1] == "http://127.0.0.1:8080/v1/chat/completions"


def test_the_python_snippet_asks_what_curl_asks() -> None:
    (snippet,) = blocks("docs/quickstart-local.md", "python")
    compile(snippet, "quickstart-local.md", "exec")
    body = json.loads(shlex.split(CURLS[0][1])[-1])
    assert f'model="{body["model"]}"' in snippet
    assert body["messages"][0]["content"] in snippet


def test_the_index_of_examples_names_every_file() -> None:
    index = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "examples").rglob("*") if path.suffix in {".yaml", ".json"}]
    missing = [str(path.relative_to(ROOT / "examples")) for path in files]
    assert sorted(name for name in missing if f"({name})" not in index) == []


def test_user_pages_stay_short() -> None:
    """Words of all pages for users; docs/dev has those for developers."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in pages}
    assert sum(words.values()) <= MAX_USER_WORDS, dict(sorted(words.items(), key=lambda item: -item[1]))
