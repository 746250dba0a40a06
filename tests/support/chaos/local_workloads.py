"""What a local group is asked to do, drawn from a seed, and what each request must get whatever else goes on."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from torch import Tensor

from oracles.hash_model import VOCAB_SIZE
from oracles.scripted_drafts import Drafting
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.plan_bus.step_plan import blocks_of
from stageline_runtime.sampling.sampler import sample

SLOT_TOKENS = 64
STEMS = tuple(tuple((7 * stem + 3 * index * index) % VOCAB_SIZE for index in range(40)) for stem in range(2))
"""Beginnings that prompts share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, before it is queued."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    sampling: RequestSampling
    tokens_known: int = 0
    """How many of its tokens another engine has generated already; they come with the request."""
    priority: int = 0
    prompt_told: int = 0
    """Of how many of its prompt's tokens another engine has told log probabilities, where it asks for them."""

    @property
    def tells_prompt(self) -> bool:
        """Whether log probabilities of its prompt are asked for."""
        return self.sampling.num_top_prompt_logprobs is not None

    def request(self, name: str, generated: Sequence[int]) -> Request:
        """The request as the scheduler takes it."""
        return Request(
            request_id=name,
            prompt=self.prompt,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            output=list(generated),
            priority=self.priority,
            prompt_told=max(1, min(self.prompt_told, len(self.prompt))),
        )


@dataclass(frozen=True, slots=True)
class Add:
    """Requests arrive, together."""

    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of a request leaves, whether or not it is still answered; counted among those that have come."""

    which: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rowless plan, whatever else is in flight."""


@dataclass(frozen=True, slots=True)
class Dummy:
    """A plan of rows of nothing."""

    num_tokens: int


Act = Add | Abort | Heartbeat | Dummy


@dataclass(frozen=True, slots=True)
class Timed:
    """An act that may happen once so many plans are finished, or earlier when nothing else goes on."""

    after_plans: int
    act: Act


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a group and what happens to it."""

    num_stages: int
    slots_per_cohort: int
    max_step_tokens: int
    script: tuple[Timed, ...]
    num_blocks: int | None = None
    """KV cache of all slots of a rank together; None: enough."""
    num_ranks: int = 1
    """Of each stage, among which experts are divided, so that each has requests of its own, or layers shared."""
    shares_layers: bool = False
    """Whether it is the layers."""
    prefix_cache: bool = False
    drafting: Drafting | None = None
    """Where requests take drafts from; None: there are none."""
    draft_context_tokens: int = SLOT_TOKENS
    """Of a draft model."""

    @property
    def num_samplers(self) -> int:
        """Ranks of the last stage that sample: those that have requests of their own."""
        return 1 if self.shares_layers else self.num_ranks

    @property
    def num_slots(self) -> int:
        return self.num_stages * self.slots_per_cohort

    @property
    def most_blocks(self) -> int:
        """Blocks that all slots of a rank could take."""
        return -(-self.num_slots // self.num_samplers) * blocks_of(SLOT_TOKENS)


def draw_workload(random: Random, num_stages: int | None = None) -> Workload:
    """Bursts and single requests, few slots, clients that leave at any moment, heartbeats and dummies in between."""
    script: list[Timed] = []
    asks: list[Ask] = []
    plans = 0
    for _ in range(random.randint(3, 9)):
        plans += random.choice((0, 0, 1, 2, 5))
        script.append(Timed(plans, _draw_act(random, asks)))
    workload = Workload(
        num_stages=num_stages or random.randint(1, 4),
        slots_per_cohort=random.randint(1, 2),
        max_step_tokens=random.choice((2, 4, 8, 16, 40)),
        script=tuple(script),
        prefix_cache=random.random() < 0.6,
    )
    if random.random() < 0.5:
        return workload
    return replace(workload, num_blocks=random.randint(blocks_of(SLOT_TOKENS), workload.most_blocks))


def _draw_act(random: Random, asks: list[Ask]) -> Act:
    match random.choices(("burst", "single", "abort", "heartbeat", "dummy"), (4, 2, 5, 1, 1))[0]:
        case "burst":
            return Add(tuple(_draw_ask(random, asks) for _ in range(random.randint(2, 4))))
        case "single":
            return Add((_draw_ask(random, asks),))
        case "abort":
            return Abort(random.randrange(64))
        case "heartbeat":
            return Heartbeat()
        case _:
            return Dummy(random.choice((1, 4)))


def _draw_ask(random: Random, asks: list[Ask]) -> Ask:
    """A new request, or one of `asks` once more, of which another engine has generated some tokens."""
    again = asks and random.random() < 0.25
    ask = replace(random.choice(asks), tokens_known=random.randint(0, 8)) if again else _draw_new_ask(random)
    asks.append(ask)
    return ask


def _draw_new_ask(random: Random) -> Ask:
    """A prompt of 1 to 48 tokens, often with a beginning that others share, and up to 8 new ones."""
    stem = random.choice(STEMS)[: random.choice((0, 0, 0, 15, 17, 33, 36))]
    prompt = stem + tuple(random.randrange(VOCAB_SIZE) for _ in range(random.choice((1, 2, 3, 5, 8, 12))))
    stops = random.sample(range(VOCAB_SIZE), 4) if random.random() < 0.35 else []
    return Ask(
        prompt=prompt,
        max_new_tokens=random.choice((1, 2, 3, 5, 8)),
        stop_token_ids=frozenset(stops),
        sampling=_draw_sampling(random, prompt),
        tokens_known=random.choice((0, 0, 0, 1, 4)),
        priority=random.choice((0, 0, 1)),
        prompt_told=_draw_of_prompt(prompt).choice((0, 0, 1, 3, 17)),
    )


def _draw_of_prompt(prompt: tuple[int, ...]) -> Random:
    """Decides what is asked of a prompt, by itself: the workloads that seeds stand for are what they were."""
    return Random(repr(prompt))


def _draw_sampling(random: Random, prompt: tuple[int, ...]) -> RequestSampling:
    kind = random.choice(("greedy", "frequency", "repetition", "noise"))
    return RequestSampling(
        temperature=1.0 if kind == "noise" else 0.0,
        top_p=1.0,
        top_k=0,
        seed=random.randrange(1_000),
        choice=0,
        frequency_penalty=2.0 if kind == "frequency" else 0.0,
        repetition_penalty=3.0 if kind == "repetition" else 1.0,
        num_prompt_tokens=len(prompt),
        num_top_prompt_logprobs=_draw_of_prompt(prompt[::-1]).choice((*(None,) * 10, 0, 2)),
    )


def expected_output(ask: Ask, logits_after: Callable[[list[int]], Tensor]) -> tuple[int, ...]:
    """The tokens of a request that is alone in the world: its whole context computed anew for each."""
    output: list[int] = []
    while len(output) < ask.max_new_tokens:
        context = [*ask.prompt, *output]
        logits = logits_after(context).clone()
        _penalise(logits, ask, output)
        output.append(_draw_token(logits, ask.sampling, position=len(context)))
        if output[-1] in ask.stop_token_ids:
            break
    return tuple(output)


def _penalise(logits: Tensor, ask: Ask, output: list[int]) -> None:
    for token in {*ask.prompt, *output}:
        penalty = ask.sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(output).items():
        logits[token] -= ask.sampling.frequency_penalty * count


def _draw_token(logits: Tensor, sampling: RequestSampling, *, position: int) -> int:
    return int(sample(logits[None], [sampling], [position]))
