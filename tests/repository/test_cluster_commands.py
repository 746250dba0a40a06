"""The commands for a cluster, in the README and the quick start, fit the chart, the examples and the command line.

A real control plane runs the same steps in `tests/cluster/test_chart_install.py`; here it is seen that no page names a
value, an object, a port or a file that is not there.
"""

import shlex
from pathlib import Path

import pytest
import yaml

from cluster.rendered_chart import rendered_objects
from processes.page_commands import commands, values_set
from processes.repository_files import ROOT
from stageline_api.manifests.manifest_loader import load_manifests

PAGES = ("README.md", "docs/quickstart-cluster.md", "docs/quickstart-gpu.md", "docs/upgrading.md", "docs/install.md")
SINGLE = ("air_gapped/smollm2.yaml", "autoscaling/built_in.yaml", "claims/llama_8b.yaml")
EXAMPLES = sorted([*(ROOT / "examples").glob("gpu/*.yaml"), *(ROOT / "examples" / file for file in SINGLE)])


def words_of(page: str) -> list[list[str]]:
    """Each command of the page's `sh` blocks, in words."""
    return [shlex.split(command) for command in commands(page)]


HELM = [(page, words) for page in PAGES for words in words_of(page) if words[0] == "helm" and "--set" in words]


def test_the_first_page_shows_three_ways() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("on a laptop\n") < text.index("in a cluster\n") < text.index("on a GPU\n")


@pytest.mark.parametrize(("page", "words"), HELM, ids=[f"{page} {' '.join(words[1:3])}" for page, words in HELM])
def test_the_chart_takes_the_values_that_a_page_sets(page: str, words: list[str]) -> None:
    assert rendered_objects(values_set(words)), page


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_kubectl_applies_is_there_and_valid(page: str) -> None:
    for words in words_of(page):
        if words[:2] != ["kubectl", "apply"]:
            continue
        file = ROOT / words[words.index("-f") + 1]
        documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
        assert all({"apiVersion", "kind", "metadata"} <= document.keys() for document in documents), file


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_are_what_validate_accepts(file: Path) -> None:
    loaded = load_manifests(file)
    assert loaded.problems == ()
    assert len(loaded.models) == 1


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart-cluster.md", "docs/quickstart-gpu.md"])
def test_services_and_their_ports_are_the_charts(page: str) -> None:
    services = {each["metadata"]["name"]: each for each in rendered_objects({}) if each["kind"] == "Service"}
    forwarded = [words for words in words_of(page) if words[:2] == ["kubectl", "port-forward"]]
    assert forwarded
    for words in forwarded:
        name = next(word.removeprefix("svc/") for word in words if word.startswith("svc/"))
        ports = {port["port"] for port in services[name]["spec"]["ports"]}
        assert int(words[-1].partition(":")[2]) in ports


@pytest.mark.parametrize("name", ["ingress.yaml", "httproute.yaml"])
def test_routes_lead_to_the_gateways_service(name: str) -> None:
    text = (ROOT / "examples" / "network" / name).read_text(encoding="utf-8")
    services = {each["metadata"]["name"]: each for each in rendered_objects({}) if each["kind"] == "Service"}
    (rule,) = yaml.safe_load(text)["spec"]["rules"]
    if name == "httproute.yaml":
        (backend,) = rule["backendRefs"]
        assert backend["port"] in {port["port"] for port in services[backend["name"]]["spec"]["ports"]}
    else:
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert backend["port"]["name"] in {port["name"] for port in services[backend["name"]]["spec"]["ports"]}


@pytest.mark.parametrize("folder", ["docs", "docs/dev", "docs/dev/adr"])
def test_the_index_of_a_folder_names_every_page(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert sorted(name for name in pages if f"({name})" not in index) == []
