"""Each way in which a vLLM node can end, with real supervisors, sockets and processes of the stand-in for vLLM.

What is asserted is what an operator acts on: that all pods of the group end soon, the class, the words, the peer.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from processes.fake_vllm.tokens import next_token
from processes.vllm_group import (
    SupervisedGroup,
    children_of,
    fake_vllm_path,
    start_supervisor,
    supervised_group,
    wait_until,
)
from stageline_api import ports
from stageline_api.runtime_config import LayerRange, LoraAdapter, Timeouts
from stageline_runtime.plan_bus.messages import Challenge, Ping, PrepareGuide, Shutdown, ToStage


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What supervisors and the stand-in read of a model: its sizes."""
    directory = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(sizes | heads | kind))
    return directory


def assert_lost(group: SupervisedGroup, stage: int, peer: int) -> None:
    """This stage ended because of the other, and says so."""
    assert group.wait_end(stage) == 71, group.explain()
    words = group.last_words(stage)
    assert (words["failure_class"], words["peer"]) == ("PeerLost", peer), group.explain()


def assert_failed(group: SupervisedGroup, stage: int, failure_class: str, *parts: str) -> dict[str, Any]:
    group.wait_end(stage)
    words = group.last_words(stage)
    assert words["failure_class"] == failure_class, group.explain()
    assert words["stage"] == stage
    for part in parts:
        assert part in words["detail"], group.explain()
    return words


def is_gone(pid: int) -> bool:
    return (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )


def test_a_group_forms_answers_and_drains(tmp_path: Path, model_dir: Path) -> None:
    """Two nodes over one pipeline, then the word of the engine, after which nothing of them is left."""
    adapter = write_adapter(tmp_path, r=16)
    cut = (LayerRange(first=0, last=2), LayerRange(first=3, last=3))
    with supervised_group(tmp_path, model_dir, lora_adapters=(adapter,), stage_layers=cut) as group:
        group.wait_formed()
        answer = group.generate(max_tokens=5)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == 5
        for stage, layers in enumerate(cut):
            status = group.status(stage)
            assert status["phase"] == "Ready"
            assert status["layers"] == layers.model_dump()
            assert status["steps"] == 5
        url = f"http://{group.addresses[0]}:{ports.VLLM_HTTP}/v1/models"
        listed = httpx.get(url, headers=group.headers).json()["data"]
        assert [each["id"] for each in listed] == ["tiny", "pirate"]
        workers = [group.worker_pid(stage) for stage in (0, 1)]
        group.say(Shutdown("a test"))
        assert [group.wait_end(stage) for stage in (0, 1)] == [0, 0], group.explain()
        assert group.last_words(1)["detail"] == "told to drain by a test"
        assert all(map(is_gone, workers))


def write_adapter(directory: Path, **config: object) -> LoraAdapter:
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoraAdapter(name="pirate", path=str(directory))


def test_the_series_of_a_stage_sum_to_wall_time(tmp_path: Path, model_dir: Path) -> None:
    with supervised_group(tmp_path, model_dir) as group:
        group.wait_formed()
        began, earlier = time.monotonic(), [stage_seconds(group, stage) for stage in (0, 1)]
        working = time.monotonic()
        group.generate(max_tokens=20)
        worked = time.monotonic()
        later, ended = [stage_seconds(group, stage) for stage in (0, 1)], time.monotonic()
        for before, after in zip(earlier, later, strict=True):
            for counted in (after.wall - before.wall, after.spent - before.spent):
                assert worked - working <= counted <= ended - began, "no other clock's time"
        for address in group.addresses:
            page = httpx.get(f"http://{address}:{ports.STAGE_HEALTH}/metrics").text
            assert total(page, "stageline_stage_steps_total") == 20
            assert total(page, "stageline_stage_busy_seconds_total") > 0
            timeline = httpx.get(f"http://{address}:{ports.STAGE_HEALTH}/timeline?since_seq=17").json()
            assert [step["seq"] for step in timeline["steps"]] == [18, 19, 20]
            assert {step["kind"] for step in timeline["steps"]} == {"decode"}
        group.say(Ping(1))
        wait_until(lambda: len(group.pongs) == 2, group.explain)
        assert {tuple(moments.seq for moments in pong.moments) for pong in group.pongs.values()} == {(*range(1, 21),)}


class StageSeconds(NamedTuple):
    spent: float
    """In all states."""
    wall: float


def stage_seconds(group: SupervisedGroup, stage: int) -> StageSeconds:
    page = httpx.get(f"http://{group.addresses[stage]}:{ports.STAGE_HEALTH}/metrics").text
    spent = sum(total(page, f"stageline_stage_{part}_seconds_total") for part in ("busy", "wait", "idle"))
    wall = total(page, "stageline_stage_wall_seconds_total")
    assert spent == pytest.approx(wall, rel=1e-6)
    return StageSeconds(spent, wall)


def total(page: str, name: str) -> float:
    """The sum of a metric's samples."""
    found = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith(f"{name}{{")]
    assert found, page
    return sum(map(float, found))


@pytest.mark.parametrize(("victim", "loaded"), [(0, True), pytest.param(1, False, marks=pytest.mark.thorough)])
def test_a_killed_worker_ends_the_group_at_once(tmp_path: Path, model_dir: Path, victim: int, loaded: bool) -> None:
    with supervised_group(tmp_path, model_dir, environment={"FAKE_VLLM_STEP_SECONDS": "0.05"}) as group:
        group.wait_formed()
        if loaded:
            group.work(True)
            start_request(group)
        os.kill(group.worker_pid(victim), signal.SIGKILL)
        other = 1 - victim
        assert_failed(group, victim, "Killed", "worker was killed")
        assert_lost(group, other, peer=victim)


def start_request(group: SupervisedGroup) -> None:
    """A long answer under way, whose end nobody waits for."""

    def ask() -> None:
        try:
            group.generate(max_tokens=500)
        except httpx.HTTPError:
            pass

    before = group.status(0)["steps"]
    threading.Thread(target=ask, daemon=True).start()
    wait_until(lambda: group.status(0)["steps"] > before + 2, group.explain)


@pytest.mark.thorough
def test_a_killed_supervisor_takes_its_node_along(tmp_path: Path, model_dir: Path) -> None:
    """As when a container is killed: nothing of the stage stays, and the other stage names it."""
    with supervised_group(tmp_path, model_dir) as group:
        group.wait_formed()
        (node,) = children_of(group.processes[1].pid)
        worker = group.worker_pid(1)
        group.processes[1].kill()
        assert_lost(group, 0, peer=1)
        wait_until(lambda: is_gone(node) and is_gone(worker), group.explain)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_stopped_worker_is_found_by_the_watchdog(tmp_path: Path, model_dir: Path, victim: int) -> None:
    limits = Timeouts(step_seconds=2)
    with supervised_group(tmp_path, model_dir, timeouts=limits) as group:
        group.wait_formed()
        os.kill(group.worker_pid(victim), signal.SIGSTOP)
        time.sleep(2.5)  # longer than a step may take: idle nothing has to advance
        assert group.processes[victim].poll() is None, group.explain()
        group.work(True)
        words = assert_failed(group, victim, "StepTimeout", "worker stopped took longer than 2 s")
        assert words["operation"] == "worker stopped"
        assert group.processes[victim].returncode == 72
        assert_lost(group, 1 - victim, peer=victim)


@pytest.mark.thorough
def test_a_worker_that_hangs_in_a_step_names_its_operation(tmp_path: Path, model_dir: Path) -> None:
    environment = {"FAKE_VLLM_FAULTS": "1:step3:hang"}
    with supervised_group(tmp_path, model_dir, timeouts=Timeouts(step_seconds=2), environment=environment) as group:
        group.wait_formed()
        group.work(True)
        start_hanging_request(group)
        words = assert_failed(group, 1, "StepTimeout", "took longer than 2 s")
        assert (words["operation"], words["peer"], words["step"]) == ("forward", None, 3), words
        assert_lost(group, 0, peer=1)


def start_hanging_request(group: SupervisedGroup) -> None:
    def ask() -> None:
        try:
            group.generate(max_tokens=50)
        except httpx.HTTPError:
            pass

    threading.Thread(target=ask, daemon=True).start()


FAULTS = {
    "weights": ("1:load:no-weights", "ModelLoad", 65, "Following weights were not initialized from checkpoint"),
    "device-memory": ("1:load:device-memory", "OutOfMemory", 66, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cache": ("0:cache:no-cache", "OutOfMemory", 66, "No available memory for the cache blocks"),
    "last stage": ("1:step2:raise", "Internal", 1, "vLLM's worker failed: RuntimeError: the kernel refused"),
}


@pytest.mark.parametrize(
    "name",
    ["weights", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("device-memory", "cache", "last stage"))],
)
def test_the_words_kept_are_those_of_the_first_failure(tmp_path: Path, model_dir: Path, name: str) -> None:
    """Not the sixty lines of shutdown that follow, nor what the other node says of it."""
    fault, failure_class, code, words = FAULTS[name]
    stage = int(fault[0])
    with supervised_group(tmp_path, model_dir, environment={"FAKE_VLLM_FAULTS": fault}) as group:
        if "step" in fault:
            group.wait_formed()
            start_hanging_request(group)
        assert_failed(group, stage, failure_class, words)
        assert group.processes[stage].returncode == code
        assert_lost(group, 1 - stage, peer=stage)


def test_an_exception_that_vllm_drops_ends_the_group_before_a_wrong_token_is_out(
    tmp_path: Path, model_dir: Path
) -> None:
    """The first stage's worker: vLLM logs it and goes on, and from then on tokens would be those of other steps."""
    with supervised_group(tmp_path, model_dir, environment={"FAKE_VLLM_FAULTS": "0:step9:raise"}) as group:
        group.wait_formed()
        tokens = tokens_until_it_breaks(group)
        words = assert_failed(group, 0, "Internal", "vLLM's worker failed: RuntimeError: the kernel refused")
        assert_lost(group, 1, peer=0)
        assert words["operation"] == "run vLLM"
        assert tokens == right_tokens(8), group.explain()
        assert "in _compute" in group.log(0), "the traceback is in the log"


@pytest.mark.thorough
def test_a_worker_that_outlives_its_exception_is_found_by_what_it_wrote(tmp_path: Path, model_dir: Path) -> None:
    """Should the plugin not get to end it, as with a log that nobody reads."""
    faults = {"FAKE_VLLM_FAULTS": "0:step2:raise", "FAKE_VLLM_OUTLIVES": "1"}
    with supervised_group(tmp_path, model_dir, environment=faults) as group:
        group.wait_formed()
        worker = group.worker_pid(0)
        tokens = tokens_until_it_breaks(group)
        assert tokens[:3] != right_tokens(3), "the stand-in goes on with wrong ones, or nothing is shown here"
        assert_failed(group, 0, "Internal", "vLLM's worker failed: RuntimeError: the kernel refused")
        assert is_gone(worker)


PROMPT = (1, 2, 3)


def right_tokens(count: int) -> list[int]:
    """The stand-in's greedy answer to the prompt of `generate`."""
    ids = list(PROMPT)
    for drawn in range(count):
        ids.append(next_token(ids, {"temperature": 0}, draws=drawn, vocabulary=512, adapter=None))
    return ids[len(PROMPT) :]


def tokens_until_it_breaks(group: SupervisedGroup) -> list[int]:
    """What a client gets of a long answer before the group is gone."""
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 1000}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
    url = f"http://{group.addresses[0]}:{ports.VLLM_HTTP}/inference/v1/generate"
    tokens: list[int] = []
    try:
        with httpx.stream("POST", url, json=body, headers=group.headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and "choices" in (chunk := json.loads(line.removeprefix("data: "))):
                    tokens += chunk["choices"][0]["token_ids"]
    except httpx.HTTPError:
        pass
    return tokens


@pytest.mark.thorough
def test_an_error_that_did_no_harm_is_not_the_cause_of_a_later_death(tmp_path: Path, model_dir: Path) -> None:
    with supervised_group(tmp_path, model_dir, environment={"FAKE_VLLM_FAULTS": "1:step2:complain"}) as group:
        group.wait_formed()
        group.generate(max_tokens=3)
        time.sleep(0.3)  # a look at the node between; nothing tells of it
        group.generate(max_tokens=20)
        wait_until(lambda: group.status(1)["steps"] >= 23, group.explain)
        time.sleep(0.3)
        os.kill(group.worker_pid(1), signal.SIGKILL)
        words = assert_failed(group, 1, "Killed", "worker was killed")
        assert "bad request" not in words["detail"]
        assert "bad request" in group.explain()


@pytest.mark.thorough
def test_code_that_vllm_is_told_to_run_and_nobody_has_fetched_ends_the_group(tmp_path: Path, model_dir: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    fields = json.loads((model_dir / "config.json").read_text()) | {"auto_map": {"AutoConfig": "own_config.Config"}}
    (directory / "config.json").write_text(json.dumps(fields))
    with supervised_group(tmp_path, directory, extra_args=("--trust-remote-code",)) as group:
        words = assert_failed(group, 0, "BadConfig", "config.json wants own_config.py, which is not in")
        assert words["operation"] == "check the model's code"
        assert group.processes[0].returncode == 64


@pytest.mark.thorough
def test_an_adapter_that_vllm_has_no_room_for_ends_the_group_before_vllm_starts(
    tmp_path: Path, model_dir: Path
) -> None:
    adapter = write_adapter(tmp_path, r=64)
    with supervised_group(tmp_path, model_dir, stage_count=1, lora_adapters=(adapter,)) as group:
        words = assert_failed(group, 0, "BadConfig", "loraAdapters[0] (pirate, ", "its rank is 64, more than the 16")
        assert words["operation"] == "check the LoRA adapters"
        assert group.processes[0].returncode == 64
        assert "said_by_vllm" not in group.log(0)


@pytest.mark.thorough
def test_an_adapter_that_vllm_cannot_load_is_a_bad_configuration(tmp_path: Path, model_dir: Path) -> None:
    """It loads them last, when its workers are ready, and ends; trying again helps nobody."""
    adapter, faults = write_adapter(tmp_path, r=8), {"FAKE_VLLM_FAULTS": "0:adapters:no-adapter"}
    with supervised_group(tmp_path, model_dir, lora_adapters=(adapter,), environment=faults) as group:
        words = assert_failed(
            group, 0, "BadConfig", "can't load an adapter of spec.engine.loraAdapters", "SafetensorError: Error while"
        )
        assert words["operation"] == "load the LoRA adapters"
        assert group.processes[0].returncode == 64
        assert_lost(group, 1, peer=0)


@pytest.mark.thorough
def test_a_follower_that_ends_undrained_with_status_0_has_failed(tmp_path: Path, model_dir: Path) -> None:
    with supervised_group(tmp_path, model_dir) as group:
        group.wait_formed()
        (node,) = children_of(group.processes[1].pid)
        os.kill(node, signal.SIGTERM)
        group.wait_end(1)
        assert group.processes[1].returncode != 0, group.explain()
        assert "ended with status 0 without having been told to drain" in group.last_words(1)["detail"]
        assert_lost(group, 0, peer=1)


@pytest.mark.thorough
def test_what_the_kernel_ends_for_want_of_memory_is_told_as_such(tmp_path: Path, model_dir: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nmax 12\noom 1\noom_kill 1\n")
    program = (
        "import sys, stageline_vllm.supervisor.process as process\n"
        "from stageline_runtime.contract import read_contract\nfrom pathlib import Path\n"
        f"sys.exit(process.Supervisor(read_contract(), memory_events=Path({str(events)!r})).run())"
    )
    with supervised_group(tmp_path, model_dir, command=("-c", program)) as group:
        group.wait_formed()
        events.write_text("low 0\nmax 40\noom 2\noom_kill 2\n")
        os.kill(group.worker_pid(1), signal.SIGKILL)
        assert_failed(group, 1, "OutOfMemory", "the kernel ended a process of vLLM because memory ran out")
        assert group.processes[1].returncode == 66


@pytest.mark.thorough
def test_sigterm_asks_the_engine_to_drain_first(tmp_path: Path, model_dir: Path) -> None:
    with supervised_group(tmp_path, model_dir) as group:
        group.wait_formed()
        group.processes[1].send_signal(signal.SIGTERM)
        wait_until(lambda: group.drain_asked_by == [1], group.explain)
        assert group.status(1)["phase"] == "Draining"
        assert group.generate(max_tokens=3).status_code == 200, "what runs goes on"
        group.say(Shutdown("SIGTERM to stage 1"))
        assert [group.wait_end(stage) for stage in (0, 1)] == [0, 0], group.explain()


@pytest.mark.thorough
def test_vllms_server_answers_nobody_but_the_engine_and_the_supervisor(tmp_path: Path, model_dir: Path) -> None:
    with supervised_group(tmp_path, model_dir) as group:
        group.wait_formed()
        for shown in ({}, {"authorization": "Bearer x"}, {"authorization": f"Bearer {group.contract.bus_token}"}):
            assert set(group.statuses(**shown).values()) == {401}, shown
        known = group.statuses(**group.headers)
        assert (known["POST /inference/v1/generate"], known["GET /metrics"], known["GET /health"]) == (200, 200, 200)
        assert known["GET /no-such-path"] == 404
        nodes = [children_of(group.processes[stage].pid)[0] for stage in (0, 1)]
        lines = [Path(f"/proc/{node}/cmdline").read_text() for node in nodes]
        assert not any(group.key in text for text in (*lines, group.log(0), group.log(1)))
        variables = [Path(f"/proc/{node}/environ").read_text() for node in nodes]
        assert [group.key in text for text in variables] == [True, False], "the other node has no server"


def test_a_stranger_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with supervised_group(tmp_path, model_dir) as group:
        group.wait_formed()
        stranger = start_supervisor(group, 1, {"STAGELINE_POD_IP": "127.0.0.1"}, token="wrong", name="stranger")
        assert stranger.wait(60) == 64, (group.directory / "stranger.log").read_text()
        assert "the plan bus token is wrong" in (group.directory / "stranger.termination").read_text()
        assert group.generate(max_tokens=2).status_code == 200, "the group is none the worse for it"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("message", "words"),
    [
        (PrepareGuide(1, "{}"), "a plan for a stage that vLLM schedules"),
        pytest.param(Challenge("again"), "a second handshake", marks=pytest.mark.thorough),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_another_stage_understands_is_refused(
    tmp_path: Path, model_dir: Path, message: ToStage, words: str
) -> None:
    """An engine that says it has a stage of its own runtime before it."""
    with supervised_group(tmp_path, model_dir, stage_count=1) as group:
        group.wait_formed()
        group.say(message)
        assert group.wait_end(0) == 73, group.explain()
        assert_failed(group, 0, "EngineLost", words)


def test_another_version_of_vllm_is_refused_with_a_sentence(tmp_path: Path, model_dir: Path) -> None:
    site = tmp_path / "site"
    (site / "vllm-0.9.1.dist-info").mkdir(parents=True)
    (site / "vllm-0.9.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n")
    (site / "vllm").mkdir()
    with supervised_group(tmp_path, model_dir, stage_count=1, site=site) as group:
        assert group.wait_end(0) == 64, group.explain()
        assert_failed(group, 0, "BadConfig", "vLLM 0.9.1", "is not supported", "0.32.x")


@pytest.mark.thorough
def test_an_argument_that_vllm_does_not_know_is_a_bad_configuration(tmp_path: Path, model_dir: Path) -> None:
    with supervised_group(tmp_path, model_dir, stage_count=1, extra_args=("--no-such-thing",)) as group:
        assert group.wait_end(0) == 64, group.explain()
        assert_failed(group, 0, "BadConfig", "unrecognized arguments: --no-such-thing")


@pytest.mark.thorough
def test_a_stage_runs_from_files_that_were_copied_beside_vllms_own_image(tmp_path: Path, model_dir: Path) -> None:
    """The init container's copy is all that supervisor, node and worker take of Stageline."""
    files = tmp_path / "files"
    done = subprocess.run(
        [sys.executable, "-m", "stageline_cli.main", "vllm-files", str(files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path = {"PYTHONPATH": f"{files}{os.pathsep}{fake_vllm_path()}"}
    with supervised_group(tmp_path, model_dir, stage_count=1, environment=path) as group:
        group.wait_formed()
        assert group.generate(max_tokens=2).status_code == 200
        (node,) = children_of(group.processes[0].pid)
        variables = Path(f"/proc/{node}/environ").read_bytes().decode().split("\0")
        first = next(each for each in variables if each.startswith("PYTHONPATH=")).partition("=")[2].split(":")[0]
        assert (Path(first) / "stageline_vllm").resolve() == files / "stageline_vllm"


def test_the_supervisor_needs_no_package_that_vllm_does_not_bring() -> None:
    """In vLLM's own image there is nothing of ours but the copied files."""
    program = (
        "import sys, sysconfig, stageline_vllm.supervisor.process, stageline_vllm.supervisor.entry\n"
        "site = sysconfig.get_paths()['purelib']\n"
        "of = lambda m: getattr(m, '__file__', None) or ''\n"
        "print(*sorted({n.split('.')[0] for n, m in list(sys.modules.items()) if of(m).startswith(site)}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    brought = {"annotated_types", "msgspec", "prometheus_client", "pydantic", "pydantic_core", "typing_extensions"}
    brought |= {"pythonjsonlogger"}
    assert set(done.stdout.split()) <= brought | {"typing_inspection", "yaml", "_distutils_hack"}, done.stdout
