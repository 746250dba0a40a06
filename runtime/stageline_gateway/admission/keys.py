"""API keys: what a keys file holds, who a request comes from, and what each key has used of its limits. Pure.

Only SHA-256 digests of keys are kept, and a presented key is compared with every one of them in constant time. A key
is random, so that a plain digest of it tells nothing. No message made here holds a key or a digest.
"""

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from stageline_api.engine_http import HIGHEST_PRIORITY, LOWEST_PRIORITY
from stageline_gateway.errors import ApiError, shown
from stageline_gateway.served_models import ServedModel

SHORTEST_KEY_CHARACTERS: Final = 16
_MODEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/\*|[^\s*]+")
_AUTHENTICATE: Final = {"www-authenticate": 'Bearer realm="stageline"'}


class KeysError(Exception):
    """Keys that can't be used, with a sentence that names the field and the rule and never the key."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, hide_input_in_errors=True)


class Limits(_Entry):
    """What one key may ask for; None is without a bound."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Of prompts and answers together."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Requests being answered at once; each choice of `n` counts."""

    @property
    def have_rates(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


def _model(text: str) -> str:
    if not _MODEL.fullmatch(text):
        raise ValueError(f"{shown(text)} must be a model's name, 'namespace/name', or 'namespace/*'")
    return text


class KeyEntry(Limits):
    """One key of a keys file: its digest, or the key itself."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    """Stands for the key in metrics and logs."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    key: Annotated[str, Field(min_length=SHORTEST_KEY_CHARACTERS, max_length=1024)] | None = Field(None, repr=False)
    models: tuple[Annotated[str, AfterValidator(_model)], ...] | None = None
    """Models it may use: served names, `namespace/name`, or `namespace/*` for all of a namespace. None is all."""
    priority: Annotated[int, Field(ge=HIGHEST_PRIORITY, le=LOWEST_PRIORITY)] = 0
    """Lower runs first."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.sha256 is None) == (self.key is None):
            raise ValueError("give either 'sha256' or 'key'")
        return self

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.key.encode()).digest() if self.key else bytes.fromhex(self.sha256 or "")


class KeysDocument(_Entry):
    keys: tuple[KeyEntry, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from, and what it may do."""

    name: str = ""
    """Empty where the gateway has no keys."""
    limits: Limits = field(default_factory=Limits)
    models: frozenset[str] | None = None
    priority: int = 0

    def may_use(self, model: ServedModel, is_only_one: bool) -> bool:
        """Whether its list has the model. A bare name counts where the model is the only one that has it."""
        listed = self.models
        if listed is None or model.full_name in listed or f"{model.namespace}/*" in listed:
            return True
        return is_only_one and model.name in listed

    def check_name(self, asked: str, names: Collection[str]) -> None:
        """Raise ApiError 403 for a name of others, whether or not it means anything.

        `names` are the bare names of the models that it means, none of which this caller may use.
        """
        if self.models is None:
            return
        if any(name in self.models for name in names):
            raise _not_allowed(
                "This API key lists the model by a name that several namespaces have; its entry must say which one, "
                "as namespace/name."
            )
        is_listed = asked in self.models or f"{asked.partition('/')[0]}/*" in self.models
        if names or not is_listed:
            raise _not_allowed("This API key may not use the model asked for; GET /v1/models lists those it may.")


def _not_allowed(message: str) -> ApiError:
    return ApiError(403, message, "permission_error", param="model", code="model_not_allowed")


ANYONE: Final = Caller()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of one version of the keys."""

    callers: Mapping[bytes, Caller]
    """By digest of the key."""

    def caller_of(self, authorization: str | None) -> Caller:
        """The caller whose key the header `Authorization` holds; raises ApiError 401."""
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("Send an API key in the header 'Authorization: Bearer <key>'.")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [caller for digest, caller in self.callers.items() if hmac.compare_digest(digest, presented)]
        if not found:
            raise _unauthorized("The API key is not known here.")
        return found[0]


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, "authentication_error", code="invalid_api_key", extra_headers=_AUTHENTICATE)


def key_ring(documents: Mapping[str, bytes]) -> KeyRing:
    """The keys in `documents`, by their files' names.

    Raises:
        KeysError: a document is malformed, or a name or a key is there twice.
    """
    callers: dict[bytes, Caller] = {}
    names: set[str] = set()
    for file_name, content in documents.items():
        for entry in _parsed(file_name, content).keys:
            if entry.name in names:
                raise KeysError(f"{file_name}: the name {entry.name!r} is given to two keys")
            if entry.digest in callers:
                raise KeysError(f"{file_name}: key {entry.name!r} is the same as {callers[entry.digest].name!r}")
            names.add(entry.name)
            models = None if entry.models is None else frozenset(entry.models)
            limits = Limits.model_validate(entry.model_dump(include=set(Limits.model_fields)), by_name=True)
            callers[entry.digest] = Caller(entry.name, limits, models, entry.priority)
    return KeyRing(callers)


def _parsed(file_name: str, content: bytes) -> KeysDocument:
    try:
        document: Any = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError):
        # The parser's own words quote the line, which may hold a key.
        raise KeysError(f"{file_name} is not YAML") from None
    try:
        return KeysDocument.model_validate(document)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(step) for step in fault["loc"]) or "top level"
        raise KeysError(f"{file_name}: {place}: {fault['msg']}") from None


WINDOW_SECONDS: Final = 60.0
QUESTIONS_PER_MINUTE: Final = 1200
"""Of one key: what lists and draws (`GET`), and takes no place."""


@dataclass(slots=True)
class Bucket:
    """A token bucket: starts full, holds a minute's worth, fills evenly, and may be overdrawn."""

    taken: float = 0.0
    """At `at_seconds`."""
    at_seconds: float = 0.0
    capacity: int = 0
    """Fills within a minute."""

    def fill(self, capacity: int, now_seconds: float) -> None:
        """Fill it up to now, and from now on by the rate of `capacity`; what is taken stays taken."""
        self.taken = self.taken_at(now_seconds)
        self.at_seconds = max(now_seconds, self.at_seconds)
        self.capacity = capacity

    def take(self, amount: float) -> None:
        self.taken += amount

    def taken_at(self, now_seconds: float) -> float:
        """What is still taken at that time."""
        filled = max(0.0, now_seconds - self.at_seconds) * self.capacity / WINDOW_SECONDS
        return max(0.0, self.taken - filled)


def _seconds_to_gain(amount: float, capacity: int) -> float:
    return max(0.0, amount * WINDOW_SECONDS / capacity)


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that keeps a request out: its name in the keys file, its value, and when to try again."""

    limit: str
    value: int
    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one limit leaves, for the `x-ratelimit-*` headers."""

    kind: str
    limit: int
    remaining: int
    reset_seconds: float
    """Until the limit is whole again."""

    def headers(self) -> dict[str, str]:
        return {
            f"x-ratelimit-limit-{self.kind}": str(self.limit),
            f"x-ratelimit-remaining-{self.kind}": str(self.remaining),
            f"x-ratelimit-reset-{self.kind}": f"{self.reset_seconds:.3f}s",
        }


@dataclass(slots=True)
class KeyUse:
    """What one key has used of its limits. Pure: time is an argument.

    A request takes one from the bucket of requests as soon as its key is known, whatever becomes of it, and one of the
    key's places from then on. Tokens are taken as they are counted, the prompt's when the engine has counted them and
    each of the answer's when it arrives: that bucket may be overdrawn by running answers, and no request is admitted
    until that is paid back.
    """

    limits: Limits = field(default_factory=Limits)
    places: int = 0
    """Choices of open requests."""
    arriving: int = 0
    """Requests whose bodies are being received."""
    _requests: Bucket = field(default_factory=Bucket)
    _tokens: Bucket = field(default_factory=Bucket)
    _questions: Bucket = field(default_factory=Bucket)

    def follow(self, limits: Limits, now_seconds: float) -> None:
        """Be up to date, with the limits of the newest version of the keys; what was used stays used."""
        self.limits = limits
        if limits.requests_per_minute is not None:
            self._requests.fill(limits.requests_per_minute, now_seconds)
        if limits.tokens_per_minute is not None:
            self._tokens.fill(limits.tokens_per_minute, now_seconds)

    @property
    def open(self) -> int:
        """Places in use, by choices or by arriving requests."""
        return self.places + self.arriving

    def exceeded(self, places: int = 1, has_paid: bool = False) -> Exceeded | None:
        """What keeps another request of so many places out now, or None. `follow` must have been called for now.

        `has_paid`: the request has been taken from its bucket before.
        """
        limits = self.limits
        if (most := limits.concurrency) is not None and self.open + places > most:
            return Exceeded("concurrency", most, 1.0)
        if (
            not has_paid
            and (most := limits.requests_per_minute) is not None
            and (level := most - self._requests.taken) < 1
        ):
            return Exceeded("requestsPerMinute", most, _seconds_to_gain(1 - level, most))
        if (most := limits.tokens_per_minute) is not None and (level := most - self._tokens.taken) <= 0:
            return Exceeded("tokensPerMinute", most, _seconds_to_gain(1 - level, most))
        return None

    def arrive(self) -> None:
        """A request has come; `has_arrived` ends that."""
        self.arriving += 1
        if self.limits.requests_per_minute is not None:
            self._requests.take(1)

    def has_arrived(self) -> None:
        self.arriving -= 1

    def asked(self, now_seconds: float) -> Exceeded | None:
        """Count a question that generates nothing; returns what keeps it out, if anything does."""
        most = QUESTIONS_PER_MINUTE
        self._questions.fill(most, now_seconds)
        if (level := most - self._questions.taken) < 1:
            return Exceeded("questionsPerMinute", most, _seconds_to_gain(1 - level, most))
        self._questions.take(1)
        return None

    def spend(self, tokens: int, now_seconds: float) -> None:
        """Count tokens of prompts and answers from now on: the time before has paid nothing of them."""
        if (most := self.limits.tokens_per_minute) is not None:
            self._tokens.fill(most, now_seconds)
            self._tokens.take(tokens)

    def allowances(self, limits: Limits, now_seconds: float) -> list[Allowance]:
        """What `limits` leave now. Changes nothing."""
        of_kinds = (
            ("requests", limits.requests_per_minute, self._requests),
            ("tokens", limits.tokens_per_minute, self._tokens),
        )
        return [
            _allowance(kind, capacity, bucket.taken_at(now_seconds))
            for kind, capacity, bucket in of_kinds
            if capacity is not None
        ]


def _allowance(kind: str, capacity: int, taken: float) -> Allowance:
    return Allowance(kind, capacity, max(0, int(capacity - taken)), _seconds_to_gain(taken, capacity))
