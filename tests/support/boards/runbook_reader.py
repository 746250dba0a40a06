"""Somebody who follows the runbooks: fills in what a page leaves open, from a cluster where the chart is installed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trustme
import yaml

from boards.runbook_commands import filled_in, goes_on, may_print_nothing
from boards.typed_commands import Terminal, Typed
from cluster.api import wait_until
from cluster.installed_chart import pods_of
from cluster.model_in_cluster import ModelInCluster
from stageline_api import ports

GATEWAY_NAME: Final = "gateway.example"
_LOOK_SECONDS: Final = 180.0
_MISSING_IN_A_BUNDLE: Final = "missing metrics/stageline-operator-"
"""The operator is asked through the API server's proxy alone, which is not lent to loopback addresses."""
_REFUSED: Final = re.compile(r"^(error|Error from server|No resources found|Usage:)", re.MULTILINE)


@dataclass(frozen=True)
class RunbookReader:
    """`serving` is a model that serves. `concerned` are models as alerts find them, by a pattern of commands."""

    terminal: Terminal
    serving: ModelInCluster
    concerned: Mapping[str, ModelInCluster]
    node: str

    def type(self, command: str, model: ModelInCluster) -> Typed:
        """Fill a command in and run it."""
        filled = filled_in(_strict(command), self._words())
        if goes_on(command):
            return self.terminal.type_and_interrupt(_in_front(filled), _variables(model))
        return self.terminal.type(filled, _variables(model))

    def look(self, command: str) -> Typed:
        """Type a command that only looks, again while it shows nothing: Events and logs come a moment late."""
        model = next((one for pattern, one in self.concerned.items() if re.search(pattern, command)), self.serving)
        answers: list[Typed] = []

        def _fine() -> bool:
            answers.append(self.type(command, model))
            return not what_is_wrong(answers[-1])

        wait_until(command, _fine, _LOOK_SECONDS, lambda: f"{what_is_wrong(answers[-1])}\n{answers[-1]}")
        return answers[-1]

    def prepare(self, authority: trustme.CA) -> None:
        """Write the files that commands read, before any is typed.

        By one of them curl finds the gateway by its name, as by DNS and its Service, and checks its certificate.
        """
        self._model_file.write_text(yaml.safe_dump(self.serving.manifest))
        file = self.terminal.home / "ca.pem"
        authority.cert_pem.write_to_path(file)
        place = f"{GATEWAY_NAME}:443:{self._gateway_address()}:{ports.GATEWAY}"
        (self.terminal.home / ".curlrc").write_text(f'connect-to = "{place}"\ncacert = "{file}"\n')

    @property
    def _model_file(self) -> Path:
        return self.terminal.home / "model.yaml"

    def _words(self) -> dict[str, str]:
        """What to write over; the longer of two words that begin alike comes first."""
        self.serving.until_ready()
        gateway = self._gateway_address()
        return {
            "YOUR-GATEWAY:443": f"{gateway}:{ports.GATEWAY}",
            "YOUR-GATEWAY": GATEWAY_NAME,
            "127.0.0.1:8002": f"{self.serving.pod(0)['status']['podIP']}:{ports.ENGINE_STATE}",
            "127.0.0.1:8081": f"{gateway}:{ports.GATEWAY_ADMIN}",
            "DEVICES": "l4-24gb",
            "FILE": str(self._model_file),
            "NODE": self.node,
            "N": "2",
        }

    def _gateway_address(self) -> str:
        (pod,) = pods_of(self.serving.cluster, "gateway")
        return str(pod["status"]["podIP"])


def what_is_wrong(answer: Typed) -> str:
    """With the answer to a command that only looks; empty when nothing is."""
    if answer.status != 0:
        return f"exit status {answer.status}"
    if may_print_nothing(answer.command):
        return ""
    if complaints := [each for each in answer.complaints.splitlines() if not each.startswith(_MISSING_IN_A_BUNDLE)]:
        return f"complaints: {complaints}"
    if refused := _REFUSED.search(answer.shown):
        return f"refused: {refused[0]}"
    return "" if answer.shown else "nothing is shown"


def _strict(command: str) -> str:
    """With a path that leads nowhere an error; without, kubectl prints nothing in its place."""
    return command.replace("-o jsonpath=", "--allow-missing-template-keys=false -o jsonpath=")


def _in_front(command: str) -> str:
    """Not in the background, where nobody could end it; a forwarded port is any that is free on this machine."""
    return re.sub(r" (\d+) &$", r" :\1", command)


def _variables(model: ModelInCluster) -> dict[str, str]:
    """As the first page has one set them: a pod's name is made of its model's, group, incarnation and stage.

    A model without its first group (suspended, say) has no pods to name. The status is read once: it may change.
    """
    found = {"NAMESPACE": model.namespace, "MODEL": model.name, "GROUP": "0"}
    first = next((each for each in model.status().get("groups", []) if each["index"] == 0), None)
    if first is None:
        return found
    name = f"{model.name}-0-{first['incarnation']}"
    return found | {"POD": f"{name}-1", "STAGE_0_POD": f"{name}-0"}
