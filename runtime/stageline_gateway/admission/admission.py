"""Whether a request may come in now: its key's limits, the queue before its model, and room in this gateway at all.

What can be known without a request's body is checked before that is read, and all of it again when it has been read.
The queue of a model is its requests that have no first token yet, wherever they wait. Each choice of a request is one
more for the engine, so it takes one more place everywhere, until it has ended. A request is let in by entering its
permit, which raises `ApiError` instead when there is no room, and what it still holds is given back on leaving.

Everything is counted in this process: each replica of a gateway has the limits by itself.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_gateway.admission.keys import ANYONE, Caller, Exceeded, KeyUse
from stageline_gateway.admission.keys_file import KeysFile
from stageline_gateway.admission.request_body import BodyMemory, BodyShare, HeldBody
from stageline_gateway.engine_client.run_events import StreamEvent
from stageline_gateway.errors import ApiError, bad_value
from stageline_gateway.served_models import ServedModel
from stageline_gateway.telemetry.metrics import GatewayMetrics


@dataclass(slots=True)
class Admission:
    """Counts what is admitted. With `keys` None everyone is a caller without limits of their own."""

    metrics: GatewayMetrics
    keys: KeysFile | None = None
    queue_limit: int = 1024
    open_limit: int = 4096
    """Choices of all requests that may be open: each holds buffers and a connection to an engine."""
    retry_after_seconds: float = 2.0
    bodies: BodyMemory = field(default_factory=BodyMemory)
    now_seconds: Callable[[], float] = time.monotonic
    waiting: Counter[ServedModel] = field(default_factory=Counter)
    """Choices of each model without a first token."""
    open: int = 0
    """Choices of open requests."""
    closed_because: str = ""
    """Why nothing is let in any more; empty while it is."""
    leaving_because: str = ""
    """Why clients should go elsewhere by now, though what comes is still let in."""
    _uses: dict[str, KeyUse] = field(default_factory=dict)
    _shares: dict[str, BodyShare] = field(default_factory=dict)

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Who sent a request with these headers; raises ApiError 401. Anthropic's clients send a key as `x-api-key`."""
        if self.keys is None:
            return ANYONE
        bare = headers.get("x-api-key")
        return self.keys.ring.caller_of(headers.get("authorization", None if bare is None else f"Bearer {bare}"))

    def caller_asking(self, headers: Mapping[str, str]) -> Caller:
        """Who asks for something that generates nothing; raises ApiError 401, or 429 when that key asks too often."""
        caller = self.caller_of(headers)
        if self.keys is not None:
            exceeded = self.use_of(caller).asked(self.now_seconds())
            if exceeded is not None:
                raise self._counted(caller, _rate_limited(exceeded))
        return caller

    def close(self, reason: str) -> None:
        """Refuse every request from now on."""
        self.closed_because = reason

    def body_of(self, caller: Caller) -> HeldBody:
        """A holder for a request's body; raises ApiError 429 or 503 when it need not be read at all."""
        use, share = self.use_of(caller), self._body_share(caller)
        try:
            self._check_caller(caller, use)
        except ApiError as error:
            raise self._counted(caller, error) from None
        use.arrive()
        self.bodies.begin_reading()
        return HeldBody(self.bodies, share, use.has_arrived)

    def leave(self, reason: str) -> None:
        """Fail readiness from now on, while requests are still taken."""
        self.leaving_because = reason

    @property
    def unwelcoming_because(self) -> str:
        """Why new requests don't belong here; empty while they do."""
        return self.closed_because or self.leaving_because

    def permit(self, caller: Caller, model: ServedModel, body: HeldBody, places: int = 1) -> "Permit":
        """What lets one request of `caller` in, whose body `body` counts; the permit gives that back too.

        `places` is how many choices it asks for; raises ApiError 400 when so many could never come in together.
        """
        if places > 1:
            self._check_ever(caller, places)
        return Permit(self, caller, model, body.keep(), places)

    def use_of(self, caller: Caller) -> KeyUse:
        use = self._uses.get(caller.name)
        if use is None:
            use = self._uses[caller.name] = KeyUse()
        return use

    def headers_for(self, caller: Caller) -> dict[str, str]:
        """The `x-ratelimit-*` headers of OpenAI's API, for the limits that the key of `caller` has. Refuses nothing."""
        use = self._uses.get(caller.name)
        if use is None or not caller.limits.have_rates:
            return {}
        allowances = use.allowances(caller.limits, self.now_seconds())
        return {name: value for allowance in allowances for name, value in allowance.headers().items()}

    def take(self, caller: Caller, use: KeyUse, model: ServedModel, places: int) -> None:
        """Take so many places; raises ApiError 429 or 503 when one more request of `model` with those has no room."""
        try:
            self._check_caller(caller, use, places, has_paid=True)
            if (waiting := self.waiting[model]) + places > self.queue_limit:
                message = f"{waiting} requests wait for model '{model.name}', and {_no_more(places)}."
                raise self._full(message, "queue_full")
        except ApiError as error:
            raise self._counted(caller, error) from None
        use.places += places
        self.open += places

    def leave_place(self, use: KeyUse, places: int) -> None:
        """Give back so many."""
        self.open -= places
        use.places -= places

    def _check_ever(self, caller: Caller, places: int) -> None:
        """Raise ApiError 400 when waiting would not help: the key or this gateway never takes so many choices."""
        bounds = {"this gateway's queue": self.queue_limit, "this gateway": self.most_of_one_key}
        if caller.limits.concurrency is not None:
            bounds["this API key's limit of concurrency"] = caller.limits.concurrency
        who, most = min(bounds.items(), key=lambda bound: bound[1])
        if places > most:
            rule = f"makes {places} choices, and each takes a place of its own: {who} has {most}"
            raise self._counted(caller, bad_value("n", rule))

    @property
    def most_of_one_key(self) -> int:
        """Open requests of one key: where there are several, none of them shuts the others out."""
        return self.open_limit // 2 if self._has_several_keys else self.open_limit

    @property
    def _has_several_keys(self) -> bool:
        return self.keys is not None and len(self.keys.ring.callers) > 1

    def _body_share(self, caller: Caller) -> BodyShare | None:
        if not self._has_several_keys:
            return None
        share = self._shares.get(caller.name)
        if share is None:
            share = self._shares[caller.name] = BodyShare(0)
        # Never less than one body, and what it is parsed to: that would refuse it forever.
        share.limit_bytes = max(
            self.bodies.limit_bytes // 2, min(self.bodies.limit_bytes, 2 * self.bodies.body_limit_bytes)
        )
        return share

    def _check_caller(self, caller: Caller, use: KeyUse, places: int = 1, has_paid: bool = False) -> None:
        use.follow(caller.limits, self.now_seconds())
        if self.closed_because:
            raise self._full(self.closed_because, "draining")
        if (exceeded := use.exceeded(places, has_paid)) is not None:
            raise _rate_limited(exceeded)
        if use.open + places > (most := self.most_of_one_key) and self._has_several_keys:
            raise _rate_limited(Exceeded("share of this gateway's open requests", most, 1.0))
        num_open = self.open + self.bodies.num_reading
        if num_open + places > self.open_limit:
            raise self._full(f"This gateway has {num_open} requests open, and {_no_more(places)}.", "overloaded")

    def _counted(self, caller: Caller, error: ApiError) -> ApiError:
        self.metrics.refusals.labels(caller.name, error.code or "").inc()
        return error

    def _full(self, message: str, code: str) -> ApiError:
        return ApiError(503, message, "server_error", code=code, retry_after_seconds=self.retry_after_seconds)


def _no_more(places: int) -> str:
    return "no more are taken" if places == 1 else f"{places} choices more have no room"


def _rate_limited(exceeded: Exceeded) -> ApiError:
    message = f"This API key's limit of {exceeded.value} ({exceeded.limit}) is reached."
    wait_seconds = exceeded.retry_after_seconds
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after_seconds=wait_seconds)


@dataclass(slots=True)
class Permit:
    """One request's places, one for each choice until its end. Its tokens are spent as its events are seen."""

    admission: Admission
    caller: Caller
    model: ServedModel
    body: HeldBody
    places: int = 1
    _use: KeyUse = field(init=False)
    _waiting: set[int] = field(default_factory=set)
    """Choices without a token yet."""
    _held: int = 0
    """Places not given back yet."""

    def __enter__(self) -> Self:
        """Take the places; raises ApiError 429 or 503."""
        admission = self.admission
        try:
            self._use = admission.use_of(self.caller)
            admission.take(self.caller, self._use, self.model, self.places)
        except ApiError:
            self.body.give_back()
            raise
        self._held = self.places
        self._wait_for(set(range(self.places)))
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Give back the places and the body's memory, unless that was done before."""
        self.body.give_back()
        self.give_places_back()

    def give_places_back(self) -> None:
        """Nothing more is generated. What is held of the answer may still have to be sent."""
        if self._held:
            self._wait_for(set())
            self._leave(self._held)

    def see(self, event: StreamEvent, choice: int = 0) -> None:
        """Spend what `event` costs; a choice's first token takes it out of the queue, its end gives its place back."""
        if isinstance(event, Delta):
            if self._waiting:
                self._has_begun(choice)
            self._spend(len(event.token_ids))
        elif isinstance(event, Admitted):
            self.body.line_sent()
            self._spend(event.prompt_tokens)
        elif isinstance(event, Finished):
            self._has_begun(choice)
            self._leave(1)

    def _leave(self, places: int) -> None:
        self._held -= places
        self.admission.leave_place(self._use, places)

    def _spend(self, tokens: int) -> None:
        self._use.spend(tokens, self.admission.now_seconds())
        if self.caller.name:
            self.admission.metrics.key_tokens.of(self.caller.name).value += tokens

    def _has_begun(self, choice: int) -> None:
        if choice in self._waiting:
            self._wait_for(self._waiting - {choice})

    def _wait_for(self, choices: set[int]) -> None:
        if choices == self._waiting:
            return
        waiting = self.admission.waiting
        waiting[self.model] += len(choices) - len(self._waiting)
        self._waiting = choices
        self.admission.metrics.of(self.model.namespace).of_model(self.model.name).queued.set(waiting[self.model])
