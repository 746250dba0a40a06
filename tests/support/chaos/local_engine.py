"""The engine's end of a local group: the real scheduler, a plan bus whose every delivery is an event, and the checks.

It pumps as the engine's core does: up to one more plan in flight than there are stages, once for a burst, and again
after each finished plan. Checked here: every token that reaches a client, and every plan that is sent.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

import torch

from chaos.interleaving import Interleaving
from chaos.local_workloads import SLOT_TOKENS, Abort, Act, Add, Ask, Dummy, Heartbeat, Workload
from oracles.hash_model import VOCAB_SIZE, reference_logits
from oracles.scripted_drafts import MODELS, UNSCRIPTED, Drafting, MoodyModelDrafts, ScriptedDrafts, speculation
from stageline_runtime.engine.group.rank_results import RankResults
from stageline_runtime.engine.scheduling.scheduler import NewToken, Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import (
    Drafted,
    DraftedRow,
    Place,
    PromptReport,
    Shutdown,
    StepDone,
    StepPlan,
)
from stageline_runtime.plan_bus.prompt_report import unpacked
from stageline_runtime.plan_bus.step_plan import plan_of_rank, rank_of_slot
from stageline_runtime.sampling.sampler import sample
from stageline_runtime.speculation.speculation import Speculation

Message = StepPlan | Shutdown
MAX_SAMPLES_IN_FLIGHT = 2
"""Of one request: one that runs and one that waits on the bus for its feedback."""


class LocalEngine:
    """Acts out a workload; everything it does is an event of the interleaving."""

    def __init__(
        self, workload: Workload, expected: Callable[[Ask], tuple[int, ...]], interleaving: Interleaving
    ) -> None:
        """`expected` says what a request must get."""
        self.workload = workload
        self.expected = expected
        ledger = SlotLedger(
            workload.num_stages,
            workload.num_slots,
            SLOT_TOKENS,
            workload.num_blocks,
            prefix_cache=workload.prefix_cache,
            num_ranks=workload.num_samplers,
        )
        self._results = RankResults(workload.num_samplers, self._step_done, self._take_seen_drafts)
        self.scheduler = Scheduler(
            ledger,
            max_step_tokens=workload.max_step_tokens,
            max_waiting=64,
            speculation=_speculation(workload),
        )
        self.asks: dict[str, Ask] = {}
        self.outputs: dict[str, list[int]] = {}
        self.told: dict[str, int] = {}
        """Of how many of a request's prompt tokens log probabilities are known."""
        self.logits_after: Callable[[list[int]], torch.Tensor] | None = None
        """What the model says after some tokens, to hold log probabilities against."""
        self.live: set[str] = set()
        self.plans: list[StepPlan] = []
        self.seen: Counter[str] = Counter()
        """How often the rarer things happened, so that a test can tell that its runs meet them."""
        self.done: deque[StepDone | Drafted] = deque()
        """On the way from the last stage."""
        places = [Place(stage, rank) for stage in range(workload.num_stages) for rank in range(workload.num_ranks)]
        self.mailboxes: dict[Place, deque[Message]] = {place: deque() for place in places}
        """Delivered to a rank of a stage, and not yet looked at by it."""
        self._on_the_bus: dict[Place, deque[Message]] = {place: deque() for place in places}
        self._script = deque(workload.script)
        self._pump_wanted = False
        self._shut_down = False
        self._plans_done = 0
        self._drafts_taken = 0
        self._drafts_due: list[int] = []
        """Plans after which the last stage has yet to draft."""
        self._used_blocks: set[tuple[int, int]] = set()
        self._samples_in_flight: Counter[tuple[int, int]] = Counter()
        for place, bus in self._on_the_bus.items():
            name = f"bus to {place.words(workload.num_ranks)}"
            interleaving.add_event(name, partial(bool, bus), partial(self._deliver_to, place))
        interleaving.add_event("client", self._script_may_go_on, self._go_on)
        interleaving.add_event("pump", lambda: self._pump_wanted, self._pump)
        interleaving.add_event("bus to the engine", lambda: bool(self.done), self._hear)
        interleaving.add_event("shutdown", self._may_shut_down, self._shut_all_down)

    def close(self) -> None:
        """The run has ended, well or not."""

    def _deliver_to(self, place: Place) -> None:
        self.mailboxes[place].append(self._on_the_bus[place].popleft())

    def _send(self, message: Message) -> None:
        for bus in self._on_the_bus.values():
            bus.append(message)

    def parts(self, plan: StepPlan) -> list[StepPlan]:
        """What each rank that samples runs of a plan; others run what the first one does."""
        samplers = self.workload.num_samplers
        return [plan_of_rank(plan, rank, samplers) for rank in range(samplers)]

    def _idle(self) -> bool:
        return not (
            self.scheduler.has_requests or self.scheduler.num_plans_in_flight or self._pump_wanted or self._drafts_due
        )

    def _script_may_go_on(self) -> bool:
        return bool(self._script) and (self._plans_done >= self._script[0].after_plans or self._idle())

    def _go_on(self) -> None:
        self._act(self._script.popleft().act)
        self._pump_wanted = True

    def _may_shut_down(self) -> bool:
        return not self._shut_down and not self._script and self._idle()

    def _shut_all_down(self) -> None:
        self._shut_down = True
        self._send(Shutdown("drained"))

    def _act(self, act: Act) -> None:
        match act:
            case Add(asks=asks):
                for ask in asks:
                    self._add(ask)
            case Abort(which=which):
                self._abort(which)
            case Heartbeat():
                self._send_plan(self.scheduler.heartbeat())
            case Dummy(num_tokens=num_tokens):
                self._send_plan(self.scheduler.warm_up(num_tokens))
            case _:
                assert_never(act)

    def _add(self, ask: Ask) -> None:
        name = f"request {len(self.asks)}"
        expected = self.expected(ask)
        generated = expected[: min(ask.tokens_known, len(expected) - 1)]
        self.seen["continued"] += bool(generated)
        self.asks[name] = ask
        self.outputs[name] = list(generated)
        self.told[name] = max(1, min(ask.prompt_told, len(ask.prompt)))
        self.live.add(name)
        self._submit(name, ask, generated)

    def _submit(self, name: str, ask: Ask, generated: tuple[int, ...]) -> None:
        request = ask.request(name, generated)
        self.scheduler.add(request)
        if self.workload.drafting not in (None, *UNSCRIPTED):
            request.drafts = ScriptedDrafts(
                self.workload.drafting, lambda: ask.prompt + self.expected(ask), len(self.asks), VOCAB_SIZE
            )

        if self.workload.drafting in MODELS:
            assert self.scheduler.speculation is not None, "drafting without speculation"
            request.drafts = MoodyModelDrafts(self.scheduler.speculation, len(self.asks))

    def _abort(self, which: int) -> None:
        if self.asks:
            name = f"request {which % len(self.asks)}"
            self._see_abort(name)
            self._leave(name)
            self.live.discard(name)

    def _leave(self, name: str) -> None:
        assert self.scheduler.abort(name) == (name in self.live)

    def _see_abort(self, name: str) -> None:
        if name not in self.live:
            self.seen["abort after the end"] += 1
        elif self.outputs[name]:
            self.seen["abort between tokens"] += 1
        else:
            self.seen["abort before the first token"] += 1

    def _pump(self) -> None:
        self._pump_wanted = False
        scheduler = self.scheduler
        while scheduler.num_plans_in_flight <= self.workload.num_stages and (plan := scheduler.schedule()) is not None:
            self._send_plan(plan)

    def _send_plan(self, plan: StepPlan) -> None:
        assert plan.seq == len(self.plans), f"plan {plan.seq} is the {len(self.plans)}th"
        self.plans.append(plan)
        self._see_plan(plan)
        self._drafts_due += [plan.seq for part in self.parts(plan) if part.draft_steps]
        for row in plan.sampled_rows:
            holder = (row.slot, row.generation)
            self._samples_in_flight[holder] += 1
            most = 1 if row.num_drafts else MAX_SAMPLES_IN_FLIGHT
            assert self._samples_in_flight[holder] <= most, f"plan {plan.seq}: one more of {row}"
        self._send(plan)

    def _is_used_again(self, plan: StepPlan) -> Iterator[bool]:
        """Of each new block of the plan's tables, whether another request had it before."""
        ranks = self.scheduler.ledger.num_ranks
        for change in plan.tables:
            for block in change.blocks if change.are_new else ():
                place = rank_of_slot(change.slot, ranks), block
                yield place in self._used_blocks
                self._used_blocks.add(place)

    def _see_plan(self, plan: StepPlan) -> None:
        self.seen["beginning shared"] += sum(fill.cached_tokens > 0 for fill in plan.fills)
        self.seen["block used again"] += sum(self._is_used_again(plan))
        self.seen["duplicate given up"] += sum(bool(each.start and not each.are_new) for each in plan.tables)
        self.seen["slot reused"] += sum(fill.generation > 1 for fill in plan.fills)
        self.seen["chunk of a longer prompt"] += sum(not row.need_sample for row in plan.rows)
        self.seen["verifying row"] += sum(row.num_drafts > 0 for row in plan.rows)
        self.seen["heartbeat between plans"] += plan.is_heartbeat and bool(self.live)
        parts = self.parts(plan)
        self.seen["idle rank"] += sum(part.dummy and not plan.dummy for part in parts)
        self.seen["rank drafts nothing"] += sum(bool(plan.draft_steps) and not part.draft_steps for part in parts)
        is_more = self.scheduler.ledger.held_blocks > (self.workload.num_blocks or self.workload.most_blocks)
        self.seen["more than a rank holds"] += is_more

    def _hear(self) -> None:
        match self.done.popleft():
            case StepDone() as done:
                self._results.step_done(done)
            case Drafted() as drafted:
                taken = self._drafts_taken
                self._results.drafted(drafted)
                self.seen["drafts before all have answered"] += self._drafts_taken == taken

    def _take_seen_drafts(self, drafted: Drafted) -> None:
        self._drafts_taken += 1
        self._see_drafted(drafted)
        self._take_drafts(drafted)

    def _see_drafted(self, drafted: Drafted) -> None:
        by_rank = [
            [(row.slot, row.generation) for row in part.drafted_rows]
            for part in self.parts(self.plans[drafted.seq])
            if part.draft_steps
        ]
        assert [(row.slot, row.generation) for row in drafted.rows] in by_rank, drafted
        assert drafted.seq < self._plans_done, f"{drafted} came before what was sampled"
        self._drafts_due.remove(drafted.seq)
        for row in drafted.rows:
            self._check_drafted(row)
        self.seen["drafted by the model"] += sum(bool(row.token_ids) for row in drafted.rows)
        self.seen["model has yet to catch up"] += sum(not row.token_ids for row in drafted.rows)

    def _check_drafted(self, row: DraftedRow) -> None:
        """The model has drafted from what was really said, and as it would have said it; penalties it knows in part."""
        name = self.scheduler.request_at(row.slot, row.generation)
        if name is None or not row.token_ids or self.asks[name].sampling.has_penalties:
            return
        ask = self.asks[name]
        context = [*ask.prompt, *self.expected(ask)][: row.position]
        assert len(context) == row.position, f"{name} has ended, and the engine has heard so"
        for token in row.token_ids:
            logits = torch.tensor([reference_logits(context, stages_of_draft_model(self.workload))])
            said = int(sample(logits, [ask.sampling], [len(context)]))
            assert token == said, f"{name}: {token} was drafted at {len(context)}, and the model says {said}"
            context.append(token)

    def _take_drafts(self, drafted: Drafted) -> None:
        self.scheduler.take_drafts(drafted)
        self._pump()

    def _step_done(self, done: StepDone) -> None:
        self._plans_done += 1
        for row in self.plans[done.seq].sampled_rows:
            self._samples_in_flight[row.slot, row.generation] -= 1
        self._see_verified(done)
        self._complete(done)

    def _see_verified(self, done: StepDone) -> None:
        told = {(row.slot, row.generation): row for row in done.rows}
        assert len(told) == len(done.rows) == len(self.plans[done.seq].sampled_rows), done
        for planned in self.plans[done.seq].sampled_rows:
            row = told[planned.slot, planned.generation]
            if planned.num_drafts:
                self.seen["all drafts hold"] += row.num_sampled == planned.num_draws
                self.seen["no draft holds"] += row.num_sampled == 1
                self.seen["some drafts hold"] += 1 < row.num_sampled < planned.num_draws
                holder = self.scheduler.request_at(planned.slot, planned.generation)
                self.seen["verifying row of a slot that passed on"] += holder is None

    def _complete(self, done: StepDone) -> None:
        for reported in self.scheduler.take_reports(done.reports):
            self._take_report(reported.request_id, reported.report)
        tokens = self.scheduler.complete(done.seq, done.rows)
        self.seen["preemption"] = self.scheduler.num_preemptions
        named = {token.request_id for token in tokens}
        self.seen["dead row"] += len(done.rows) - len(named)
        for token in tokens:
            self._deliver(token)
        self._pump()

    def _take_report(self, name: str, report: PromptReport) -> None:
        """Log probabilities of prompt tokens reach their client: the next ones, and right."""
        ask = self.asks[name]
        assert name in self.live, f"a report on {name}, which has ended"
        assert ask.tells_prompt, f"a report on {name}, which asked for none"
        assert report.position == self.told[name], f"{name}: {report.position} was told after {self.told[name]}"
        self.told[name] += report.num_tokens
        self.seen["prompt told in parts"] += self.told[name] < len(ask.prompt)
        if self.logits_after is None:
            return
        for position, one in enumerate(unpacked(report, 0, report.num_tokens), start=report.position):
            values = torch.log_softmax(self.logits_after(list(ask.prompt[:position])), dim=-1)
            own = values[ask.prompt[position]]
            assert abs(one.logprob - float(own)) < 1e-5, f"{name}: {one} at {position} instead of {own}"
            assert one.rank == int((values > own).sum()) + 1
            assert [token for token, _ in one.top] == values.topk(len(one.top)).indices.tolist()

    def _take(self, name: str, token: int) -> bool:
        """A token reaches its client; returns whether it has to be the last."""
        ask = self.asks[name]
        assert not ask.tells_prompt or self.told[name] == len(ask.prompt), f"{name}: {self.told[name]} were told"
        output = self.outputs[name]
        output.append(token)
        expected = self.expected(self.asks[name])
        assert output == list(expected[: len(output)]), f"{name}: {output} instead of {expected}"
        return len(output) == len(expected)

    def _deliver(self, new: NewToken) -> None:
        name = new.request_id
        assert name in self.live, f"a token of {name}, which has ended"
        assert new.finished == self._take(name, new.token), (
            f"{name}: finished {new.finished} after {self.outputs[name]}"
        )
        assert new.stopped == (new.token in self.asks[name].stop_token_ids)
        if new.finished:
            self.seen["end by a stop token" if new.stopped else "end by length"] += 1
            self.live.remove(name)


def stages_of_draft_model(workload: Workload) -> int:
    """How many stages the pipeline has that the draft model speaks for."""
    return workload.num_stages + (workload.drafting is Drafting.STRANGE_MODEL)


def _speculation(workload: Workload) -> Speculation | None:
    if workload.drafting is None:
        return None
    return speculation(draft_context_tokens=workload.draft_context_tokens if workload.drafting in MODELS else 0)
