"""What attacks cost a gateway in a process of its own: CPU time of its event loop, and memory as the system counts it.

Whatever library has it: errors that nobody reads take gigabytes which Python doesn't trace.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest
from pydantic_core import to_json

from hostility.repeated_parts import BODY_BYTES, CHATS, COMPLETIONS, REPEATED
from processes.cpu_bounds import CpuBound
from processes.gateway_harness import MODEL, eventually
from processes.lone_gateway import LoneGateway, lone_gateway
from processes.scripted_engine import Hold, Raw, Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason, TokenLogprob, TopLogprob

LOOP_SECONDS: Final = 0.05
"""Of CPU, that a request may have the event loop for; five times what any of these was measured to need."""
TRIES: Final = 3
MEBIBYTE: Final = 1024 * 1024
ONE_BODY_BYTES: Final = 96 * MEBIBYTE
"""What a gateway may grow by over one attack: it takes up to 50 MiB, and took gigabytes."""
SIX_BODIES_BYTES: Final = 128 * MEBIBYTE
"""What bodies may hold all together."""
JSON: Final = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, engine: ScriptedEngine) -> Iterator[LoneGateway]:
    """One for all attacks: what one of them leaves is held against the next."""
    with lone_gateway(tmp_path_factory.mktemp("attacked"), engine) as gateway:
        yield gateway


def answers(gateway: LoneGateway, path: str, body: bytes, count: int) -> list[httpx.Response]:
    """Those to the same request, sent by so many at once."""
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=60, verify=False) as http:

        def ask(_: int) -> httpx.Response:
            return http.post(path, content=body, headers=JSON)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(ask, range(count)))


def check_refusals(
    gateway: LoneGateway, path: str, body: bytes, count: int, most_bytes: int, cpu_bound: CpuBound
) -> list[httpx.Response]:
    """All are refused, in the time of the loop that each may have and in so much memory.

    The least of several tries counts: what else a machine does adds to each of them.
    """
    spent = list[float]()
    while not spent or not cpu_bound.holds(min(spent), count * LOOP_SECONDS):
        assert len(spent) < TRIES, f"seconds of the loop for {count} of {len(body)} bytes: {spent}"
        before = gateway.loop_seconds()
        refused = answers(gateway, path, body, count)
        spent.append(gateway.loop_seconds() - before)
        assert [each.status_code for each in refused] == [400] * count, refused[0].text
    grown = f"{gateway.grown_bytes // MEBIBYTE} MiB more for {count} of {len(body)} bytes: {gateway.bodies()}"
    assert gateway.grown_bytes < most_bytes, grown
    eventually(lambda: gateway.bodies()["bytes"] == 0, lambda: f"not given back: {gateway.bodies()}")
    return refused


TOKENS: Final = 2000
TOKEN_SECONDS: Final = 0.0005
"""Of the loop, ten times what is needed to relay a token with its twenty others."""


def tokens_with_others(count: int, top: int) -> list[Step]:
    """An answer of `count` tokens with `top` alternatives each, which ends when it is let."""
    others = [TopLogprob(token_id=index, bytes=(97 + index, 98, 99, 100), logprob=-1.25) for index in range(top)]
    one = TokenLogprob(token_id=1, bytes=(97, 98, 99, 100), logprob=-0.5, top_logprobs=tuple(others))
    delta = Raw(Delta(text="abcd", token_ids=(1,), logprobs=(one,)).to_json() + b"\n")
    end = Finished(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=count)
    return [Say(Admitted(prompt_tokens=1)), *[delta] * count, Hold(), Say(end)]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, {"prompt": "x", "logprobs": 20}),
        (CHATS, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}),
    ],
    ids=["completions", "chats"],
)
def test_log_probabilities_of_whole_answers_hold_what_is_counted_of_them(
    gateway: LoneGateway, engine: ScriptedEngine, path: str, asked: dict[str, Any], cpu_bound: CpuBound
) -> None:
    """As objects they were 14 KiB a token: 170 MiB of these six."""
    engine.hold()
    engine.script = lambda _: tokens_with_others(TOKENS, 20)
    before = gateway.loop_seconds()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(answers, gateway, path, to_json({"model": MODEL, "max_tokens": TOKENS} | asked), 6)
        least_bytes = 6 * TOKENS * 20 * 10
        eventually(lambda: gateway.bodies()["bytes"] > least_bytes, lambda: f"not counted: {gateway.bodies()}")
        engine.release()
        answered = asking.result()
    spent = gateway.loop_seconds() - before
    assert [each.status_code for each in answered] == [200] * 6, answered[0].text[:300]
    size_bytes = sum(len(each.content) for each in answered)
    told = f"{gateway.grown_bytes // MEBIBYTE} MiB more for {size_bytes} bytes of answers: {gateway.bodies()}"
    assert size_bytes > least_bytes
    assert gateway.grown_bytes < ONE_BODY_BYTES, told
    assert cpu_bound.holds(spent, 6 * TOKENS * TOKEN_SECONDS), f"{spent:.3f} s of the loop"


@pytest.mark.parametrize("name", REPEATED)
def test_a_large_body_of_one_part_again_and_again_has_the_loop_for_a_moment(
    gateway: LoneGateway, name: str, cpu_bound: CpuBound
) -> None:
    check_refusals(gateway, REPEATED[name].path, REPEATED[name].body(), 1, ONE_BODY_BYTES, cpu_bound)


def prompting(**extra: Any) -> bytes:
    """A body as large as one may be, most of which is its prompt or what is given."""
    fields = {"model": MODEL, "prompt": ""} | extra
    room = BODY_BYTES - len(to_json(fields))
    return to_json({name: "x" * room if value == "" else value for name, value in fields.items()})


MANY_MESSAGES: Final = b'{"model":"%s","messages":[%s]}' % (
    MODEL.encode(),
    b",".join([b'{"role":"user","content":""}'] * 144_500),
)
SIX_TIMES: Final[dict[str, tuple[str, Callable[[], bytes], str]]] = {
    "a stop string of 4 MiB": (COMPLETIONS, lambda: prompting(prompt="x", stop=""), "256 characters"),
    "128 choices of 4 MiB": (COMPLETIONS, lambda: prompting(n=128), "128 choices of a body of"),
    "145,000 empty messages": (CHATS, lambda: MANY_MESSAGES, "more than 131072 strings"),
}


@pytest.mark.parametrize("name", SIX_TIMES)
def test_six_at_once_that_would_hold_hundreds_of_megabytes_hold_no_more_than_the_room(
    gateway: LoneGateway, name: str, cpu_bound: CpuBound
) -> None:
    path, make, words = SIX_TIMES[name]
    body = make()
    assert BODY_BYTES - 5_000 < len(body) <= BODY_BYTES
    refused = check_refusals(gateway, path, body, 6, SIX_BODIES_BYTES, cpu_bound)
    assert all(words in each.json()["error"]["message"] for each in refused), refused[0].text
