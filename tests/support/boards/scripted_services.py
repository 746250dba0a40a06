"""What gateways and operators count while a script says how an installation does."""

from boards.metric_history import ScrapedTarget
from boards.scripted_moments import Clients, Model, Moment, spread_around
from stageline_gateway.engine_client.run_events import LossKind
from stageline_gateway.telemetry import metric_names as gateway
from stageline_gateway.telemetry.metrics import RESUME_OUTCOMES
from stageline_operator.controller.telemetry import metric_names as operator

STARTUP_SHARES = {"schedule": 0.02, "pull": 0.08, "prepare": 0.3, "start": 0.6}
RESOURCES = ("pipelinemodels", "pods", "services", "configmaps", "nodes")


def serve_clients(
    target: ScrapedTarget, moment: Moment, namespace: str, replicas: int, seconds: float, now: float
) -> None:
    """One gateway of several, which share the requests evenly; each sees the groups that have pods."""
    for name, model in moment.items():
        its = {"namespace": namespace, "model_name": name}
        _answer(target, model.clients, its, seconds / replicas)
        target.show(gateway.QUEUED, model.clients.queued / replicas, **its)
        target.show(gateway.IN_FLIGHT, model.clients.in_flight / replicas, **its)
        target.show(gateway.GROUPS, model.ready, ready="true", **its)
        target.show(gateway.GROUPS, model.up - model.ready, ready="false", **its)
        target.show(gateway.CIRCUITS_OPEN, 0, **its)
    for stale in (gateway.KEYS_STALE, gateway.TLS_STALE):
        target.show(stale, 0)
    target.show(gateway.ENDPOINTS_STALE, 0, namespace=namespace)
    target.show(gateway.DISCOVERY_AGE, 12, namespace=namespace)
    target.show(gateway.TLS_EXPIRY, now + 60 * 86400)
    target.show(gateway.BUILD_INFO, 1, version="0.1.0")


def _answer(target: ScrapedTarget, clients: Clients, its: dict[str, str], seconds: float) -> None:
    """A known model's rare counters begin at 0, as in the gateway."""
    for code, rate in ({"200": 0.0} | dict(clients.requests)).items():
        target.count(gateway.REQUESTS, rate * seconds, code=code, **its)
    for kind in LossKind:
        target.count(gateway.ENGINE_LOSSES, clients.losses.get(kind, 0.0) * seconds, kind=kind, **its)
    for outcome in RESUME_OUTCOMES:
        target.count(gateway.RESUMES, clients.resumes.get(outcome, 0.0) * seconds, outcome=outcome, **its)
    target.count(gateway.BROKEN_ANSWERS, clients.broken_per_second * seconds, **its)
    target.count(gateway.SLOW_READERS, clients.slow_readers_per_second * seconds, **its)
    if clients.refused_per_second:
        reason = "rate_limit_exceeded"
        target.count(gateway.REFUSALS, clients.refused_per_second * seconds, key_name="team-a", reason=reason)
    if left := clients.requests.get("499", 0.0) * seconds:
        target.observe(gateway.ABANDONED_AFTER, spread_around(clients.first_token_seconds, left), **its)
    answered = clients.requests.get("200", 0.0) * seconds
    target.count(gateway.PROMPT_TOKENS, answered * 200, **its)
    target.count(gateway.GENERATION_TOKENS, answered * clients.tokens_per_answer, **its)
    if not answered:
        return
    target.count(gateway.KEY_TOKENS, answered * (200 + clients.tokens_per_answer), key_name="team-a")
    first, gap = clients.first_token_seconds, clients.output_token_seconds
    typical = {
        gateway.TIME_TO_FIRST_TOKEN: first, gateway.TIME_PER_OUTPUT_TOKEN: gap, gateway.QUEUE_TIME: 0.003,
        gateway.E2E_REQUEST_LATENCY: first + gap * clients.tokens_per_answer,
    }  # fmt: skip
    for spec, value in typical.items():
        target.observe(spec, spread_around(value, answered), **its)
    target.observe(gateway.INTER_TOKEN_LATENCY, spread_around(gap, answered * clients.tokens_per_answer), **its)


def look_after(target: ScrapedTarget, moment: Moment, namespace: str, seconds: float, *, leads: bool) -> None:
    """One operator: all of them show the state of all models, and only the leader acts."""
    _reconcile(target, seconds if leads else 0.0)
    for spec in (operator.GROUPS, operator.GROUP_PHASE, operator.STAGE_NOT_READY, operator.MODEL_CONDITION):
        target.hide(spec)
    ready = [model.ready == len(model.groups) for model in moment.values()]
    for status, count in (("True", sum(ready)), ("False", len(ready) - sum(ready))):
        target.show(operator.MODELS, count, ready=status)
    for name, model in moment.items():
        _show_model(target, name, model, {"namespace": namespace, "model": name})
        if leads:
            _count_failures(target, model, {"namespace": namespace, "model": name})
    target.show(operator.LEADER, float(leads))
    target.show(operator.BUILD_INFO, 1, version="0.1.0")


def _reconcile(target: ScrapedTarget, seconds: float) -> None:
    for outcome, share in (("done", 0.98), ("stale", 0.02), ("error", 0.0)):
        target.count(operator.RECONCILE_TOTAL, seconds * 2 * share, outcome=outcome)
    target.count(operator.RECONCILE_ERRORS_TOTAL, 0, namespace="models", model="chat", kind="ApiError")
    target.observe(operator.RECONCILE_DURATION, spread_around(0.02, seconds * 2))
    for verb, code, rate in (("patch", "200", 1.5), ("get", "200", 0.5), ("patch", "409", 0.04)):
        target.count(operator.API_REQUESTS_TOTAL, seconds * rate, verb=verb, resource="pods", code=code)
    for resource in RESOURCES:
        target.show(operator.WATCH_AGE, 20, resource=resource)
        target.count(operator.RELIST_CORRECTIONS_TOTAL, 0, resource=resource)
    target.show(operator.QUEUE_DEPTH, 0)
    target.show(operator.LONGEST_PASS, 0.01)


def _show_model(target: ScrapedTarget, name: str, model: Model, its: dict[str, str]) -> None:
    target.show(operator.MODEL_INFO, 1, model_name=name, **its)
    target.show(operator.MODEL_DESIRED_REPLICAS, len(model.groups), **its)
    target.show(operator.MODEL_READY_REPLICAS, model.ready, **its)
    target.show(operator.MODEL_UPDATED_REPLICAS, len(model.groups), **its)
    for spec in (operator.MODEL_GENERATION, operator.MODEL_OBSERVED_GENERATION):
        target.show(spec, 1, **its)
    status = "True" if model.ready == len(model.groups) else "False"
    target.show(operator.MODEL_CONDITION, 1, type="Ready", status=status, reason="GroupsReady", **its)
    phases = [model.phase(index) for index in range(len(model.groups))]
    for phase in set(phases):
        target.show(operator.GROUPS, phases.count(phase), phase=phase, **its)
    for index, phase in enumerate(phases):
        group = {"group": str(index), **its}
        target.show(operator.GROUP_PHASE, 1, phase=phase, **group)
        target.show(operator.GROUP_INCARNATION, model.incarnations.get(index, 1), **group)
        target.show(operator.GROUP_RESTARTS_LEFT, 6 - model.incarnations.get(index, 1), **group)
        for stage in range(model.stages if phase != "Ready" else 0):
            target.show(operator.STAGE_NOT_READY, 1, stage=str(stage), reason="Starting", **group)


def _count_failures(target: ScrapedTarget, model: Model, its: dict[str, str]) -> None:
    target.count(operator.RELIST_CORRECTIONS_TOTAL, model.missed, resource="pods")
    for failure_class, count in model.failures.items():
        target.count(operator.GROUP_FAILURES_TOTAL, count, failure_class=failure_class, **its)
        target.count(operator.GROUP_RESTARTS_TOTAL, count, failure_class=failure_class, **its)
    recovered = [(seconds, 1) for seconds in model.recovered_seconds]
    target.observe(operator.RECOVERY, recovered, failure_class=next(iter(model.failures), "Internal"))
    target.observe(operator.TIME_TO_READY, [(seconds * 0.9, 1) for seconds, _ in recovered], cache="warm")
    for phase, share in STARTUP_SHARES.items():
        spread = [(seconds * 0.9 * share, 1) for seconds, _ in recovered]
        target.observe(operator.STARTUP_PHASE, spread, phase=phase, cache="warm")
