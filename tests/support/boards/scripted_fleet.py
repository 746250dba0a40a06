"""A small installation whose every second is scripted: two gateways, two operators, and the pods of its groups."""

from typing import Final

from boards.metric_history import MetricHistory, ScrapedTarget, written
from boards.scripted_moments import Group, Moment
from boards.scripted_pods import run_engine, run_stage
from boards.scripted_services import look_after, serve_clients

NAMESPACE: Final = "models"


class ScriptedFleet:
    """Two gateways, two operators, and the pods of the groups that the script has up."""

    def __init__(self) -> None:
        self.history = MetricHistory()
        self._pods: dict[str, ScrapedTarget] = {}
        self._gateways = [self._target("stageline-gateway", pod=f"gateway-{index}") for index in range(2)]
        self._operators = [self._target("stageline-operator", pod=f"operator-{index}") for index in range(2)]

    def pass_time(self, moment: Moment, seconds: float, at_seconds: float) -> None:
        """Let the installation do for `seconds` what `moment` says, then scrape it."""
        alive: set[str] = set()
        for name, model in moment.items():
            for index, group in enumerate(model.groups):
                if group is not None:
                    alive |= self._run_group(name, index, group, seconds)
        self._pods = {name: pod for name, pod in self._pods.items() if name in alive}
        for target in self._gateways:
            serve_clients(target, moment, NAMESPACE, len(self._gateways), seconds, at_seconds)
        for index, target in enumerate(self._operators):
            look_after(target, moment, NAMESPACE, seconds, leads=index == 0)
        for target in (*self._pods.values(), *self._gateways, *self._operators):
            target.scrape(at_seconds)

    def fire(self, alert: str, at_seconds: float, **labels: str) -> None:
        """What Prometheus itself writes while an alert fires."""
        named = {"alertname": alert, "alertstate": "firing", **labels}
        self.history.add("ALERTS", "gauge", written("ALERTS", tuple(named.items())), 1, at_seconds)

    def _run_group(self, name: str, index: int, group: Group, seconds: float) -> set[str]:
        pods = set()
        for stage in range(len(group.step_seconds)):
            pod = f"{name}-g{index}-i{group.incarnation}-s{stage}"
            pods.add(pod)
            where = {"model": name, "group": str(index), "pod": pod}
            if pod not in self._pods:
                self._pods[pod] = self._target("stageline-stage", **where)
            run_stage(self._pods[pod], name, group, stage, seconds)
        engine = f"{name}-g{index}-i{group.incarnation}-engine"
        if engine not in self._pods:
            self._pods[engine] = self._target("stageline-engine", **where | {"pod": f"{name}-g{index}-i1-s0"})
        run_engine(self._pods[engine], name, group, seconds)
        return pods | {engine}

    def _target(self, job: str, **labels: str) -> ScrapedTarget:
        return ScrapedTarget(self.history, {"namespace": NAMESPACE, "job": job} | labels)
