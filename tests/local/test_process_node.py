"""The process node runs pods as the kubelet would: real processes, real signals, real probes."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.node_pods import IMAGE, NodeFixture, is_alive, pod_of, python_container
from stageline_api.errors import UserError
from stageline_cli.up.stage_view import unstartable_message
from stageline_local.node.addresses import AddressPool
from stageline_local.node.pod_fields import UnsupportedPodFieldError

FOREVER = "time.sleep(600)"


def on_node(state_dir: Path, body: Callable[[NodeFixture], Awaitable[None]], **options: Any) -> None:
    """Run `body` with a node, and end every container afterwards."""

    async def _run() -> None:
        fixture = NodeFixture(state_dir, **options)
        try:
            await body(fixture)
        finally:
            await fixture.node.close(grace_seconds=0)
            assert fixture.node.pods() == []

    asyncio.run(_run())


def test_init_containers_run_in_order_before_the_containers(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"volumeMounts": [{"name": "work", "mountPath": "/work/here"}]}
    append = "open('/work/here/order', 'a').write({!r})"
    pod = pod_of(
        python_container(append.format("main ") + "\nprint(open('/work/here/order').read())", **shared),
        initContainers=[
            python_container("time.sleep(0.2);" + append.format("one "), name="one", **shared),
            python_container(append.format("two "), name="two", **shared),
        ],
        volumes=[{"name": "work", "emptyDir": {}}],
    )

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod)
        assert fixture.status()["phase"] == "Pending"
        ended = await fixture.until_ended()
        assert (ended["exitCode"], ended["reason"]) == (0, "Completed")
        assert fixture.log() == "one two main \n"
        assert fixture.status()["phase"] == "Succeeded"

    on_node(tmp_path, body)


def test_a_failed_init_container_fails_the_pod_and_nothing_else_starts(tmp_path: Path) -> None:
    pod = pod_of(python_container(FOREVER), initContainers=[python_container("sys.exit(65)", name="one")])

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod)
        assert (await fixture.until_ended("one"))["exitCode"] == 65
        await fixture.until(lambda: fixture.status()["phase"] == "Failed")
        assert fixture.container("main")["state"] == {"waiting": {"reason": "PodInitializing", "message": ""}}

    on_node(tmp_path, body)


def test_last_words_and_exit_status_are_read_back(tmp_path: Path) -> None:
    script = "open('/dev/termination-log', 'w').write('x' * 5000 + 'the end'); sys.exit(71)"

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(python_container(script)))
        ended = await fixture.until_ended()
        assert (ended["exitCode"], ended["signal"], ended["reason"]) == (71, 0, "Error")
        assert ended["message"].endswith("xthe end")
        assert len(ended["message"]) == 4096
        assert ended["startedAt"] <= ended["finishedAt"]

    on_node(tmp_path, body)


@pytest.mark.parametrize(("exit_code", "words"), [(1, "first\nthe end\n"), (0, "")])
def test_the_end_of_the_log_stands_in_for_last_words_of_a_failure(tmp_path: Path, exit_code: int, words: str) -> None:
    container = python_container(
        f"print('first'); print('the end'); sys.exit({exit_code})", terminationMessagePolicy="FallbackToLogsOnError"
    )

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(container))
        assert (await fixture.until_ended())["message"] == words

    on_node(tmp_path, body)


def test_environment_comes_from_fields_references_and_expansion(tmp_path: Path) -> None:
    environment = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "colour"}}},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "no", "optional": True}}},
        {"name": "URL", "value": "http://$(IP):80/$(NOPE)$$(IP)"},
        {"name": "PEER", "value": "p.stages.default.svc"},
        {"name": "CONFIG", "value": "/etc/app/config.json"},
    ]
    script = (
        "print([os.environ.get(n) for n in 'IP LABEL TOKEN COLOUR ABSENT URL PEER'.split()])\n"
        "print(open(os.environ['CONFIG']).read()); print(sys.argv[1:])"
    )
    mounts = [{"name": "config", "mountPath": "/etc/app"}, {"name": "tmp", "mountPath": "/scratch"}]
    container = python_container(script, env=environment, volumeMounts=mounts, args=["--at=$(IP)", "/scratch/x"])
    volumes = [{"name": "config", "configMap": {"name": "c"}}, {"name": "tmp", "emptyDir": {}}]
    pod = pod_of(container, volumes=volumes, subdomain="stages", hostname="p")

    async def body(fixture: NodeFixture) -> None:
        fixture.store.apply({"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"token": "hush"}})
        data = {"colour": "red", "config.json": '{"dir": "/scratch"}'}
        fixture.store.apply({"kind": "ConfigMap", "metadata": {"name": "c"}, "data": data})
        fixture.node.create_pod(pod)
        ip = fixture.status()["podIP"]
        assert (await fixture.until_ended())["exitCode"] == 0, fixture.log()
        tmp = tmp_path / "pods" / "p" / "volumes" / "tmp"
        assert fixture.log().splitlines() == [
            str([ip, "x", "hush", "red", None, f"http://{ip}:80/$(NOPE)$(IP)", ip]),
            f'{{"dir": "{tmp}"}}',
            str([f"--at={ip}", f"{tmp}/x"]),
        ]

    on_node(tmp_path, body)


def test_a_secret_is_mounted_as_private_files(tmp_path: Path) -> None:
    script = "print(open('/etc/keys/k'.replace('/etc/keys', sys.argv[1])).read())"
    container = python_container(
        script, volumeMounts=[{"name": "keys", "mountPath": "/etc/keys", "readOnly": True}], args=["/etc/keys"]
    )
    pod = pod_of(container, volumes=[{"name": "keys", "secret": {"secretName": "s"}}])

    async def body(fixture: NodeFixture) -> None:
        fixture.store.apply({"kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "L2V0Yy9rZXlz"}})
        fixture.node.create_pod(pod)
        assert (await fixture.until_ended())["exitCode"] == 0, fixture.log()
        assert fixture.log().strip() == "/etc/keys", "its text is not rewritten"
        (file,) = (tmp_path / "pods" / "p" / "volumes").rglob("k")
        assert file.stat().st_mode & 0o777 == 0o600

    on_node(tmp_path, body)


def test_the_callers_secrets_stay_out_of_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("PIP_NO_INPUT", "1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")

    async def body(fixture: NodeFixture) -> None:
        script = "print([os.environ.get(name) for name in ('HF_TOKEN', 'PIP_NO_INPUT', 'OTEL_TRACES_SAMPLER')])"
        fixture.node.create_pod(pod_of(python_container(script)))
        await fixture.until_ended()
        assert fixture.log() == "[None, '1', 'always_on']\n"

    on_node(tmp_path, body)


def test_a_missing_secret_is_waited_for(tmp_path: Path) -> None:
    reference = {"secretKeyRef": {"name": "s", "key": "token"}}
    container = python_container("print(os.environ['T'])", env=[{"name": "T", "valueFrom": reference}])

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(container))
        await fixture.until(lambda: fixture.container()["state"]["waiting"]["reason"] == "CreateContainerConfigError")
        assert "Secret 's'" in fixture.container()["state"]["waiting"]["message"]
        said = unstartable_message(fixture.node.pods())
        assert said is not None
        assert said.startswith("container main of pod p can't start: CreateContainerConfigError: Secret 's'")
        fixture.store.apply({"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"token": "late"}})
        await fixture.until_ended()
        assert fixture.log() == "late\n"
        assert unstartable_message(fixture.node.pods()) is None

    on_node(tmp_path, body)


def test_an_unknown_image_is_not_run(tmp_path: Path) -> None:
    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(python_container(FOREVER) | {"image": "registry/else:1"}))
        await fixture.until(lambda: fixture.container()["state"].get("waiting", {}).get("reason") == "ErrImagePull")
        assert "'registry/else:1'" in fixture.container()["state"]["waiting"]["message"]
        assert IMAGE in fixture.container()["state"]["waiting"]["message"]

    on_node(tmp_path, body)


def test_a_refused_pod_leaves_nothing_behind(tmp_path: Path) -> None:
    async def body(fixture: NodeFixture) -> None:
        with pytest.raises(UnsupportedPodFieldError, match=r"spec\.hostPID"):
            fixture.node.create_pod(pod_of(python_container(FOREVER), hostPID=True))
        assert fixture.node.pods() == []

    on_node(tmp_path, body)


def test_a_command_that_does_not_exist_ends_as_a_shell_would_say(tmp_path: Path) -> None:
    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of({"name": "main", "image": IMAGE, "command": ["no-such-command"]}))
        assert (await fixture.until_ended())["exitCode"] == 127
        assert "'no-such-command' was not found" in fixture.log()

    on_node(tmp_path, body)


def test_a_killed_container_shows_its_signal_and_the_others_run_on(tmp_path: Path) -> None:
    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(python_container(FOREVER), python_container(FOREVER, name="side")))
        await fixture.until(lambda: fixture.status()["phase"] == "Running")
        pid = fixture.node.pid_of("default", "p", "main")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ended = await fixture.until_ended()
        assert (ended["exitCode"], ended["signal"]) == (137, 9)
        assert "running" in fixture.container("side")["state"]
        assert fixture.status()["phase"] == "Running"
        assert {c["type"]: c["status"] for c in fixture.status()["conditions"]}["Ready"] == "False"

    on_node(tmp_path, body)


def test_deletion_lets_a_container_drain_and_ends_its_whole_group(tmp_path: Path) -> None:
    script = (
        "child = os.fork()\n"
        "if child == 0: time.sleep(600)\n"
        "def drain(*_):\n    print('drained'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, drain)\nprint(child)\ntime.sleep(600)"
    )

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(python_container(script)))
        await fixture.until(lambda: fixture.log().endswith("\n"))
        child = int(fixture.log())
        assert is_alive(child)
        fixture.node.delete_pod("default", "p")
        assert fixture.node.pods()[0]["metadata"]["deletionTimestamp"]
        await fixture.until(lambda: not fixture.node.pods())
        assert fixture.log().splitlines()[1:] == ["drained"]
        await fixture.until(lambda: not is_alive(child))

    on_node(tmp_path, body)


def test_a_container_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up')\nwhile True: time.sleep(600)"

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(python_container(script), terminationGracePeriodSeconds=1))
        await fixture.until(fixture.log)
        pid = fixture.node.pid_of("default", "p", "main")
        assert pid is not None
        fixture.node.delete_pod("default", "p")
        await fixture.until(lambda: not fixture.node.pods())
        assert not is_alive(pid)

    on_node(tmp_path, body)


def test_containers_die_with_the_node(tmp_path: Path) -> None:
    """A node that is killed can't clean up; the kernel does it."""
    driver = (
        "import asyncio, os, sys, pathlib\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n"
        "from cluster.node_pods import *\n"
        "async def main():\n"
        f"    fixture = NodeFixture(pathlib.Path({str(tmp_path / 'inner')!r}))\n"
        "    fixture.node.create_pod(pod_of(python_container('time.sleep(600)')))\n"
        "    await fixture.until(lambda: fixture.status()['phase'] == 'Running')\n"
        "    print('pid', fixture.node.pid_of('default', 'p', 'main'))\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(python_container(driver)))
        # What is printed comes in pieces.
        await fixture.until(lambda: re.search(r"pid \d+\n", fixture.log()))
        inner_pid = int(fixture.log().split()[-1])
        assert is_alive(inner_pid)
        node_pid = fixture.node.pid_of("default", "p", "main")
        assert node_pid is not None
        os.kill(node_pid, signal.SIGKILL)
        await fixture.until(lambda: not is_alive(inner_pid))

    on_node(tmp_path, body)


def test_probes_gate_readiness_and_end_a_container_that_hangs(tmp_path: Path) -> None:
    script = (
        "import http.server, pathlib\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        ok = pathlib.Path('/state' + self.path).exists()\n"
        "        self.send_response(200 if ok else 503); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        "http.server.HTTPServer((os.environ['IP'], 9100), Handler).serve_forever()"
    )
    probe = {"periodSeconds": 0.05, "timeoutSeconds": 60, "failureThreshold": 2}
    container = python_container(
        script,
        env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        ports=[{"name": "health", "containerPort": 9100}],
        volumeMounts=[{"name": "state", "mountPath": "/state"}],
        startupProbe=probe | {"httpGet": {"path": "/alive", "port": "health"}, "failureThreshold": 10**6},
        readinessProbe=probe | {"httpGet": {"path": "/ready", "port": 9100}},
        livenessProbe=probe | {"httpGet": {"path": "/alive", "port": 9100}},
    )
    flags = tmp_path / "flags"
    flags.mkdir()
    pod = pod_of(container, volumes=[{"name": "state", "hostPath": {"path": str(flags)}}])

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod)
        await fixture.until(lambda: "running" in fixture.container()["state"])
        assert (fixture.container()["started"], fixture.container()["ready"]) == (False, False)
        (flags / "alive").touch()
        await fixture.until(lambda: fixture.container()["started"])
        assert fixture.container()["ready"] is False
        (flags / "ready").touch()
        await fixture.until(lambda: fixture.container()["ready"])
        (flags / "ready").unlink()
        await fixture.until(lambda: not fixture.container()["ready"])
        assert "running" in fixture.container()["state"]
        (flags / "alive").unlink()
        ended = await fixture.until_ended()
        assert ended["signal"] == signal.SIGTERM
        assert ended["message"].startswith("liveness probe failed: GET http://127.")

    on_node(tmp_path, body)


def test_exec_and_tcp_probes(tmp_path: Path) -> None:
    script = "import socket\nlistener = socket.create_server((os.environ['IP'], 9100))\ntime.sleep(600)"
    environment = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    fast = {"periodSeconds": 0.05, "timeoutSeconds": 60}
    passes = python_container(
        script, env=environment, readinessProbe=fast | {"tcpSocket": {"port": 9100}}, name="listens"
    )
    test_ip = {"exec": {"command": ["sh", "-c", 'test -n "$IP"']}}
    also = python_container(FOREVER, env=environment, readinessProbe=fast | test_ip, name="exec-passes")
    fails = python_container(FOREVER, readinessProbe=fast | {"exec": {"command": ["false"]}}, name="exec-fails")

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(passes, also, fails))
        await fixture.until(lambda: fixture.container("listens")["ready"] and fixture.container("exec-passes")["ready"])
        assert fixture.container("exec-fails")["ready"] is False

    on_node(tmp_path, body)


def test_a_startup_that_never_succeeds_ends_the_container(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 0.05, "timeoutSeconds": 60, "failureThreshold": 2}

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(pod_of(python_container(FOREVER, startupProbe=probe)))
        assert (await fixture.until_ended())["message"] == "startup probe failed: command exited with status 1"

    on_node(tmp_path, body)


def test_too_little_memory_leaves_a_pod_pending_with_the_sentence(tmp_path: Path) -> None:
    def asking(memory: str, name: str) -> dict[str, Any]:
        return pod_of(python_container(FOREVER, resources={"requests": {"memory": memory}}), name=name)

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(asking("3Gi", "first"))
        fixture.node.create_pod(asking("2Gi", "second"))
        await fixture.until(lambda: fixture.status("first")["phase"] == "Running")
        assert fixture.status("second")["phase"] == "Pending"
        condition = next(c for c in fixture.status("second")["conditions"] if c["type"] == "PodScheduled")
        assert (condition["status"], condition["reason"]) == ("False", "Unschedulable")
        assert condition["message"].startswith("too little memory: pod 'second' requests 2.0 GiB")
        fixture.node.delete_pod("default", "first", grace_seconds=0)
        await fixture.until(lambda: fixture.status("second")["phase"] == "Running")

    on_node(tmp_path, body, memory_bytes=4 * 2**30)


def test_every_pod_has_an_address_of_its_own_across_nodes(tmp_path: Path) -> None:
    async def body(fixture: NodeFixture) -> None:
        other = NodeFixture(tmp_path / "other")
        for number in range(3):
            fixture.node.create_pod(pod_of(python_container(FOREVER), name=f"p{number}"))
            other.node.create_pod(pod_of(python_container(FOREVER), name=f"p{number}"))
        addresses = [pod["status"]["podIP"] for pod in fixture.node.pods() + other.node.pods()]
        assert len(set(addresses)) == 6, addresses
        assert all(address.startswith("127.") for address in addresses)
        await other.node.close(grace_seconds=0)

    on_node(tmp_path, body)


def test_a_port_that_somebody_has_on_all_addresses_is_named(tmp_path: Path) -> None:
    """There would be none to lease in eight million."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        pool = AddressPool(tmp_path, wanted_ports=(port,))
        with pytest.raises(UserError, match=rf"something on this machine listens on \*:{port}"):
            pool.lease()
    pool.lease().release()


def test_an_address_with_a_taken_port_is_passed_over(tmp_path: Path) -> None:
    first = AddressPool(tmp_path).lease()
    first.release()
    with socket.create_server((first.address, 9100)):
        second = AddressPool(tmp_path).lease()
    second.release()
    assert second.address != first.address
