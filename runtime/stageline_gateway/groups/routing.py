"""Which group gets a request: of the groups open to it, the one with most of its prompt in the cache.

A group is open if it has a free slot, and not many more requests than the others (a bounded load): so one popular
prompt can't overload it. Its engine's own request count is included, since other gateways send it requests too.

If no cache is known to hold any of the prompt, its prefix has a preference by rendezvous hashing: each group gets a
score from (key, group), and the best score wins. All gateway replicas agree on it without communication, and a group
that joins or leaves moves its own keys only. If the client names its session, only that name is hashed.

A request counts the tokens it is expected to cost, prompt and answer, minus those already received. Pure except for
that count. Among equals the group that got the fewest requests so far is chosen, so idle groups alternate.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Final, NamedTuple, assert_never

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import ChatPrompt, GenerateRequest, Prompt, PromptPrefix, TextPrompt, TokenPrompt
from stageline_gateway.groups.prompt_prefixes import prefixes_of

SESSION_HEADER: Final = "x-session-id"
"""Requests with the same value go to the same group while it can take them."""
SESSION_CHARACTERS: Final = 256
"""That count of such a value: it is hashed for every group and choice."""
PREFIX_CHARACTERS: Final = 256
PREFIX_TOKENS: Final = 64
"""Prompts that are shorter have no preference: what they share is quicker computed again than it is to crowd."""
LOAD_FACTOR: Final = 1.25
SLACK_OF_SLOTS: Final = 1 / 16
"""How far above `LOAD_FACTOR` times the least loaded one a group may be loaded, in shares of its slots, and at least
one request: a few aren't a crowd. Measured by the least, not by the mean: so none idles while others are busy."""
MOST_SLACK: Final = 4.0
"""Requests, however many slots there are: of hundreds a sixteenth would be a crowd beside a group that idles."""


def ranked(key: str, groups: Iterable[GroupEndpoint]) -> list[GroupEndpoint]:
    """`groups` in the order in which `key` prefers them. A group's next incarnation keeps its place."""

    def score(group: GroupEndpoint) -> bytes:
        return blake2b(f"{group.model}\0{group.group}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()

    return sorted(groups, key=score, reverse=True)


def affinity_key(prompt: Prompt, session: str = "", salt: str | None = None) -> str:
    """The session if there is one, else the prompt's beginning, with what its cached form is kept apart by; empty for
    neither."""
    if session:
        return f"session:{session[:SESSION_CHARACTERS]}"
    key = _beginning_key(prompt)
    return f"salt:{salt}\0{key}" if salt and key else key


def _beginning_key(prompt: Prompt) -> str:
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            is_long = len(token_ids) >= PREFIX_TOKENS
            return "tokens:" + ",".join(map(str, token_ids[:PREFIX_TOKENS])) if is_long else ""
        case TextPrompt(text=text):
            return f"text:{text[:PREFIX_CHARACTERS]}" if len(text) >= PREFIX_CHARACTERS else ""
        case ChatPrompt():
            beginning = _beginning(prompt)
            return f"chat:{beginning}" if len(beginning) >= PREFIX_CHARACTERS else ""
        case _:
            assert_never(prompt)


def _beginning(prompt: ChatPrompt) -> str:
    beginning = ""
    for message in prompt.messages:
        beginning += f"{message.role}\0{message.content}\0"
        if len(beginning) >= PREFIX_CHARACTERS:
            break
    return beginning[:PREFIX_CHARACTERS]


CHARACTERS_PER_TOKEN: Final = 4
EXPECTED_ANSWER_TOKENS: Final = 256
"""What a request without `max_tokens` is taken to generate, and the most that any is counted with: few use their
limit."""


def identity(group: GroupEndpoint) -> str:
    """Names one incarnation of one group: its state doesn't apply to the next one at the same address."""
    return f"{group.url}#{group.group}.{group.incarnation}"


@dataclass(slots=True)
class Load:
    tokens: int = 0
    """Expected of the requests that run or wait there."""
    requests: int = 0
    started: int = 0


IDLE: Final = Load()


@dataclass(frozen=True, slots=True)
class EngineAccount:
    """What a group's engine said of itself, beside what this gateway knows of its own requests there."""

    slots: int | None = None
    """How many requests can run at once."""
    from_others: int = 0
    """Requests that run or wait there, and that this gateway didn't send."""
    held: Set[str] = frozenset()
    """Names of prompt prefixes that its cache holds, or soon will."""
    weights: str | None = None
    """Digest of the weights it computes with; empty where it doesn't say, None while it has not been heard."""

    @property
    def slack(self) -> float:
        return min(MOST_SLACK, max(1.0, SLACK_OF_SLOTS * (self.slots or 0)))


UNKNOWN: Final = EngineAccount()
SENT_SECONDS: Final = 5.0
"""So long a request's prompt counts as held where it was sent to, though its engine doesn't say so: it may wait."""


@dataclass(slots=True)
class EngineAccounts:
    """The newest account of every engine, by `identity`, and the prompt prefixes sent to it since."""

    known: dict[str, EngineAccount] = field(default_factory=dict)
    _sent: dict[str, dict[str, float]] = field(default_factory=dict)

    def of(self, key: str) -> EngineAccount:
        return self.known.get(key, UNKNOWN)

    def take(self, key: str, account: EngineAccount, now_seconds: float) -> None:
        """Apply an engine's report; prefixes sent to it shortly before still count as held."""
        sent = {name: at for name, at in self._sent.get(key, {}).items() if now_seconds - at < SENT_SECONDS}
        self._sent[key] = sent
        self.known[key] = replace(account, held={*account.held, *sent})

    def note_sent(self, key: str, prefixes: Iterable[PromptPrefix], now_seconds: float) -> None:
        account = self.of(key)
        names = {name: now_seconds for name, _ in prefixes}
        self._sent.setdefault(key, {}).update(names)
        self.known[key] = replace(account, held=account.held | names.keys())

    def keep(self, keys: Collection[str]) -> None:
        """Forget groups that are gone."""
        self.known = {key: account for key, account in self.known.items() if key in keys}
        self._sent = {key: sent for key, sent in self._sent.items() if key in keys}


class Wish(NamedTuple):
    """Where a request would rather go."""

    affinity: str = ""
    """Its key, or empty."""
    prefixes: tuple[PromptPrefix, ...] = ()
    """Beginnings of its prompt, the shortest first; none where only the key counts."""

    @classmethod
    def of(cls, request: GenerateRequest, session: str) -> "Wish":
        """Of a request; its client may have named its session."""
        affinity = affinity_key(request.prompt, session, request.cache_salt)
        return cls(affinity, () if session or not affinity else prefixes_of(request))

    def held_by(self, account: EngineAccount) -> float:
        """Which share of the prompt a group's cache holds."""
        return next((share for name, share in reversed(self.prefixes) if name in account.held), 0.0)


NO_WISH: Final = Wish()


@dataclass(frozen=True, slots=True)
class Standing:
    """One candidate as a request finds it."""

    group: GroupEndpoint
    load: Load
    account: EngineAccount

    @property
    def requests(self) -> int:
        return self.load.requests + self.account.from_others

    @property
    def tokens(self) -> int:
        return self.load.tokens + self.account.from_others * EXPECTED_ANSWER_TOKENS

    @property
    def has_free_slot(self) -> bool:
        return self.account.slots is None or self.requests < self.account.slots

    def is_within(self, least_requests: int) -> bool:
        """Whether it may be preferred to one with so few requests."""
        return self.requests <= LOAD_FACTOR * least_requests + self.account.slack

    @property
    def burden(self) -> tuple[int, int, int]:
        """Among otherwise equal groups, the smallest is chosen."""
        return self.tokens, self.load.started, self.group.group


def choose(
    candidates: Sequence[GroupEndpoint],
    loads: Mapping[str, Load],
    wish: Wish = NO_WISH,
    accounts: Mapping[str, EngineAccount] = MappingProxyType({}),
) -> GroupEndpoint | None:
    """The group for a request; None when there is no candidate. `loads` and `accounts` are keyed by `identity`."""
    if len(candidates) < 2:
        return next(iter(candidates), None)
    keys = [identity(group) for group in candidates]
    standings = [
        Standing(group, loads.get(key, IDLE), accounts.get(key, UNKNOWN))
        for key, group in zip(keys, candidates, strict=True)
    ]
    if not wish.affinity:
        return min(standings, key=lambda each: each.burden).group
    least = min(each.requests for each in standings)
    within = [each for each in standings if each.is_within(least)]
    opened = [each for each in within if each.has_free_slot] or within
    most = max(wish.held_by(each.account) for each in opened)
    if most > 0:
        return min((each for each in opened if wish.held_by(each.account) == most), key=lambda each: each.burden).group
    return ranked(wish.affinity, [each.group for each in opened])[0]


def expected_tokens(request: GenerateRequest) -> int:
    """What `request` is expected to cost: its prompt, guessed from its length, what it has, and what it may add."""
    generated = len(request.generated_token_ids)
    still_allowed = (request.sampling.max_tokens or EXPECTED_ANSWER_TOKENS) - generated
    return _prompt_tokens(request.prompt) + generated + max(1, min(still_allowed, EXPECTED_ANSWER_TOKENS))


def _prompt_tokens(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids)
        case TextPrompt(text=text):
            return len(text) // CHARACTERS_PER_TOKEN + 1
        case ChatPrompt(messages=messages):
            return sum(len(message.content) // CHARACTERS_PER_TOKEN + 1 for message in messages)
        case _:
            assert_never(prompt)


def why_not_ready(model: str, groups: Iterable[GroupEndpoint]) -> str:
    """One sentence for a client or a probe: why none of `groups` can take a request."""
    reasons = [f"group {group.group}: {group.message or 'not ready'}" for group in groups if not group.ready]
    return f"No group of model '{model}' is ready ({'; '.join(reasons) or 'no group exists'})."


@dataclass(slots=True)
class Lease:
    ledger: "Ledger"
    key: str
    tokens: int

    def spend(self, num_tokens: int) -> None:
        """Reduce the load by tokens that have come."""
        spent = min(num_tokens, self.tokens)
        self.tokens -= spent
        self.ledger.loads[self.key].tokens -= spent


@dataclass(slots=True)
class Ledger:
    loads: dict[str, Load] = field(default_factory=dict)

    @contextmanager
    def lease(self, key: str, tokens: int) -> Iterator[Lease]:
        """Count one request of so many expected tokens against a group while the context lasts."""
        lease = Lease(self, key, tokens)
        self.add(key, tokens=tokens, requests=1, started=1)
        try:
            yield lease
        finally:
            self.add(key, tokens=-lease.tokens, requests=-1)

    def add(self, key: str, tokens: int = 0, requests: int = 0, started: int = 0) -> None:
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = Load()
        load.tokens += tokens
        load.requests += requests
        load.started += started

    def keep(self, keys: Collection[str]) -> None:
        """Forget groups that are gone, unless a request still runs on one."""
        self.loads = {key: load for key, load in self.loads.items() if key in keys or load.requests}
