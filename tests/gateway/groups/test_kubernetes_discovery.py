"""A cluster's pods decide what is served, and a missed event leaves no ghost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.fake_kube_api import MODELS, PODS, FakeKubeApi
from processes.gateway_harness import RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_api import labels
from stageline_api.endpoints import GroupEndpoint
from stageline_api.health import Phase
from stageline_gateway.command import gateway as gateway_command
from stageline_gateway.groups.pod_endpoints import endpoints_of
from stageline_gateway.groups.probing import ANOTHER_GROUP
from stageline_gateway.relay.placement import Runs
from stageline_gateway.settings import GatewaySettings

BODY: dict[str, Any] = {"model": "tiny", "prompt": "x"}
STALE = "stageline_gateway_endpoints_stale"
AGE = "stageline_gateway_discovery_age_seconds"


def model(name: str = "m", served_name: str | None = "tiny") -> dict[str, Any]:
    """A PipelineModel."""
    spec = {"model": {"source": "file:///m"} | ({"servedName": served_name} if served_name else {})}
    return {"metadata": {"name": name}, "spec": spec}


def pod(
    name: str = "m-0-1-0", index: int = 0, incarnation: int = 1, ready: bool = True, ip: str = "10.0.0.1", **meta: Any
) -> dict[str, Any]:
    """The pod of a stage 0."""
    own = {
        labels.MODEL: "m",
        labels.GROUP: str(index),
        labels.STAGE: "0",
        labels.INCARNATION: str(incarnation),
        labels.REVISION: "abc",
    }
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    status = {"phase": "Running", "podIP": ip, "conditions": conditions}
    return {"metadata": {"name": name, "labels": own, **meta}, "status": status}


def test_a_ready_pod_is_a_ready_group() -> None:
    found = endpoints_of([pod(ip="10.1.2.3")], [model()])
    [one] = found.groups
    assert (one.model, one.group, one.incarnation, one.revision) == ("tiny", 0, 1, "abc")
    assert (one.url, one.ready, one.message) == ("http://10.1.2.3:8000", True, "")
    assert endpoints_of([pod(ip="fd00::1")], [model()]).groups[0].url == "http://[fd00::1]:8000"
    assert endpoints_of([pod()], [model(served_name=None)]).groups[0].model == "m"


def test_a_pod_that_names_a_certificate_is_asked_by_https_alone() -> None:
    """Of the pod, not of the model: while the model's template changes there are groups of both kinds."""
    secure = pod(ip="10.1.2.3", annotations={labels.TLS_NAME: "m-stages.lab.svc"})
    found = endpoints_of([secure, pod("m-1-1-0", 1, ip="10.1.2.4", annotations=None)], [model()]).groups
    assert [(one.url, one.tls_name) for one in found] == [
        ("https://10.1.2.3:8000", "m-stages.lab.svc"),
        ("http://10.1.2.4:8000", ""),
    ]


def test_adapters_of_a_model_are_names_of_its_groups() -> None:
    served = model()
    served["spec"]["engine"] = {"name": "vllm", "loraAdapters": [{"name": "pirate", "path": "/a"}]}
    [one] = endpoints_of([pod()], [served]).groups
    assert one.adapters == ("pirate",)
    assert endpoints_of([pod()], [model()]).groups[0].adapters == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (pod(ready=False), "starting"),
        (pod(ip=""), "starting"),
        (pod(deletionTimestamp="2026-01-01T00:00:00Z"), "draining"),
        (pod() | {"status": {"phase": "Failed", "podIP": "10.0.0.1"}}, "its pod has failed"),
        (
            pod()
            | {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes fit"}]}},
            "waiting for a node",
        ),
        (pod() | {"status": None}, "starting"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_pod_takes_no_request_and_says_why(changed: dict[str, Any], message: str) -> None:
    [one] = endpoints_of([changed], [model()]).groups
    assert (one.ready, one.message) == (False, message)
    assert one.draining == (message == "draining")


def test_a_model_without_pods_is_known_and_pods_without_a_model_serve_nothing() -> None:
    assert endpoints_of([], [model()]).models == ("tiny",)
    assert endpoints_of([pod()], []).groups == ()
    assert endpoints_of([pod(name="odd") | {"metadata": {"name": "odd", "labels": None}}], [model()]).groups == ()


def test_a_models_resume_window_is_read_and_the_longest_of_one_served_name_counts() -> None:
    def windowed(name: str, served_name: str | None, seconds: object) -> dict[str, Any]:
        made = model(name, served_name)
        return made | {"spec": made["spec"] | {"timeouts": {"resumeWindowSeconds": seconds}}}

    models = [windowed("a", "tiny", 5), windowed("b", "tiny", 9), windowed("c", None, 0), windowed("d", None, "odd")]
    assert endpoints_of([], [*models, model("e", None)]).resume_window_seconds == {"tiny": 9.0, "c": 0.0}


def suspended(name: str = "m", served_name: str | None = "tiny") -> dict[str, Any]:
    made = model(name, served_name)
    return made | {"spec": made["spec"] | {"suspend": True}}


def test_a_name_is_suspended_when_every_model_that_serves_it_is() -> None:
    assert endpoints_of([], [suspended()]).suspended == ("tiny",)
    assert endpoints_of([], [suspended("a"), model("b")]).suspended == ()
    assert endpoints_of([], [suspended("a"), suspended("b"), model("c", None)]).suspended == ("tiny",)


def at_zero(name: str = "m", **spec: Any) -> dict[str, Any]:
    made = model(name)
    return made | {"spec": made["spec"] | {"replicas": 0} | spec}


def test_a_name_is_scaled_to_zero_when_every_model_that_serves_it_is() -> None:
    assert endpoints_of([], [at_zero()]).scaled_to_zero == ("tiny",)
    assert endpoints_of([], [at_zero("a"), model("b")]).scaled_to_zero == ()
    both = endpoints_of([], [at_zero(suspend=True)])
    assert (both.scaled_to_zero, both.suspended) == ((), ("tiny",))


@pytest.fixture
def watching(api: FakeKubeApi) -> Iterator[RunningGateway]:  # noqa: ARG001 - it must be there first
    """A gateway that watches it; the engine's port is not the contract's, so nothing is ever asked there."""
    settings = GatewaySettings(None, namespaces=("here",), relist_seconds=1, probe_interval_seconds=60, hold_seconds=0)
    with running_gateway(settings) as gateway:
        yield gateway


def shows(gateway: RunningGateway, *groups: tuple[str, int, int]) -> None:
    """Wait until the gateway lists exactly these."""
    eventually(lambda: gateway.shown_groups() == list(groups), lambda: f"{gateway.shown_groups()} != {groups}")


def test_pods_come_go_and_change(api: FakeKubeApi, watching: RunningGateway) -> None:
    api.put(MODELS, model())
    eventually(lambda: watching.http.get("/v1/models").json()["data"], "the model never came")
    refused = watching.http.post("/v1/completions", json=BODY)
    assert (refused.status_code, "no group exists" in refused.text) == (503, True), refused.text
    api.put(PODS, pod("a", 0, 1))
    api.put(PODS, pod("b", 1, 1, ready=False))
    shows(watching, ("tiny", 0, 1), ("tiny", 1, 1))
    api.delete(PODS, "b")
    shows(watching, ("tiny", 0, 1))
    api.put(PODS, pod("a", 0, 1, deletionTimestamp="2026-01-01T00:00:00Z"))
    api.put(PODS, pod("c", 0, 2))
    shows(watching, ("tiny", 0, 1), ("tiny", 0, 2))
    [listed] = watching.http.get("/v1/models").json()["data"]
    assert [one["draining"] for one in listed["groups"]] == [True, False]
    assert watching.http.post("/v1/completions", json=BODY | {"model": "other"}).status_code == 404
    assert watching.http.get("/v1/models/here/tiny").json()["id"] == "tiny", "its full name is known here too"
    assert "labelSelector=stageline.dev/stage%3D0" in next(asked for asked in api.requests if asked.startswith(PODS))


def test_a_request_to_a_suspended_model_is_told_so_at_once(api: FakeKubeApi) -> None:
    """Requests wait for a group that may come; here none will until a person acts, however long they would wait."""
    settings = GatewaySettings(
        None, namespaces=("here",), relist_seconds=1, probe_interval_seconds=60, hold_seconds=10_000
    )
    with running_gateway(settings) as gateway:
        api.put(MODELS, suspended())
        eventually(lambda: gateway.http.get("/v1/models").json()["data"], "the model never came")
        refused = gateway.http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_suspended"), refused.text
        assert "spec.suspend of its PipelineModel" in refused.text
        assert "retry-after" not in refused.headers


def test_a_deletion_nobody_told_of_is_found_by_listing_anew(api: FakeKubeApi, watching: RunningGateway) -> None:
    api.put(MODELS, model())
    api.put(PODS, pod("a", 0))
    api.put(PODS, pod("b", 1))
    shows(watching, ("tiny", 0, 1), ("tiny", 1, 1))
    api.delete(PODS, "b", silently=True)
    shows(watching, ("tiny", 0, 1))


def test_a_version_that_is_too_old_makes_it_list_anew(api: FakeKubeApi, watching: RunningGateway) -> None:
    api.put(MODELS, model())
    shows(watching)
    begun = api.watches(PODS)
    api.expire()
    eventually(lambda: api.watches(PODS) > begun, "never watched again")
    api.put(PODS, pod("a", 0))
    shows(watching, ("tiny", 0, 1))


def test_an_api_server_that_fails_empties_nothing(api: FakeKubeApi, watching: RunningGateway) -> None:
    api.put(MODELS, model())
    api.put(PODS, pod("a", 0))
    shows(watching, ("tiny", 0, 1))
    api.fails = True
    api.expire()
    eventually(lambda: watching.sample(STALE, namespace="here") == 1, "the metric never said so")
    shows(watching, ("tiny", 0, 1))
    eventually(lambda: watching.sample(AGE, namespace="here") > 1.5, "its age does not grow")
    api.fails = False
    eventually(lambda: watching.sample(AGE, namespace="here") < 1, "news are not noticed")
    eventually(lambda: watching.sample(STALE, namespace="here") == 0, "it never recovered")


UNREADABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a status that is a text": (PODS, pod("odd", 1, 1) | {"status": "a string"}),
    "conditions that are texts": (PODS, pod("odd", 1, 1) | {"status": {"podIP": "10.0.0.9", "conditions": ["Ready"]}}),
    "an address that is a number": (PODS, pod("odd", 1, 1) | {"status": {"podIP": 7}}),
    "annotations that are a list": (PODS, pod("odd", 1, 1, annotations=["a"])),
    "a spec that is null": (MODELS, model("odd") | {"spec": None}),
    "adapters that are texts": (MODELS, model("odd") | {"spec": {"engine": {"loraAdapters": ["pirate"]}}}),
    "timeouts that are a text": (MODELS, model("odd") | {"spec": {"timeouts": "long"}}),
}


@pytest.mark.parametrize(
    ("name", "comes"),
    [(name, "later") for name in UNREADABLE] + [("a status that is a text", "first"), ("a spec that is null", "first")],
)
def test_an_object_that_makes_no_sense_keeps_no_other_from_being_read(
    api: FakeKubeApi, watching: RunningGateway, caplog: pytest.LogCaptureFixture, name: str, comes: str
) -> None:
    path, odd = UNREADABLE[name]
    if comes == "first":
        api.put(path, odd)
    api.put(MODELS, model())
    api.put(PODS, pod("a", 0, 1))
    shows(watching, ("tiny", 0, 1))
    api.put(path, odd)
    eventually(lambda: watching.sample(STALE, namespace="here") == 1, "nobody said that it can't be read")
    for round_ in range(2, 4):  # as events, and by listing anew
        api.put(PODS, pod("b", 2, round_))
        shows(watching, ("tiny", 0, 1), ("tiny", 2, round_))
        api.expire()
    said = [record.getMessage() for record in caplog.records if "odd makes no sense" in record.getMessage()]
    assert said, [record.getMessage() for record in caplog.records]
    api.delete(path, "odd")
    eventually(lambda: watching.sample(STALE, namespace="here") == 0, "it never recovered")


def test_of_an_object_that_makes_no_sense_the_last_good_version_is_used(
    api: FakeKubeApi, watching: RunningGateway
) -> None:
    api.put(MODELS, model())
    api.put(PODS, pod("a", 0, 1))
    shows(watching, ("tiny", 0, 1))
    api.put(MODELS, model() | {"spec": None})
    eventually(lambda: watching.sample(STALE, namespace="here") == 1, "nobody said that it can't be read")
    api.expire()
    api.put(PODS, pod("b", 1, 1))
    shows(watching, ("tiny", 0, 1), ("tiny", 1, 1))
    api.put(MODELS, model())
    eventually(lambda: watching.sample(STALE, namespace="here") == 0, "it never recovered")


def test_an_event_that_makes_no_sense_ends_no_watch(api: FakeKubeApi, watching: RunningGateway) -> None:
    api.put(MODELS, model())
    api.put(PODS, pod("a", 0, 1))
    shows(watching, ("tiny", 0, 1))
    api.put(PODS, pod("odd", 1, 1) | {"status": "a string"})
    eventually(lambda: watching.sample(STALE, namespace="here") == 1, "nobody said that it can't be read")
    api.delete(PODS, "odd")
    api.put(PODS, pod("c", 2, 1))
    shows(watching, ("tiny", 0, 1), ("tiny", 2, 1))
    assert watching.sample(STALE, namespace="here") == 0


def test_probes_go_on_after_a_failure_that_nobody_thought_of(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    def failing_once(_: Runs) -> None:
        monkeypatch.undo()
        failures.append(1)
        raise ZeroDivisionError

    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", probe_interval_seconds=0.05)) as gateway:
        gateway.serve(group(engine.url))
        monkeypatch.setattr(Runs, "review", failing_once)
        eventually(lambda: failures, "never looked over")
        engine.phase = Phase.WARMING
        eventually(lambda: not gateway.http.get("/readyz").is_success, "probes have ended")


def test_a_ghost_that_discovery_keeps_is_out_of_use_within_a_probe(tmp_path: Path, engine: ScriptedEngine) -> None:
    settings = GatewaySettings(
        tmp_path / "e.json", probe_interval_seconds=0.05, probe_timeout_seconds=0.5, hold_seconds=0
    )
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        eventually(lambda: gateway.http.get("/readyz").is_success, "never ready")
        engine.served_name = "another"
        eventually(lambda: "another model" in gateway.http.get("/v1/models").text, "the address's new owner is used")
        engine.served_name = "tiny"
        eventually(lambda: gateway.http.get("/readyz").is_success, "never ready again")
        engine.stop()
        eventually(lambda: "can't be reached" in gateway.http.get("/v1/models").text, "the ghost is used")
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 503


@pytest.mark.parametrize("what", ["group", "incarnation"])
def test_an_address_that_another_engine_has_by_now_is_out_of_use(
    tmp_path: Path, engine: ScriptedEngine, what: str
) -> None:
    settings = GatewaySettings(
        tmp_path / "e.json", probe_interval_seconds=0.05, probe_timeout_seconds=60, hold_seconds=0
    )
    with running_gateway(settings) as gateway:
        listed = group(engine.url)
        engine.group, engine.incarnation = listed.group, listed.incarnation
        gateway.serve(listed)
        eventually(lambda: engine.probes >= 2, "not probed")
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 200, "it is the one that is listed"
        setattr(engine, what, getattr(listed, what) + 1)
        eventually(lambda: ANOTHER_GROUP in gateway.http.get("/v1/models").text, "the address's new owner is used")
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 503
        setattr(engine, what, getattr(listed, what))
        eventually(lambda: gateway.http.get("/readyz").is_success, "never ready again")


def test_an_engine_that_is_slow_to_answer_keeps_no_other_from_being_asked(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    settings = GatewaySettings(
        tmp_path / "e.json", probe_interval_seconds=0.05, probe_timeout_seconds=120, hold_seconds=0
    )
    with running_gateway(settings) as gateway:
        engine.answers_probes = False
        gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
        eventually(lambda: engine.probes and other_engine.probes > 3, lambda: f"{other_engine.probes}")
        assert engine.probes == 1, "one that is under way is not asked again"


def test_an_engine_that_does_not_answer_its_probe_takes_no_request(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    # Requests wait: on a machine that stops for longer than a probe may take, the other engine is silent too.
    settings = GatewaySettings(tmp_path / "e.json", probe_interval_seconds=0.05, probe_timeout_seconds=0.5)
    with running_gateway(settings) as gateway:
        engine.answers_probes = False
        listed = group(engine.url, 0)
        gateway.serve(listed, group(other_engine.url, 1))
        eventually(lambda: does_not_answer(gateway, listed), "the probe never failed")
        for _ in range(4):
            assert gateway.http.post("/v1/completions", json=BODY).status_code == 200
        assert (len(engine.requests), len(other_engine.requests)) == (0, 4)


def does_not_answer(gateway: RunningGateway, listed: GroupEndpoint) -> bool:
    """Whether the gateway says so of a group."""
    [model] = gateway.http.get("/v1/models").json()["data"]
    return any(one["group"] == listed.group and "does not answer" in one["message"] for one in model["groups"])


def test_an_engine_that_does_not_answer_its_probe_takes_no_request_even_when_there_is_no_other(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    settings = GatewaySettings(
        tmp_path / "e.json", probe_interval_seconds=0.05, probe_timeout_seconds=0.5, hold_seconds=0
    )
    with running_gateway(settings) as gateway:
        engine.answers_probes = False
        listed = group(engine.url, 0)
        gateway.serve(listed)
        eventually(lambda: does_not_answer(gateway, listed), "the probe never failed")
        refused = gateway.http.post("/v1/completions", json=BODY)
        assert (refused.status_code, "does not answer" in refused.text) == (503, True)
        assert engine.requests == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["--kubernetes", "--endpoints", "x"], ["--endpoints", "x", "--namespace", "y"]],
    ids=["neither", "both", "namespace of a file"],
)
def test_the_command_wants_one_source(arguments: list[str]) -> None:
    result = CliRunner().invoke(gateway_command, arguments)
    assert "either --endpoints FILE or --kubernetes" in str(result.exception)


def test_without_a_way_to_log_in_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = CliRunner().invoke(gateway_command, ["--kubernetes"])
    assert "can't log in to a cluster" in str(result.exception)
