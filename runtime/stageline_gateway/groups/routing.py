"""Which group takes a request: the one its affinity prefers, else the one with the fewest tokens outstanding.

Affinity is to the groups that a session, or the beginning of a prompt, has been to before, by rendezvous hashing: each
group gets a score from (key, group), and the best score wins. All gateway replicas agree on it without talking to each
other, and a group that leaves or comes moves its own keys only. A group that carries far more than its share is passed
over for the next in the order (a bounded load), so that one popular prompt can't bury it.

A request counts the tokens it is expected to cost, prompt and answer, less those that came already. Pure but for that
count. Among equals the group that was given the fewest requests so far is taken, so idle groups take turns.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, assert_never

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt

SESSION_HEADER: Final = "x-session-id"
"""Requests with the same value go to the same group while it can take them."""
PREFIX_CHARACTERS: Final = 256
PREFIX_TOKENS: Final = 64
"""Prompts that are shorter have no preference: what they share is quicker computed again than it is to crowd."""
LOAD_FACTOR: Final = 1.25
LOAD_SLACK_TOKENS: Final = 4096
"""How far above `LOAD_FACTOR` times the mean a group may be loaded: a few requests aren't a crowd."""


def ranked(key: str, groups: Iterable[GroupEndpoint]) -> list[GroupEndpoint]:
    """`groups` in the order in which `key` prefers them. A group's next incarnation keeps its place."""

    def score(group: GroupEndpoint) -> bytes:
        return blake2b(f"{group.model}\0{group.group}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()

    return sorted(groups, key=score, reverse=True)


def within_bound(load_tokens: int, mean_tokens: float) -> bool:
    """Whether a group with so many tokens outstanding may be preferred to one with fewer."""
    return load_tokens <= LOAD_FACTOR * mean_tokens + LOAD_SLACK_TOKENS


def affinity_key(prompt: Prompt, session: str = "", salt: str | None = None) -> str:
    """The session if there is one, else the prompt's beginning, with what its cached form is kept apart by; empty for
    neither."""
    if session:
        return f"session:{session}"
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
    """Names one incarnation of one group: what is known of one says nothing of the next at the same address."""
    return f"{group.url}#{group.group}.{group.incarnation}"


@dataclass(frozen=True, slots=True)
class Load:
    tokens: int = 0
    """Expected of the requests that run or wait there."""
    requests: int = 0
    started: int = 0


IDLE: Final = Load()


def choose(candidates: Sequence[GroupEndpoint], loads: Mapping[str, Load], affinity: str = "") -> GroupEndpoint | None:
    """The group for a request whose affinity key is `affinity`; None when there is no candidate."""

    def load(group: GroupEndpoint) -> Load:
        return loads.get(identity(group), IDLE)

    if affinity and candidates:
        mean_tokens = sum(load(group).tokens for group in candidates) / len(candidates)
        # At least one group has no more than the mean, so one is always found.
        return next(g for g in ranked(affinity, candidates) if within_bound(load(g).tokens, mean_tokens))
    return min(candidates, key=lambda g: (load(g).tokens, load(g).started, g.group), default=None)


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
        self.ledger.add(self.key, tokens=-spent)


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
        now = self.loads.get(key, IDLE)
        self.loads[key] = Load(now.tokens + tokens, now.requests + requests, now.started + started)

    def keep(self, keys: Collection[str]) -> None:
        """Forget groups that are gone, unless a request still runs on one."""
        self.loads = {key: load for key, load in self.loads.items() if key in keys or load.requests}
