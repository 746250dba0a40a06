"""Real groups whose processes talk by mutual TLS: the same answers, nothing in clear, and nobody else gets in."""

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import trustme

from oracles.pipeline_checks import draw_prompts, greedy
from oracles.tiny_models import VOCAB_SIZE, write_tiny_llama
from processes.model_certificates import NAME, expired, replace_certificates, write_certificates
from processes.running_group import RunningGroup, page, running_group, start_process
from processes.wire_recorder import recorded_wire
from stageline_api import env, ports
from stageline_api.engine_http import SamplingParams
from stageline_api.runtime_config import Timeouts, TlsConfig
from stageline_local.node.addresses import AddressPool

PROMPTS = draw_prompts(3, VOCAB_SIZE, 40)
SAMPLINGS = [SamplingParams(temperature=0.8, seed=index, max_tokens=24, ignore_eos=True) for index in range(3)]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "model", num_layers=6)


def test_a_group_answers_the_same_by_tls_and_whoever_listens_hears_no_plan(
    model_dir: Path, tmp_path: Path, authority: trustme.CA
) -> None:
    """The last stage reaches the engine by way of a recorder, which hears prompts in clear without TLS."""
    answers, heard = {}, {}
    for name, tls in {"clear": None, "tls": write_certificates(tmp_path / "certificates", authority)}.items():
        beside = AddressPool().lease()
        held_back = frozenset({"stage-2"})
        with running_group(
            tmp_path / name, model_dir, 3, start=False, held_back=held_back, dtype="float32", tls=tls
        ) as group:
            wire = recorded_wire((beside.address, ports.PLAN_BUS), (group.addresses[0], ports.PLAN_BUS))
            with wire as recording:
                start_process(group, "stage-2", **{env.MASTER_ADDR: beside.address})
                group.wait_ready()
                answers[name] = group.generate_all(PROMPTS, SAMPLINGS)
                heard[name] = bytes(recording.heard)
        beside.release()
    assert answers["tls"] == answers["clear"]
    said = [msgspec.msgpack.encode(prompt) for prompt in PROMPTS]
    words = [b"StepPlan", b"Challenge", b"Hello", str(model_dir).encode()]
    assert all(each in heard["clear"] for each in (*said, *words)), "the recorder hears what is in clear"
    assert len(heard["tls"]) > len(heard["clear"])
    assert not [each for each in (*said, *words) if each in heard["tls"]]
    assert NAME.encode() not in heard["tls"][2000:], "names are said in a greeting alone"


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, authority: trustme.CA) -> Iterator[RunningGroup]:
    """An engine that waits for its stages."""
    directory = tmp_path_factory.mktemp("waiting")
    tls = write_certificates(directory / "certificates", authority)
    held_back = frozenset({"stage-0", "stage-1"})
    with running_group(directory / "group", model_dir, 2, start=False, held_back=held_back, tls=tls) as group:
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        yield group


def knock(group: RunningGroup, context: ssl.SSLContext | None, say: bytes = b"") -> bytes:
    """What the engine's bus says to somebody with these certificates, until it hangs up or greets."""
    with socket.create_connection((group.addresses[0], ports.PLAN_BUS), timeout=60) as connection:
        if context is None:
            connection.sendall(say)
            return received(connection)
        with suppress(ssl.SSLError), context.wrap_socket(connection, server_hostname=NAME) as secure:
            return secure.recv(4096)
    return b""


def received(connection: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(4096):
            found += data
    return found


def client(tls: TlsConfig | None, trusted: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.configure_trust(context)
    if tls is not None:
        context.load_cert_chain(Path(tls.directory) / "tls.crt", Path(tls.directory) / "tls.key")
    return context


def test_strangers_are_refused_with_a_line_each_and_nothing_ends(
    waiting: RunningGroup, authority: trustme.CA, tmp_path: Path
) -> None:
    elsewhere = trustme.CA()
    others: dict[str, TlsConfig | None] = {
        "it shows no certificate": None,
        "unable to get local issuer certificate": write_certificates(tmp_path / "elsewhere", elsewhere),
        "its certificate is for other-stages.default.svc, not for": write_certificates(
            tmp_path / "other", authority, "other-stages.default.svc"
        ),
        "its certificate is for *.default.svc, not for": write_certificates(
            tmp_path / "wildcard", authority, "*.default.svc"
        ),
        "certificate has expired": expired(tmp_path / "expired", authority),
    }
    for words, tls in others.items():
        assert b"Challenge" not in knock(waiting, client(tls, authority)), words
        waiting.wait_until(lambda words=words: words in waiting.log("engine"), words)  # type: ignore[misc]
    assert knock(waiting, client(None, elsewhere)) == b""
    waiting.wait_until(lambda: "unknown ca" in waiting.log("engine"), "the client's own refusal is said")
    for garbage in (
        b"\x08\x00\x00\x00\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + bytes(66000),
    ):
        assert b"Challenge" not in knock(waiting, None, garbage)
    waiting.wait_until(lambda: "it does not speak TLS" in waiting.log("engine"), "who speaks no TLS")
    log = waiting.log("engine")
    assert "refused a connection to the plan bus from 127." in log
    assert "Traceback" not in log
    assert waiting.engine_status()["stages_connected"] == 0
    assert b"Challenge" in knock(waiting, client(waiting.tls, authority)), "one of the model's own is greeted"


def test_strangers_do_not_fill_the_log(waiting: RunningGroup) -> None:
    before = waiting.log("engine").count("refused a connection")
    for _ in range(60):
        knock(waiting, None, b"\x08\x00\x00\x00\xff\xff\xff\xff")
    assert waiting.log("engine").count("refused a connection") - before <= 30


def test_an_older_protocol_is_not_spoken(waiting: RunningGroup, authority: trustme.CA) -> None:
    context = client(waiting.tls, authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert knock(waiting, context) == b""


def test_a_stage_with_a_wrong_certificate_says_so_and_a_right_one_gets_in_after_it(
    waiting: RunningGroup, tmp_path: Path, authority: trustme.CA
) -> None:
    """Runs last of the waiting engine's: the group forms."""
    assert waiting.tls is not None
    config = json.loads((waiting.directory / "config.json").read_text())
    cases = {
        "other": (
            write_certificates(tmp_path / "other", authority, "other.default.svc"),
            "the engine refuses this stage: its certificate is for other",
        ),
        "elsewhere": (write_certificates(tmp_path / "elsewhere", trustme.CA()), "its certificate is not accepted"),
        "missing": (TlsConfig(directory=str(tmp_path / "none"), name=NAME), "tls.crt can't be read: No such file"),
    }
    for name, (tls, words) in cases.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**config, "tls": tls.model_dump()}))
        start_process(waiting, "stage-1", **{env.CONFIG: str(path)})
        assert waiting.wait_ended("stage-1") == 70, waiting.account()
        said = waiting.last_words("stage-1")
        assert (said["failure_class"], said["operation"]) == ("RendezvousTimeout", "tls"), said
        assert words in said["detail"]
        assert "Traceback" not in waiting.log("stage-1")
        assert waiting.processes["engine"].poll() is None
    for stage in ("stage-0", "stage-1"):
        start_process(waiting, stage)
    waiting.wait_ready()
    assert len(waiting.generate(PROMPTS[0], greedy(4))) == 4


def test_the_engine_answers_by_https_alone_and_takes_up_a_renewed_certificate(
    waiting: RunningGroup, tmp_path: Path, authority: trustme.CA
) -> None:
    """Of the group that has formed. One that can't be used leaves the one before in force."""
    assert waiting.tls is not None
    directory = Path(waiting.tls.directory)
    with pytest.raises(httpx.TransportError):
        page(f"http://{waiting.addresses[0]}:{ports.ENGINE_HTTP}/readyz")
    before = shown(waiting, authority)
    key = (directory / "tls.key").read_bytes()
    (directory / "tls.key").write_bytes(b"half")
    waiting.wait_until(lambda: "can't be read again" in waiting.log("engine"), "it says what is wrong")
    assert shown(waiting, authority) == before
    (directory / "tls.key").write_bytes(key)
    write_certificates(tmp_path / "renewed", authority)
    replace_certificates(directory, tmp_path / "renewed")
    waiting.wait_until(lambda: shown(waiting, authority) != before, "it shows the new one")
    assert len(waiting.generate(PROMPTS[0], greedy(4))) == 4


def shown(group: RunningGroup, authority: trustme.CA) -> bytes | None:
    with (
        socket.create_connection((group.addresses[0], ports.ENGINE_HTTP), timeout=60) as connection,
        client(None, authority).wrap_socket(connection, server_hostname=NAME) as secure,
    ):
        return secure.getpeercert(binary_form=True)


def test_a_killed_stage_and_a_killed_engine_are_seen_at_once(
    model_dir: Path, tmp_path: Path, authority: trustme.CA
) -> None:
    for killed, survivors in {
        "stage-1": {"stage-0", "stage-2", "engine"},
        "engine": {"stage-0", "stage-1", "stage-2"},
    }.items():
        tls = write_certificates(tmp_path / killed / "certificates", authority)
        with running_group(tmp_path / killed, model_dir, 3, tls=tls, timeouts=Timeouts(step_seconds=600)) as group:
            group.kill(killed)
            for name in survivors:
                assert group.wait_ended(name) in (71, 73), group.account()
                assert group.last_words(name)["failure_class"] in ("PeerLost", "EngineLost"), group.account()
            assert "Traceback" not in group.account()
