"""One gateway of several namespaces: which model a name means, whose key goes where, and what one of them can't do to
the others."""

import asyncio
import base64
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cluster.fake_kube_api import ELSEWHERE, MODELS, PODS, SECRETS, FakeKubeApi
from processes.gateway_harness import RunningGateway, eventually, running_gateway
from processes.scripted_core_server import until
from processes.scripted_engine import Drop, Hold, Say, ScriptedEngine, answer
from stageline_api import env, labels, ports
from stageline_api.engine_access import KEYS_ENTRY, KEYS_SECRET
from stageline_api.engine_http import Admitted, Delta
from stageline_gateway.command import gateway as gateway_command
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.groups.backends import DiscoveredGroups
from stageline_gateway.groups.discovery_kubernetes import KubernetesDiscovery
from stageline_gateway.served_models import ServedModel, ServedModels
from stageline_gateway.settings import GatewaySettings

KEYS = {"here": "key-of-here-0123456789", "there": "key-of-there-0123456789"}
STALE = "stageline_gateway_endpoints_stale"
REQUESTS = "stageline_gateway_requests_total"
QUEUED = "stageline_gateway_requests_queued"


@dataclass
class TwoNamespaces:
    """A cluster of two namespaces, each with an engine that takes its namespace's key alone, and a gateway of both."""

    api: FakeKubeApi
    engines: Mapping[str, ScriptedEngine]
    gateway: RunningGateway

    def path(self, namespace: str, path: str) -> str:
        return path if namespace == "here" else ELSEWHERE[path]

    def model(self, namespace: str, name: str = "tiny", **spec: Any) -> None:
        manifest = {"metadata": {"name": name}, "spec": {"model": {"source": "file:///m"}} | spec}
        self.api.put(self.path(namespace, MODELS), manifest)

    def group(self, namespace: str, model: str = "tiny") -> None:
        """A ready stage 0 of the model, whose engine is the namespace's."""
        own = {labels.MODEL: model, labels.GROUP: "0", labels.STAGE: "0", labels.INCARNATION: "1"}
        status = {
            "phase": "Running",
            "podIP": self.engines[namespace].address,
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        metadata = {"name": f"{model}-0-1-0", "labels": own | {labels.REVISION: "same"}}
        self.api.put(self.path(namespace, PODS), {"metadata": metadata, "status": status})

    def serve(self, namespace: str, name: str = "tiny") -> None:
        self.engines[namespace].served_name = name
        self.model(namespace, name)
        self.group(namespace, name)
        self.until(lambda: f"{namespace}/{name}" in self.ready())

    def listed(self, **headers: str) -> dict[str, str]:
        """Full names by id."""
        models = self.gateway.http.get("/v1/models", headers=headers).json()["data"]
        return {one["id"]: one["full_name"] for one in models}

    def ready(self) -> set[str]:
        return {one["full_name"] for one in self.gateway.http.get("/v1/models").json()["data"] if one["ready"]}

    def until(self, condition: Any) -> None:
        eventually(condition, lambda: self.gateway.admin.get("/status").text)

    def ask(self, model: str, **headers: str) -> tuple[int, str]:
        """Status, and the answer's text or the error."""
        asked = {"model": model, "prompt": "x"}
        answered = self.gateway.http.post("/v1/completions", json=asked, headers=headers)
        body = answered.json()
        return answered.status_code, body["choices"][0]["text"] if "choices" in body else answered.text


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ScriptedEngine]]:
    """At two addresses and one port, as pods have them."""
    first = ScriptedEngine(lambda _: answer("from here"), keys=(KEYS["here"],))
    first.start()
    other = ScriptedEngine(lambda _: answer("from there"), keys=(KEYS["there"],), address="127.0.0.2", port=first.port)
    other.start()
    monkeypatch.setattr(ports, "ENGINE_HTTP", first.port)
    yield {"here": first, "there": other}
    first.stop()
    other.stop()


def settings(**given: Any) -> GatewaySettings:
    times = {"relist_seconds": 1, "probe_interval_seconds": 0.05, "hold_seconds": 0, "resume_window_seconds": 0}
    return GatewaySettings(None, namespaces=("here", "there"), own_namespace="system", **times | given)


def put_keys(api: FakeKubeApi) -> None:
    for namespace, key in KEYS.items():
        data = {KEYS_ENTRY: base64.b64encode(key.encode()).decode()}
        path = SECRETS if namespace == "here" else ELSEWHERE[SECRETS]
        api.put(path, {"metadata": {"name": KEYS_SECRET}, "data": data})


@pytest.fixture
def two(api: FakeKubeApi, engines: dict[str, ScriptedEngine]) -> Iterator[TwoNamespaces]:
    put_keys(api)
    with running_gateway(settings()) as gateway:
        yield TwoNamespaces(api, engines, gateway)


@dataclass
class Known:
    ever_read: bool = True
    first_seen: dict[str, int] = field(default_factory=dict)


def served(**names: tuple[str, ...]) -> ServedModels:
    return ServedModels({space: Known(True, dict.fromkeys(found, 1)) for space, found in names.items()})


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("alone", ["a/alone"]),
        ("a/alone", ["a/alone"]),
        ("b/alone", []),
        ("both", ["a/both", "b/both"]),
        ("b/both", ["b/both"]),
        ("org/large", ["b/org/large"]),
        ("b/org/large", ["b/org/large"]),
        ("a/odd", ["a/odd"]),
        ("b/a/odd", ["b/a/odd"]),
        ("/alone", []),
        ("alone/", []),
        ("", []),
        ("c/alone", []),
    ],
)
def test_a_name_means_the_same_whatever_came_first(asked: str, meant: list[str]) -> None:
    """`b` serves a model that is called `a/odd`, which is the full name of another."""
    first, other = ("alone", "both", "odd"), ("both", "org/large", "a/odd")
    for models in (served(a=first, b=other), served(b=other, a=first)):
        assert sorted(model.full_name for model in models.meant_by(asked)) == meant
        for model in models.listed():
            assert models.meant_by(models.id_of(model)) == (model,), "an id means its model and no other"
            assert models.meant_by(model.full_name) == (model,)


SEGMENTS = st.lists(st.sampled_from(["a", "b", "x"]), min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sets(SEGMENTS), min_size=1), SEGMENTS)
def test_every_model_has_an_id_of_its_own_and_no_name_means_what_is_not_called_so(
    names: dict[str, set[str]], asked: str
) -> None:
    models = served(**{namespace: tuple(sorted(found)) for namespace, found in names.items()})
    listed = list(models.listed())
    ids = [models.id_of(model) for model in listed]
    assert len(set(ids)) == len(ids), ids
    for model, its_id in zip(listed, ids, strict=True):
        assert models.meant_by(its_id) == models.meant_by(model.full_name) == (model,)
    for model in models.meant_by(asked):
        assert asked in (model.name, model.full_name)
    assert bool(models.meant_by(asked)) == any(asked in (model.name, model.full_name) for model in listed)


def test_on_one_machine_a_name_with_a_slash_is_only_a_name() -> None:
    models = ServedModels({"": Known(True, {"org/large": 1, "tiny": 1})})
    assert models.meant_by("org/large") == (ServedModel("", "org/large"),)
    assert models.meant_by("/tiny") == ()
    assert [models.id_of(model) for model in models.listed()] == ["org/large", "tiny"]


def test_a_bare_name_is_enough_while_it_is_one_models_and_a_full_one_always_is(two: TwoNamespaces) -> None:
    two.serve("here", "tiny")
    two.serve("there", "large")
    assert two.listed() == {"tiny": "here/tiny", "large": "there/large"}
    for name, text in {
        "tiny": "from here", "here/tiny": "from here", "large": "from there", "there/large": "from there"
    }.items():  # fmt: skip
        assert two.ask(name) == (200, text)
    assert two.ask("there/tiny")[0] == 404
    found = two.gateway.http.get("/v1/models/there/large").json()
    assert (found["id"], found["namespace"], found["full_name"]) == ("large", "there", "there/large")


def test_a_bare_name_of_two_models_is_refused_with_both_until_one_of_them_goes(two: TwoNamespaces) -> None:
    two.serve("here")
    two.serve("there")
    assert two.listed() == {"here/tiny": "here/tiny", "there/tiny": "there/tiny"}
    for path in ("/v1/completions", "/tokenize"):
        refused = two.gateway.http.post(path, json={"model": "tiny", "prompt": "x"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "model_ambiguous", "model")
        assert "'here/tiny' or 'there/tiny'" in error["message"]
    assert (two.ask("here/tiny"), two.ask("there/tiny")) == ((200, "from here"), (200, "from there"))
    two.api.delete(MODELS, "tiny")
    two.until(lambda: two.listed() == {"tiny": "there/tiny"})
    assert two.ask("tiny") == (200, "from there")


def test_each_namespaces_engines_are_shown_its_own_key_alone(two: TwoNamespaces) -> None:
    for engine in two.engines.values():
        engine.replies["POST /v1/tokenize"] = (200, '{"token_ids": [5], "max_model_len": 99}')
        engine.replies["GET /stages"] = (200, "{}")
    two.serve("here")
    two.serve("there")
    for namespace, engine in two.engines.items():
        name = f"{namespace}/tiny"
        two.until(lambda name=name: two.ask(name)[0] == 200)
        assert two.gateway.http.post("/tokenize", json={"model": name, "prompt": "x"}).status_code == 200
        two.gateway.http.get("/pipeline", params={"model": name})
        assert len(engine.asked_with) == 2, engine.asked
        assert {asked["authorization"] for asked in engine.asked_with} == {f"Bearer {KEYS[namespace]}"}


def test_what_is_counted_says_whose_model_it_was(two: TwoNamespaces) -> None:
    two.serve("here")
    two.serve("there")
    assert [two.ask(name)[0] for name in ("here/tiny", "there/tiny", "there/tiny", "tiny", "none")] == [
        200, 200, 200, 400, 404,
    ]  # fmt: skip
    two.gateway.settle()
    counted = {
        tuple(dict(own)[one] for one in ("namespace", "model_name", "code") if one in dict(own)): value
        for (name, own), value in two.gateway.samples().items()
        if name == REQUESTS
    }
    assert counted == {
        ("here", "tiny", "200"): 1, ("there", "tiny", "200"): 2, ("system", "400"): 1, ("system", "404"): 1,
    }  # fmt: skip
    for namespace in ("here", "there"):
        assert two.gateway.sample("stageline_gateway_groups", namespace=namespace, model_name="tiny", ready="true") == 1
    two.api.delete(MODELS, "tiny")
    two.until(lambda: two.listed() == {"tiny": "there/tiny"})
    groups = [own for name, own in two.gateway.samples() if name == "stageline_gateway_groups"]
    assert {dict(own)["namespace"] for own in groups} == {"there"}, "a model that is gone has no groups"


def test_a_namespace_that_may_not_be_read_is_named_and_keeps_no_other_from_being_served(
    api: FakeKubeApi, engines: dict[str, ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    put_keys(api)
    forbidden = {path for here, path in ELSEWHERE.items() if here != SECRETS}
    api.forbidden |= forbidden
    with running_gateway(settings()) as gateway:
        two = TwoNamespaces(api, engines, gateway)
        two.serve("here")
        two.until(lambda: gateway.admin.get("/accepting").status_code == 200)
        assert two.ask("tiny") == (200, "from here")
        assert gateway.http.get("/readyz").status_code == 200
        two.until(lambda: len(gateway.admin.get("/status").json()["problems"][0].split("403")) == 3)
        (problem,) = gateway.admin.get("/status").json()["problems"]
        assert problem.startswith("namespace there can't be read: this gateway's Role there is missing"), problem
        assert "list pods: 403" in problem
        assert (gateway.sample(STALE, namespace="here"), gateway.sample(STALE, namespace="there")) == (0, 1)
        status, text = two.ask("elsewhere")
        assert (status, "not learned yet" in text, "there" in text) == (503, True, False), text
        told = [one.message for one in caplog.records if "namespace there can't be read" in one.message]
        assert len(told) == len(set(told)), "the same is not told again and again"

        api.forbidden -= forbidden
        two.serve("there")
        assert two.ask("there/tiny") == (200, "from there")
        two.until(lambda: gateway.sample(STALE, namespace="there") == 0)
        assert two.ask("elsewhere")[0] == 404


def test_a_namespace_whose_role_is_taken_away_is_known_for_a_while_and_then_forgotten(api: FakeKubeApi) -> None:
    """A refusal may be a moment's. One that lasts must not keep a name from being another namespace's alone."""

    async def run() -> None:
        found = DiscoveredGroups("namespace here")
        discovery = KubernetesDiscovery("here", found, 1, EngineKey(), forget_seconds=math.inf)
        watch = asyncio.create_task(discovery.run())
        api.put(MODELS, {"metadata": {"name": "tiny"}, "spec": {"model": {"source": "file:///m"}}})
        await until(lambda: found.models() == ("tiny",), "it is found")
        api.forbidden |= {PODS, MODELS}
        api.expire()
        await until(lambda: len(found.problem.split("403")) == 3, "both are refused")
        assert found.models() == ("tiny",), "what was read last stays in force"
        discovery.forget_seconds = 0.0
        await until(lambda: found.models() == (), "it is forgotten")
        assert "403" in found.problem, "and that it may not be read is still said"
        api.forbidden.clear()
        await until(lambda: (found.models(), found.problem) == (("tiny",), ""), "it is read again")
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    asyncio.run(run())


def test_nobody_is_sent_here_before_any_namespace_could_be_read(
    api: FakeKubeApi, engines: dict[str, ScriptedEngine]
) -> None:
    api.forbidden |= {MODELS, ELSEWHERE[MODELS]}
    with running_gateway(settings()) as gateway:
        two = TwoNamespaces(api, engines, gateway)
        eventually(
            lambda: {"here", "there"} <= set(gateway.admin.get("/accepting").json()["message"].split()),
            lambda: gateway.admin.get("/accepting").text,
        )
        assert gateway.admin.get("/accepting").status_code == 503
        api.forbidden.clear()
        two.until(lambda: gateway.admin.get("/accepting").status_code == 200)


def test_an_answer_is_never_continued_by_a_namesake_in_another_namespace(two: TwoNamespaces) -> None:
    """Not even where it says that it is of the same revision."""
    two.serve("here")
    two.serve("there")
    two.engines["here"].script = lambda _: [
        Say(Admitted(prompt_tokens=1)), Say(Delta(text="a", token_ids=(1,))), Drop(),
    ]  # fmt: skip
    status, text = two.ask("here/tiny")
    assert (status, "No group of its revision could continue" in text) == (502, True), text
    assert two.engines["there"].requests == []


def test_a_request_for_a_model_at_zero_waits_and_is_counted_in_its_own_namespace(
    api: FakeKubeApi, engines: dict[str, ScriptedEngine]
) -> None:
    put_keys(api)
    with running_gateway(settings(start_hold_seconds=3600)) as gateway, ThreadPoolExecutor() as pool:
        two = TwoNamespaces(api, engines, gateway)
        two.serve("here")
        two.model("there", replicas=0)
        two.until(lambda: "there/tiny" in two.listed())
        waiting = pool.submit(two.ask, "there/tiny")
        two.until(lambda: gateway.sample(QUEUED, namespace="there", model_name="tiny") == 1)
        assert gateway.sample(QUEUED, namespace="here", model_name="tiny") == 0
        assert gateway.admin.get("/status").json()["queued_requests"] == {"there/tiny": 1}
        two.model("there", replicas=1)
        two.group("there")
        assert waiting.result(60) == (200, "from there")


def test_the_queues_of_two_namesakes_are_two(api: FakeKubeApi, engines: dict[str, ScriptedEngine]) -> None:
    put_keys(api)
    with ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(settings(queue_limit=1)))
        pool = stack.enter_context(ThreadPoolExecutor())
        two = TwoNamespaces(api, engines, gateway)
        two.serve("here")
        two.serve("there")
        engines["here"].script = lambda _: [Hold(), *answer("at last")]
        waiting = pool.submit(two.ask, "here/tiny")
        two.until(lambda: gateway.sample(QUEUED, namespace="here", model_name="tiny") == 1)
        assert two.ask("there/tiny") == (200, "from there")
        assert two.ask("here/tiny")[0] == 503, "its queue is full"
        engines["here"].release()
        assert waiting.result(60) == (200, "at last")


CALLERS: dict[str, list[str] | None] = {
    "anyone": None, "bare": ["tiny"], "full": ["here/tiny"], "whole": ["there/*"], "none": ["here/large"],
}  # fmt: skip


@pytest.fixture
def keyed(api: FakeKubeApi, engines: dict[str, ScriptedEngine], tmp_path: Path) -> Iterator[TwoNamespaces]:
    """The same with API keys, whose lists name models in each of their forms."""
    put_keys(api)
    entries = [
        {"name": name, "key": f"sk-{name}-0123456789"} | ({} if models is None else {"models": models})
        for name, models in CALLERS.items()
    ]
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": entries}))
    with running_gateway(settings(keys_path=path)) as gateway:
        gateway.http.headers["authorization"] = "Bearer sk-anyone-0123456789"
        yield TwoNamespaces(api, engines, gateway)


def test_a_key_opens_what_its_list_means_and_a_bare_name_means_nothing_while_two_have_it(keyed: TwoNamespaces) -> None:
    def ask(who: str, model: str) -> tuple[int, str]:
        return keyed.ask(model, authorization=f"Bearer sk-{who}-0123456789")

    def listed(who: str) -> set[str]:
        return set(keyed.listed(authorization=f"Bearer sk-{who}-0123456789"))

    keyed.serve("here")
    assert [ask(who, "tiny")[0] for who in CALLERS] == [200, 200, 200, 403, 403]
    assert ask("bare", "here/tiny") == (200, "from here"), "the only one of that name"
    assert ask("whole", "there/tiny")[0] == 404, "its namespace, and nothing there yet"

    keyed.serve("there")
    assert ask("anyone", "tiny")[0] == 400
    assert ask("full", "tiny") == (200, "from here"), "the only one that it may use"
    assert ask("whole", "tiny") == (200, "from there")
    assert ask("whole", "here/tiny")[0] == 403
    for name in ("tiny", "there/tiny", "here/tiny"):
        status, text = ask("bare", name)
        assert (status, "must say which one, as namespace/name" in text) == (403, True), text
        assert "here/tiny" not in text.replace(name, ""), "nobody learns of models that their key doesn't open"
    assert [listed(who) for who in CALLERS] == [
        {"here/tiny", "there/tiny"}, set(), {"here/tiny"}, {"there/tiny"}, set(),
    ]  # fmt: skip
    refused = keyed.gateway.http.get("/v1/models/here/tiny", headers={"authorization": "Bearer sk-whole-0123456789"})
    assert refused.status_code == 403, refused.text


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--namespace", "a,B"], {}, '"B" is not the name of a namespace'),
        (["--namespace", ""], {}, '"" is not the name of a namespace'),
        (["--namespace", "a/b"], {}, '"a/b" is not the name of a namespace'),
        ([], {env.GATEWAY_NAMESPACES: "a,,b"}, '"" is not the name of a namespace'),
        (
            ["--namespace", "a,b"],
            {env.ENGINE_KEYS: "k" * 20},
            f"{env.ENGINE_KEYS}: leave it out: of several namespaces",
        ),
    ],
)
def test_the_command_refuses_what_names_no_namespace_and_one_key_for_several(
    api: FakeKubeApi,  # noqa: ARG001 - there is a way to log in
    arguments: list[str],
    variables: dict[str, str],
    said: str,
) -> None:
    result = CliRunner().invoke(gateway_command, ["--kubernetes", *arguments], env=variables)
    assert result.exit_code != 0
    assert said in f"{result.output} {result.exception}"
    assert "k" * 20 not in f"{result.output} {result.exception}"
