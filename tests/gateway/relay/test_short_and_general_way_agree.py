"""Drawn answers of engines, read by the short way for text and without it: nothing that anybody sees differs.

The real stream of a shared connection, its reader, what accounts for a run, and the answer as it is written; engine,
client and limits are played. Runs follow one another as where engines are lost, and readers may be slow.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import Delta, GenerateRequest, TextPrompt
from stageline_api.multiplexing import ClientLine
from stageline_gateway.admission.keys import Caller
from stageline_gateway.client_stream import ClientStream, Pause
from stageline_gateway.endpoints.answers import Exchange, StreamedAnswer
from stageline_gateway.engine_client.event_reader import EventReader
from stageline_gateway.engine_client.late_accounts import LateAccounts
from stageline_gateway.engine_client.multiplexed import MultiplexedStream
from stageline_gateway.engine_client.run_events import StreamEvent, TextTaker
from stageline_gateway.engine_trust import EngineAddress
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.groups.routing import Ledger
from stageline_gateway.openai_api.answer_shapes import CompletionShape, Stamp
from stageline_gateway.relay.dispatch import Deliver, _Relayed, _RelayedText
from stageline_gateway.relay.placement import Progress
from stageline_gateway.telemetry.metrics import GatewayMetrics, RequestMeter

GROUP = GroupEndpoint(model="m", group=0, incarnation=1, url="http://e", ready=True)
FINISHED = b'{"type":"finished","reason":"stop","prompt_tokens":3,"completion_tokens":4}'
ADMITTED = (b'{"type":"admitted","prompt_tokens":3}', b'{"type":"admitted","prompt_tokens":3,"thoughts":"tagged"}')
LOGPROBS = [{"token_id": 1, "bytes": [97], "logprob": -1.0, "top_logprobs": []}]
Act = list[bytes] | str
"""Lines of one read, or `turn` (others have theirs) or `interrupt` (the answer is moved elsewhere)."""


def delta(text: str, token_ids: Sequence[int], **more: object) -> bytes:
    return json.dumps(
        {"type": "delta", "text": text, "token_ids": list(token_ids)} | more, separators=(",", ":")
    ).encode()


def drawn_line(draw: random.Random) -> bytes:
    rare = (
        b"",
        delta("l", [1], logprobs=LOGPROBS),
        b'{"token_ids":[1],"type":"delta","text":"q"}',
        b'{"text":"x","token_ids":[1]}',
        b'{"type":"delta","text":"\xff","token_ids":[1]}',
        delta("u", [1], unknown=1),
        FINISHED,
        b'{"type":"failed","message":"m"}',
        ADMITTED[0],
    )
    if draw.random() < 0.12:
        return draw.choice(rare)
    return delta(draw.choice(["a", "ü", "", '\n"', "x" * 50]), [draw.randint(0, 9)] * draw.randint(0, 2))


def drawn_run(draw: random.Random) -> list[Act]:
    acts: list[Act] = [[draw.choice(ADMITTED)]]
    for _ in range(draw.randint(0, 25)):
        acts += ["turn"] * (draw.random() < 0.45) + ["interrupt"] * (draw.random() < 0.02)
        acts.append([drawn_line(draw) for _ in range(draw.choice([1, 1, 1, 2, 3, draw.choice([1, 400])]))])
    return [*acts, "turn", [FINISHED], "turn"]


class PlayedAnswer:
    """One answer by either way, and all that was seen of it."""

    def __init__(self, runs: Sequence[Sequence[Act]], seed: int, *, by_text: bool) -> None:
        self._runs, self._seed, self._by_text = runs, seed, by_text
        self.seen: list[Any] = []
        self._pieces = self.spent = 0
        self.caller = Caller()
        self.admission = SimpleNamespace(headers_for=lambda _caller: {})

    # As a client

    def write(self, body: bytes, more: bool = True) -> Pause | None:
        self.seen.append((body, more))
        self._pieces += 1
        if (self._pieces * 11 + self._seed) % 41 == 0:
            raise RuntimeError("it can't be written")

        async def pause() -> None:
            self.seen.append("waited for the client")
            await asyncio.sleep(0)

        return pause if (self._pieces * 7 + self._seed) % 5 == 0 else None

    def head_of(self, _headers: object) -> bytes | None:
        return None

    def open(self, _headers: object, body: bytes, more: bool = True, _head: bytes | None = None) -> Pause | None:
        return self.write(body, more)

    # As a permit

    def see(self, event: StreamEvent, choice: int = 0) -> None:  # noqa: ARG002 - the permit's
        if isinstance(event, Delta):
            self.see_tokens(len(event.token_ids))

    def see_tokens(self, count: int) -> None:
        self.spent += count

    def give_places_back(self) -> None:
        self.seen.append("places back")

    # As a connection that is shared

    def say(self, line: ClientLine) -> None:
        self.seen.append(line)

    def leave(self, number: int, is_over: bool) -> None:
        self.seen.append(f"left {number}, over: {is_over}")

    async def play(self) -> list[Any]:
        meter = RequestMeter(GatewayMetrics().of(""), "m", clock=lambda: 1.0)
        ledger, backends = Ledger(), Backends(DiscoveredGroups("a test"))
        progress = Progress(GenerateRequest(request_id="r", prompt=TextPrompt(text="x")))

        async def run(deliver: Deliver, texts: TextTaker | None) -> None:
            for number, acts in enumerate(self._runs):
                progress.next_request()
                with ledger.lease("k", 5) as lease:
                    one = partial(deliver, 0)
                    relayed = _Relayed(GROUP, "k", progress, lease, backends, meter.metrics, one)
                    told = _RelayedText(relayed, texts) if self._by_text and texts is not None else None
                    if await self._read(number, acts, relayed, told):
                        return

        exchange = Exchange(
            run=run,
            shapes=[CompletionShape(0)],
            stamp=Stamp("c", 1, "m", "fp"),
            meter=meter,
            permit=cast(Any, self),
            cut=cast(Any, None),
            include_usage=bool(self._seed % 2),
            with_logprobs=self._seed % 3 == 0,
        )
        answer = StreamedAnswer(exchange)
        try:
            await answer._answer(cast(ClientStream, self))
        except RuntimeError as error:
            self.seen.append(str(error))
        gaps = meter.of_model.inter_token_latency.counts
        progress.request = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"))
        counted = [answer.resumes, meter.all_tokens, meter.tokens, gaps, self.spent, progress, ledger.loads]
        return [*self.seen, *counted]

    async def _read(self, number: int, acts: Sequence[Act], relayed: _Relayed, texts: TextTaker | None) -> bool:
        """One run; returns whether it ended the answer."""
        stream = MultiplexedStream(cast(Any, self), number, may_be_stale=False)
        reader = EventReader(relayed.take, texts, 120.0, 30.0, EngineAddress("http://e"), LateAccounts())
        engine = asyncio.create_task(self._bring(stream, acts))
        try:
            await reader.read_all(stream)
        except RuntimeError:
            raise
        except Exception as error:
            self.seen.append(repr(error))
        finally:
            reader.close()
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            held = (stream.has_heard, stream._is_held, len(stream._lines), stream._limit_seconds)
            self.seen.append((reader.limit_seconds, reader.order, held))
            stream.close(is_over=reader.order.is_over)
        return reader.order.finished

    async def _bring(self, stream: MultiplexedStream, acts: Sequence[Act]) -> None:
        for act in acts:
            match act:
                case "turn":
                    for _ in range(4):
                        await asyncio.sleep(0)
                case "interrupt":
                    stream.interrupt(ValueError("moved"))
                case list(lines) if self._by_text:
                    stream.bring(lines, asyncio.get_running_loop().time())
                case list(lines):
                    stream._heard()
                    stream._lines += [line for line in lines if line]
                    stream._arrived()
        stream.broke(ConnectionError("the end"))


@pytest.mark.parametrize("block", range(4))
def test_nothing_that_anybody_sees_differs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageline_gateway.engine_client.event_reader.monotonic", lambda: 1.0)
    for seed in range(100 * block, 100 * block + 100):
        draw = random.Random(seed)
        runs = [drawn_run(draw) for _ in range(draw.randint(1, 3))]
        short, general = (asyncio.run(PlayedAnswer(runs, seed, by_text=way).play()) for way in (True, False))
        first = next((place for place, (a, b) in enumerate(zip(short, general, strict=False)) if a != b), None)
        assert short == general, (seed, first, short[first or 0 :][:3], general[first or 0 :][:3])
