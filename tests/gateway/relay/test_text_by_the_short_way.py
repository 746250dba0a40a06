"""Text that goes to the client without an event made of it leaves the bytes and the accounts that its Delta would."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason, GenerateRequest, TextPrompt
from stageline_gateway.admission.keys import Caller, Limits
from stageline_gateway.client_stream import ClientStream, Pause
from stageline_gateway.endpoints.answers import Exchange, StreamedAnswer
from stageline_gateway.engine_client.event_lines import EventLines, plain_text
from stageline_gateway.engine_client.event_reader import EventReader
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_client.incoming_lines import IncomingLines
from stageline_gateway.engine_client.late_accounts import LateAccounts
from stageline_gateway.engine_client.run_events import EngineLostError, StreamEvent, TextTaker, WrittenTexts
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineAddress
from stageline_gateway.groups.backends import Backends, BreakerPolicy, CircuitBreaker, DiscoveredGroups
from stageline_gateway.groups.routing import Ledger
from stageline_gateway.openai_api.answer_shapes import CompletionShape, Stamp
from stageline_gateway.relay.dispatch import Deliver, _Relayed, _RelayedText
from stageline_gateway.relay.placement import Progress
from stageline_gateway.telemetry.metrics import GatewayMetrics, RequestMeter

MODEL, KEY = "m", "m/0/1"
ENGINE = EngineAddress("http://127.0.0.1:1")
TEXTS = st.lists(st.tuples(st.text(max_size=6), st.lists(st.integers(0, 9), max_size=3)), max_size=8)
GROUP = GroupEndpoint(model=MODEL, group=0, incarnation=1, url="http://e", ready=True)
REQUEST = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"))
ADMITTED = b'{"type":"admitted","prompt_tokens":3}'
FINISHED = b'{"type":"finished","reason":"length","prompt_tokens":3,"completion_tokens":4}'


def line(text: str, token_ids: Sequence[int]) -> bytes:
    return json.dumps({"type": "delta", "text": text, "token_ids": list(token_ids)}, separators=(",", ":")).encode()


PLAIN = [line("a", [1]), line("ü\n", [2, 3]), line("", [4])]
OTHER = [FINISHED, b"{", b'{"text":"x","token_ids":[1]}', b'{"text":"x","token_ids":[1],"type":"delta"}']


@given(st.lists(st.sampled_from([*PLAIN, *OTHER]), min_size=1))
def test_lines_are_plain_text_where_they_are_one_piece_of_it(lines: list[bytes]) -> None:
    reader = EventLines(is_plain=True)
    if set(lines) & set(OTHER):
        assert plain_text(lines) is None
        return
    (piece,) = reader.events(lines)
    assert isinstance(piece, Delta)
    assert plain_text(lines) == (piece.text, piece.token_ids)


def relayed(seen: list[StreamEvent], backends: Backends, lease: Any) -> _Relayed:
    def deliver(events: Sequence[StreamEvent]) -> None:
        seen.extend(events)

    return _Relayed(GROUP, KEY, Progress(REQUEST), lease, backends, GatewayMetrics().of(""), deliver)


class TextsSeen:
    """Takes text for `seen`, as a Delta of all that is accounted for at once."""

    def __init__(self, seen: list[StreamEvent], *, may_wait: bool = False) -> None:
        self.seen, self.may_wait = seen, may_wait
        self.written: list[str] = []
        self.stamps: list[tuple[float, int]] = []

    def write(self, text: str) -> Pause | None:
        self.written.append(text)
        return None

    def account(self, written: WrittenTexts) -> None:
        told, self.written = "".join(self.written), []
        assert len(told) == written.characters
        assert sum(count for _, count in written.stamps) == len(written.token_ids)
        self.seen.append(Delta(text=told, token_ids=tuple(written.token_ids)))
        self.stamps += written.stamps


@given(first=st.tuples(st.text(max_size=6), st.lists(st.integers(0, 9), max_size=3)), texts=TEXTS)
def test_accounts_of_a_run_are_those_of_deltas(
    first: tuple[str, list[int]], texts: list[tuple[str, list[int]]]
) -> None:
    def run(*, by_text: bool) -> tuple[Any, ...]:
        backends, ledger, seen = Backends(DiscoveredGroups("a test")), Ledger(), list[StreamEvent]()
        with ledger.lease(KEY, 5) as lease:
            one = relayed(seen, backends, lease)
            texts_seen = _RelayedText(one, TextsSeen(seen))
            one.take([Admitted(prompt_tokens=1), Delta(text=first[0], token_ids=tuple(first[1]))])
            for text, token_ids in texts:
                backends.breakers[KEY] = CircuitBreaker().failed(0.0, BreakerPolicy())
                if by_text:
                    texts_seen.write(text)
                    texts_seen.account(WrittenTexts([(0.0, len(token_ids))], token_ids, len(text)))
                else:
                    one.take([Delta(text=text, token_ids=tuple(token_ids))])
            return seen, one.progress, dict(backends.breakers), lease.tokens, deepcopy(ledger.loads)

    assert run(by_text=True) == run(by_text=False)


class Written:
    """In place of a client that reads at once."""

    def __init__(self) -> None:
        self.body = b""

    def head_of(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:  # noqa: ARG002
        return None

    def open(
        self,
        headers: Sequence[tuple[bytes, bytes]],  # noqa: ARG002
        body: bytes,
        more: bool = True,  # noqa: ARG002
        head: bytes | None = None,  # noqa: ARG002
    ) -> Pause | None:
        self.body += body
        return None

    def write(self, body: bytes, more: bool = True) -> Pause | None:  # noqa: ARG002
        self.body += body
        return None


class SpentTokens:
    """In place of a permit."""

    def __init__(self) -> None:
        self.spent: list[int] = []
        self.caller = Caller()
        self.admission = SimpleNamespace(headers_for=lambda _caller: {})

    def see(self, event: StreamEvent, choice: int = 0) -> None:  # noqa: ARG002 - the permit's
        if isinstance(event, Delta):
            self.see_tokens(len(event.token_ids))

    def see_tokens(self, count: int) -> None:
        self.spent.append(count)

    def give_places_back(self) -> None:
        pass


def streamed(
    run: Callable[[Deliver, TextTaker | None], Awaitable[None]],
    permit: SpentTokens,
    meter: RequestMeter,
    *,
    include_usage: bool = False,
) -> StreamedAnswer:
    """The answer of one choice that `run` generates."""
    exchange = Exchange(
        run=run,
        shapes=[CompletionShape(0)],
        stamp=Stamp("cmpl-1", 1_700_000_000, MODEL, "fp"),
        meter=meter,
        permit=cast(Any, permit),
        cut=cast(Any, None),
        include_usage=include_usage,
    )
    return StreamedAnswer(exchange)


@pytest.mark.parametrize("include_usage", [False, True])
@given(texts=TEXTS)
def test_an_answer_is_written_and_counted_as_of_deltas(include_usage: bool, texts: list[tuple[str, list[int]]]) -> None:
    def answer(*, by_text: bool) -> tuple[Any, ...]:
        metrics, permit, client = GatewayMetrics(), SpentTokens(), Written()
        meter = RequestMeter(metrics.of(""), MODEL, clock=lambda: 1.0)

        async def run(deliver: Deliver, taker: TextTaker | None) -> None:
            deliver(0, [Admitted(prompt_tokens=1)])
            for text, token_ids in texts:
                if by_text:
                    assert taker is not None
                    taker.write(text)
                    taker.account(WrittenTexts([(1.0, len(token_ids))], token_ids, len(text)))
                else:
                    deliver(0, [Delta(text=text, token_ids=tuple(token_ids))])
            deliver(0, [Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=len(texts))])

        one = streamed(run, permit, meter, include_usage=include_usage)
        asyncio.run(one._answer(cast(ClientStream, client)))
        gaps = meter.of_model.inter_token_latency
        counted = (meter.all_tokens, meter.tokens, meter.of_model.generation_tokens.value, gaps.counts, gaps.total)
        return client.body, permit.spent, counted

    assert answer(by_text=True) == answer(by_text=False)


class Source(IncomingLines):
    def _hold(self) -> None:
        pass

    def _go_on(self) -> None:
        pass


def test_text_goes_the_short_way_from_the_second_piece_on_and_everything_else_never() -> None:
    """The first sets the limit of silence; thoughts and calls are looked for in events."""
    told: list[str] = []

    def take(events: Sequence[Any]) -> Pause | None:
        told.extend(type(event).__name__ for event in events)
        return None

    class Told(TextsSeen):
        def write(self, text: str) -> Pause | None:
            told.append(text)
            return super().write(text)

    texts = Told([])

    def read(admitted: bytes, reader: EventReader) -> list[str]:
        told.clear()
        reader._source = Source()
        for lines in ([admitted], [line("a", [1])], [line("b", [2]), line("c", [3])], [line("d", [4]), FINISHED]):
            reader.read(lines)
        return list(told)

    async def both() -> None:
        timeouts = 120.0, 30.0
        short = EventReader(take, texts, *timeouts, ENGINE, LateAccounts())
        assert read(ADMITTED, short) == ["Admitted", "Delta", "bc", "Delta", "Finished"]
        assert texts.seen == [Delta(text="bc", token_ids=(2, 3))]
        assert short.limit_seconds == 30.0
        thinking = b'{"type":"admitted","prompt_tokens":3,"thoughts":"tagged"}'
        events = ["Admitted", "Delta", "Delta", "Delta", "Delta", "Finished"]
        assert read(thinking, EventReader(take, texts, *timeouts, ENGINE, LateAccounts())) == events
        assert read(ADMITTED, EventReader(take, None, *timeouts, ENGINE, LateAccounts())) == [
            "Admitted",
            "Delta",
            "Delta",
            "Delta",
            "Finished",
        ]

    asyncio.run(both())


def test_accounts_of_text_wait_for_a_round_where_they_may_and_never_beyond_an_event_or_the_end() -> None:
    async def accounted(*, may_wait: bool, last: bytes) -> list[int]:
        """Of how many pieces there had been an account after each act."""
        texts, late = TextsSeen([], may_wait=may_wait), LateAccounts(period_seconds=0.0)
        reader = EventReader(lambda _: None, texts, 120.0, 30.0, ENGINE, late)
        reader._source = Source()
        counts = []
        acts = ([ADMITTED, line("a", [1])], [line("b", [2])], [line("c", [])], None, [line("d", [4, 5])], [last])
        for lines in acts:
            if lines is None:
                await asyncio.sleep(0.01)  # nothing comes any more
            else:
                reader.read(lines)
            counts.append(len(texts.stamps))
        reader.close()
        assert [count for _, count in texts.stamps[:3]] == [1, 0, 2]
        return [*counts, len(texts.stamps)]

    assert asyncio.run(accounted(may_wait=True, last=FINISHED)) == [0, 0, 0, 2, 2, 3, 3]
    assert asyncio.run(accounted(may_wait=True, last=line("e", [6]))) == [0, 0, 0, 2, 2, 2, 4]
    assert asyncio.run(accounted(may_wait=False, last=line("e", [6]))) == [0, 1, 2, 2, 3, 4, 4]


def test_each_text_s_time_and_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.5, 2.0, 2.25])
    monkeypatch.setattr("stageline_gateway.engine_client.event_reader.monotonic", lambda: next(now))

    async def read() -> TextsSeen:
        texts = TextsSeen([], may_wait=True)
        reader = EventReader(lambda _: None, texts, 120.0, 30.0, ENGINE, LateAccounts())
        reader._source = Source()
        reader.read([ADMITTED, line("a", [1])])
        for lines in ([line("bü", [2])], [line("", [])], [line("c", [3, 4]), line("d", [5])]):
            reader.read(lines)
        reader.close()
        return texts

    texts = asyncio.run(read())
    assert texts.stamps == [(1.5, 1), (2.0, 0), (2.25, 3)]
    assert texts.seen == [Delta(text="bücd", token_ids=(2, 3, 4, 5))]


def test_the_loss_of_an_engine_finds_what_others_wrote_accounted_for() -> None:
    """Else a group that answers would be judged by its failures alone."""
    told: list[str] = []

    async def lose() -> None:
        client = EngineClient(EngineTimeouts(connect_seconds=1.0), EngineKey())
        client._late.add(ENGINE, lambda: told.append("accounted for"))
        with pytest.raises(EngineLostError):
            await client.generate(ENGINE, REQUEST, lambda _: None)
        told.append("told of the loss")

    asyncio.run(lose())
    assert told == ["accounted for", "told of the loss"]


def test_a_first_token_is_written_before_it_is_accounted_for_unless_its_key_has_limits() -> None:
    def spent_at_once(caller: Caller) -> tuple[list[int], list[int]]:
        permit, client = SpentTokens(), Written()
        permit.caller = caller
        seen: list[list[int]] = []

        async def run(deliver: Deliver, _: TextTaker | None) -> None:
            deliver(0, [Admitted(prompt_tokens=1), Delta(text="a", token_ids=(1,))])
            assert client.body
            seen.append(list(permit.spent))
            await asyncio.sleep(0)
            seen.append(list(permit.spent))
            deliver(0, [Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)])

        answer = streamed(run, permit, RequestMeter(GatewayMetrics().of(""), MODEL))
        asyncio.run(answer._answer(cast(ClientStream, client)))
        return seen[0], seen[1]

    assert spent_at_once(Caller()) == ([], [1])
    assert spent_at_once(Caller("a", Limits.model_validate({"tokensPerMinute": 10}))) == ([1], [1])


@pytest.mark.parametrize("ignored", [(), ("user",)])
def test_a_stream_s_begin_is_made_while_the_engine_computes_and_says_what_the_engine_said(
    ignored: tuple[str, ...],
) -> None:
    """Where a key has limits it is made when it is written: what it says of them is of then."""

    def opened(caller: Caller) -> tuple[dict[bytes, bytes], bool]:
        permit, made, headers_of = SpentTokens(), list[str](), dict[bytes, bytes]()
        permit.caller = caller
        permit.admission = SimpleNamespace(headers_for=lambda _caller: {"x-left": str(len(made))})

        class Client(Written):
            def head_of(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
                return b"head of %d" % len(headers)

            def open(
                self, headers: Sequence[tuple[bytes, bytes]], body: bytes, more: bool = True, head: bytes | None = None
            ) -> Pause | None:
                assert head == b"head of %d" % len(headers)
                headers_of.update(headers)
                return super().open(headers, body, more)

        async def run(deliver: Deliver, _: TextTaker | None) -> None:
            await asyncio.sleep(0.01)
            made.append("before the first event")
            deliver(0, [Admitted(prompt_tokens=1, ignored=ignored), Delta(text="a", token_ids=(1,))])
            deliver(0, [Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)])

        answer = streamed(run, permit, RequestMeter(GatewayMetrics().of(""), MODEL))
        asyncio.run(answer._answer(cast(ClientStream, Client())))
        return headers_of, answer._ahead is not None

    headers, was_ahead = opened(Caller())
    assert was_ahead
    assert headers.get(b"x-stageline-ignored", b"") == ",".join(ignored).encode()
    headers, was_ahead = opened(Caller("a", Limits.model_validate({"tokensPerMinute": 10})))
    assert (headers[b"x-left"], was_ahead) == (b"1", False)
