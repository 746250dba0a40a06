"""From the end of a vLLM node to a failure class and words, and from steps that don't advance to who is at fault."""

from pathlib import Path

import pytest

from stageline_api.failures import FailureClass
from stageline_vllm.supervisor.outcome import (
    FirstWords,
    Forgetting,
    NodeEnd,
    WorkerFailure,
    failure_of,
    first_of,
    is_lost_connection,
)
from stageline_vllm.supervisor.step_watchdog import BYSTANDER_SECONDS, StepWatchdog, WorkerView
from stageline_vllm.worker_clock import WorkerClock
from stageline_vllm.worker_state import (
    Clock,
    Counters,
    Life,
    Operation,
    State,
    WorkerPhase,
    WorkerState,
    WorkerStateReader,
    WorkerStateWriter,
    worker_state_path,
)

LOG = """
INFO 11-22 14:00:01 [model.py:580] Resolved architecture: LlamaForCausalLM
(Worker_PP1 pid=81) WARNING 11-22 14:00:05 [x.py:1] ImportError: no such optional kernel
(Worker_PP1 pid=81) ERROR 11-22 14:00:08 [multiproc_executor.py:750] Traceback (most recent call last):
(Worker_PP1 pid=81) ERROR 11-22 14:00:08 [multiproc_executor.py:750] torch.OutOfMemoryError: CUDA out of memory. Tried
(EngineCore pid=70) ERROR 11-22 14:00:09 [core.py:900] Exception: WorkerProc initialization failed due to an exception
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


FORGETTING = Forgetting(steps=2, seconds=375.0)


def first_words(log: str) -> FirstWords:
    words = FirstWords(FORGETTING)
    for line in log.splitlines():
        words.read(line)
    return words


def test_the_root_cause_is_kept_and_not_what_others_say_of_it() -> None:
    words = first_words(LOG)
    assert words.first == "OutOfMemoryError: CUDA out of memory. Tried"
    assert words.last == "RuntimeError: Engine core initialization failed. See root cause above."


def test_an_engine_that_gave_up_is_told_from_a_worker_that_was_killed() -> None:
    gave_up = first_words("ERROR TimeoutError: RPC call to sample_tokens timed out.\nERROR EngineDeadError: see above")
    assert (gave_up.first, gave_up.engine_died) == ("", True)
    killed = first_words("ERROR Worker proc VllmWorker-0 died unexpectedly\nERROR EngineDeadError: see above")
    assert not killed.engine_died, "that is what it died of"


def test_an_error_whose_words_name_a_log_level_is_no_line_of_that_level() -> None:
    """torch's own words of a lost NCCL peer."""
    prefix = "(Worker_PP1 pid=81) ERROR 11-22 14:00:08 [multiproc_executor.py:750] "
    error = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:4, remote process exited "
    words = first_words(f"host:81:90 [0] NCCL INFO Bootstrap\n{prefix}{error}(run with NCCL_DEBUG=INFO for details)")
    assert words.first.startswith("DistBackendError: NCCL error in: "), words.first
    assert is_lost_connection(NodeEnd(status=1, words=words.first, phase=READY))


def test_an_adapter_that_could_not_be_loaded_is_told_by_where_it_was_raised() -> None:
    """The real vLLM's log, in part: what the worker says of a file names no adapter."""
    log = (
        "(Worker pid=9) ERROR 11-23 13:30:54 [m.py:1063] safetensors._rust.SafetensorError: header too small\n"
        '(APIServer pid=1)   File "/vllm/entrypoints/openai/models/serving.py", line 139, in init_static_loras\n'
        "(APIServer pid=1)     raise ValueError(load_result.error.message)\n"
        "(APIServer pid=1) ValueError: Call to add_lora method failed: Worker failed with error 'header too small', ple"
    )
    words = first_words(log)
    assert (words.adapter_failed, words.first) == (True, "SafetensorError: header too small")
    end = NodeEnd(status=1, words=words.first, phase=READY, adapter_failed=words.adapter_failed)
    failure = failure_of(end)
    assert (failure.failure_class, failure.operation) == (FailureClass.BAD_CONFIG, "load the LoRA adapters")
    words.look_at_start(1.0)
    words.forget()
    assert not words.adapter_failed, "it got ready"


def test_words_between_the_last_look_and_readiness_are_kept() -> None:
    """A worker that gets ready and loses a peer between two looks says so before anybody saw it ready."""
    words = first_words("(APIServer pid=1) ConnectionError: Connection refused")
    words.look_at_start(1.0)
    words.read("ERROR Worker proc VllmWorker-0 died unexpectedly")
    words.read("(Worker_PP1 pid=2) ERROR RuntimeError: [gloo] Connection closed by peer")
    words.forget()
    assert (words.first, words.worker_died) == ("RuntimeError: [gloo] Connection closed by peer", True)


def test_a_refused_setting_is_kept_with_its_reason() -> None:
    words = first_words(
        "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=1)   Value error, User-specified max_model_len (9999) is greater than 2048. [type=x]\n"
        "(APIServer pid=1)     For further information visit https://errors.pydantic.dev"
    )
    assert words.first.startswith("ValidationError: 1 validation error for ModelConfig: Value error, User-specified")
    assert "For further" not in words.first


def test_who_only_says_that_another_failed_names_nothing() -> None:
    words = first_words(
        "ERROR Worker proc VllmWorker-0 died unexpectedly\nERROR EngineDeadError: see above\n"
        "RuntimeError: Worker failed with error 'no lm_head', please check the stack trace above for the root cause"
    )
    assert (words.first, words.worker_died) == ("", True)


OLD, NEW = "ERROR ValueError: a bad request", "ERROR RuntimeError: the kernel refused"
LATE: dict[str, tuple[list[str | tuple[int, float]], str]] = {
    "said just before": ([OLD], "ValueError: a bad request"),
    "steps under way come back after it": ([OLD, (2, 0.1)], "ValueError: a bad request"),
    "more steps than were under way": ([OLD, (3, 0.1)], ""),
    "idle, and vLLM's own limit has not passed": ([OLD, (0, 370.0)], "ValueError: a bad request"),
    "idle, and long past": ([OLD, (0, 380.0)], ""),
    "a later failure after a harmless one": ([OLD, (3, 0.1), NEW, (2, 0.1)], "RuntimeError: the kernel refused"),
    "a failure while harmless words are young": ([OLD, (1, 0.1), NEW, (2, 0.1)], "RuntimeError: the kernel refused"),
    "what follows a failure is not its cause": ([NEW, (1, 0.1), OLD, (1, 300.0)], "RuntimeError: the kernel refused"),
}


@pytest.mark.parametrize("name", LATE)
def test_words_that_did_no_harm_are_not_the_cause_of_a_later_end(name: str) -> None:
    """Lines of the log, and between them how many steps were done and how many seconds went by."""
    story, expected = LATE[name]
    words, steps, now = FirstWords(FORGETTING), 100, 50.0
    for each in story:
        if isinstance(each, str):
            words.read(each)
        words.look(steps, now)
        if isinstance(each, tuple):
            steps, now = steps + each[0], now + each[1]
            words.look(steps, now)
    assert words.first == expected
    assert bool(words.last) == bool(expected), words.last


def test_a_killed_worker_is_one_also_after_an_error_long_before() -> None:
    words = first_words(OLD)
    words.look(100, 0.0)
    words.look(110, 1.0)
    end = NodeEnd(status=1, words=words.first, last_line=words.last, phase=READY, worker_vanished=True)
    assert failure_of(end).failure_class is FailureClass.KILLED
    assert "bad request" not in failure_of(end).detail


def test_steps_done_between_a_line_and_the_next_look_count_for_nothing() -> None:
    """A look comes ten times a second, steps come faster: what was done before the line says nothing about it."""
    words = FirstWords(FORGETTING)
    words.look(100, 0.0)
    words.read(NEW)
    words.look(180, 0.1)
    words.look(182, 0.2)
    assert words.first == "RuntimeError: the kernel refused"


READY, LOADING = WorkerPhase.READY, WorkerPhase.LOADING
GAVE_UP = NodeEnd(status=1, words="", phase=READY, worker_vanished=True, engine_died=True)


@pytest.mark.parametrize(
    ("end", "failure_class", "part"),
    [
        (NodeEnd(status=0, words="", phase=READY), FailureClass.INTERNAL, "status 0 without having been told to drain"),
        (NodeEnd(status=0, words="", phase=READY, worker_vanished=True), FailureClass.KILLED, "worker was killed"),
        (GAVE_UP, FailureClass.INTERNAL, "vLLM ended its engine and its worker"),
        (NodeEnd(status=-9, words="", phase=READY), FailureClass.KILLED, "SIGKILL"),
        (NodeEnd(status=-11, words="", phase=READY), FailureClass.INTERNAL, "SIGSEGV"),
        (NodeEnd(status=137, words="", phase=READY), FailureClass.OUT_OF_MEMORY, "status 137"),
        (NodeEnd(status=1, words="", phase=READY, kernel_kills=1), FailureClass.OUT_OF_MEMORY, "memory ran out"),
        (NodeEnd(status=1, words="OutOfMemoryError: CUDA", phase=LOADING), FailureClass.OUT_OF_MEMORY, "CUDA"),
        (NodeEnd(status=1, words="ValueError: no lm_head", phase=LOADING), FailureClass.MODEL_LOAD, "no lm_head"),
        (NodeEnd(status=2, words="vllm serve: x", phase=None), FailureClass.BAD_CONFIG, "vllm serve: x"),
        (NodeEnd(status=1, words="ValidationError: 1 validation error", phase=None), FailureClass.BAD_CONFIG, "1 val"),
        (NodeEnd(status=1, words="RuntimeError: kernel", phase=READY), FailureClass.INTERNAL, "kernel"),
        (NodeEnd(status=1, words="ImportError: libcudart.so", phase=None), FailureClass.INTERNAL, "libcudart"),
    ],
)  # fmt: skip
def test_each_end_has_its_class(end: NodeEnd, failure_class: FailureClass, part: str) -> None:
    failure = failure_of(end)
    assert failure.failure_class is failure_class, failure.detail
    assert part in failure.detail


WARMING = WorkerPhase.WARMING


def failed(words: str, phase: WorkerPhase = READY, worker: str = "vLLM's worker") -> WorkerFailure:
    return WorkerFailure(worker=worker, words=words, phase=phase)


@pytest.mark.parametrize(
    ("failure", "failure_class", "operation"),
    [
        (failed("ValueError: no lm_head", LOADING), FailureClass.MODEL_LOAD, "load the model"),
        (failed("RuntimeError: nvcc is gone", WARMING), FailureClass.MODEL_LOAD, "warm up"),
        (failed("OutOfMemoryError: CUDA out of memory", LOADING), FailureClass.OUT_OF_MEMORY, "load the model"),
        (failed("OutOfMemoryError: CUDA out of memory", READY), FailureClass.OUT_OF_MEMORY, "run vLLM"),
        (failed("RuntimeError: kernel", READY), FailureClass.INTERNAL, "run vLLM"),
    ],
)
@pytest.mark.parametrize("status", [0, 1, 2, -9, 137])
def test_a_workers_own_words_go_before_the_log_and_what_became_of_its_node(
    failure: WorkerFailure, failure_class: FailureClass, operation: str, status: int
) -> None:
    """Its phase too: the others of its stage may be further, or not have begun."""
    end = NodeEnd(status=status, words="ImportError: a kernel", phase=None, failed=failure, worker_vanished=True)
    told = failure_of(end)
    assert (told.failure_class, told.operation) == (failure_class, operation)
    assert told.detail == f"vLLM's worker failed: {failure.words}"


def test_of_several_workers_the_one_that_did_not_lose_another_is_named() -> None:
    lost = failed("RuntimeError: [gloo] Connection closed by peer", worker="vLLM's worker 0")
    first = first_of([lost, failed("ValueError: no heads", worker="vLLM's worker 1")])
    assert first is not None
    assert failure_of(NodeEnd(status=1, words="", phase=READY, failed=first)).detail.startswith("vLLM's worker 1 fail")
    assert first_of([lost]) is lost
    assert is_lost_connection(NodeEnd(status=1, words="", phase=READY, failed=lost))
    assert first_of([]) is None


CODE_WORDS = [
    "ValueError: The repository /m contains custom code which must be executed to correctly load the model.",
    "RuntimeError: Failed to load the model config. If the model is a custom model not yet available in the "
    "HuggingFace transformers library, consider setting `trust_remote_code=True` in LLM.",
]


@pytest.mark.parametrize("words", CODE_WORDS)
def test_a_model_that_needs_its_own_code_is_refused_with_what_is_allowed(words: str) -> None:
    failure = failure_of(NodeEnd(status=1, words=words, phase=None))
    assert failure.failure_class is FailureClass.BAD_CONFIG
    assert "only with --trust-remote-code in spec.engine.extraArgs" in failure.detail
    assert failure.detail.endswith(words)


def test_a_lost_connection_is_known_as_a_consequence() -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.8]:4711"
    assert is_lost_connection(NodeEnd(status=1, words=lost, phase=READY))
    assert not is_lost_connection(NodeEnd(status=1, words="ValueError: no lm_head", phase=LOADING))


LIFE = Life(pid=1, stage=0, rank=0, phase=READY)


def view(
    state: State, operation: Operation = Operation.NONE, begun: int = 5, done: int = 5, *, is_stopped: bool = False
) -> WorkerView:
    clock = Clock(
        started_nanoseconds=0, since_nanoseconds=0, state=state, operation=operation, steps_begun=begun,
        steps_done=done, unfinished_requests=1, spent_nanoseconds=(0,) * len(State),
    )  # fmt: skip
    return WorkerView(state=WorkerState(life=LIFE, clock=clock, counters=Counters()), is_stopped=is_stopped)


def fires_after(seen: WorkerView, stage: int = 1, *, outstanding: bool = True) -> tuple[float, str, int | None] | None:
    """Seconds until the watchdog speaks of a view that stays as it is, its operation and peer."""
    watchdog = StepWatchdog(10.0, stage, 3)
    for tenth in range(200):
        failure = watchdog.look({0: seen}, tenth / 10, outstanding=outstanding)
        if failure is not None:
            assert failure.failure_class is FailureClass.STEP_TIMEOUT
            return tenth / 10, failure.operation, failure.peer
    return None


def test_who_computes_speaks_before_who_waits_for_him() -> None:
    computing = fires_after(view(State.DECODE, Operation.FORWARD, begun=6))
    receiving = fires_after(view(State.RECV, Operation.RECEIVE_HIDDEN, begun=6))
    starved = fires_after(view(State.STARVED))
    fed_back = fires_after(view(State.FEEDBACK, begun=6), stage=0)
    assert computing is not None
    assert receiving is not None
    assert fed_back is not None
    assert starved is not None
    assert computing[0] == pytest.approx(10.0, abs=0.3)
    assert computing[1:] == ("forward", None)
    assert receiving[0] == starved[0] == fed_back[0] == pytest.approx(10.0 + BYSTANDER_SECONDS, abs=0.3)
    assert receiving[1:] == (Operation.RECEIVE_HIDDEN.wire_name, 0), "it names whom it waits for"
    assert starved[1:] == ("wait for vLLM's scheduler", None)
    assert fed_back[1:] == ("wait for feedback", 2), "sampled tokens come from the last stage"


def test_a_stopped_worker_is_named_as_such_wherever_it_stood() -> None:
    stopped = fires_after(view(State.STARVED, is_stopped=True))
    assert stopped is not None
    assert stopped[0] == pytest.approx(10.0, abs=0.3)
    assert stopped[1] == "worker stopped"


@pytest.mark.parametrize(
    "hanging",
    [
        view(State.DECODE, Operation.FORWARD, begun=6),
        view(State.FEEDBACK, begun=6),
        view(State.STARVED, is_stopped=True),
    ],
    ids=["in a step", "waiting for feedback", "stopped between two"],
)  # fmt: skip
def test_clients_that_leave_and_ask_anew_meanwhile_give_a_hanging_worker_no_time(hanging: WorkerView) -> None:
    """A gateway does so with an answer that stands still, and between the two nothing is outstanding."""
    watchdog = StepWatchdog(10.0, 1, 2)
    seen = [watchdog.look({0: hanging}, tenth / 10, outstanding=tenth % 50 > 1) for tenth in range(150)]
    assert any(seen)
    waiting = [
        watchdog.look({0: view(State.STARVED)}, tenth / 10, outstanding=tenth % 50 > 1) for tenth in range(200, 400)
    ]
    assert not any(waiting), "it waits for the scheduler, and each request has its own time"


def test_idle_nothing_has_to_advance_and_a_step_starts_the_time_anew() -> None:
    assert fires_after(view(State.IDLE), outstanding=False) is None
    watchdog = StepWatchdog(10.0, 0, 2)
    for second in range(60):
        seen = view(State.DECODE, Operation.FORWARD, begun=second // 9, done=second // 9)
        assert watchdog.look({0: seen}, float(second), outstanding=True) is None


def test_of_several_workers_of_a_stage_the_one_that_hangs_is_named() -> None:
    watchdog = StepWatchdog(10.0, 0, 2)
    ranks = {0: view(State.STARVED), 1: view(State.DECODE, Operation.FORWARD, begun=6)}
    found = [watchdog.look(ranks, tenth / 10, outstanding=True) for tenth in range(120)]
    failure = next(each for each in found if each is not None)
    assert failure.detail.startswith("worker 1: ")


def test_the_clock_of_a_worker_and_the_watchdog_mean_the_same(tmp_path: Path) -> None:
    """The states that the plugin writes are those that the watchdog reads."""
    file = worker_state_path(tmp_path, 0)
    clock = WorkerClock(WorkerStateWriter(file), stage=1)
    clock.begin_step(State.DECODE, rows=1, tokens=1, unfinished_requests=1)
    clock.enter(State.RECV, Operation.RECEIVE_HIDDEN)
    state = WorkerStateReader(file).read()
    assert state is not None
    fired = fires_after(WorkerView(state=state))
    assert fired is not None
    assert fired[2] == 0
