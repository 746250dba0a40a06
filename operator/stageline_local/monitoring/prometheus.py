"""Prometheus of one session: a child process on loopback with its data in the session's directory.

It ends with the session, even if the session is killed. If it ends earlier, `on_end` is called and it is restarted. Its
data is limited in time and size, and outlives the session.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from stageline_local.monitoring.scrape import TargetGroup, quickened, targets_file
from stageline_local.node.container import ContainerCommand
from stageline_local.node.pod_status import Terminated
from stageline_local.node.supervised_process import SupervisedProcess
from stageline_local.replaced_file import replace_file

_KEPT_TIME: Final = "24h"
_KEPT_BYTES: Final = "512MB"
_LOOKBACK: Final = "15s"
_GRACE_SECONDS: Final = 10.0


class PrometheusServer:
    """Files, process and readiness. `config` comes from `prometheus_config`."""

    def __init__(
        self, program: str, directory: Path, log_file: Path, port: int, on_end: Callable[[Terminated], None]
    ) -> None:
        self.directory = directory
        self.log_file = log_file
        self.url = f"http://127.0.0.1:{port}"
        self._written: dict[Path, str] = {}
        self._process = SupervisedProcess("prometheus", self._command(program, port), on_end)

    @property
    def targets_dir(self) -> Path:
        return self.directory / "targets"

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self, config: Mapping[str, Any]) -> None:
        self.targets_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(self.directory / "prometheus.yml", yaml.safe_dump(dict(config), sort_keys=False))
        self._process.start()

    def write_rules(self, shipped: Iterable[Path], alert_speed: float) -> list[Path]:
        """Rule files to load: copies that are evaluated at every scrape, and with shorter `for` times in a drill."""
        copies = []
        for path in shipped:
            rules = quickened(yaml.safe_load(path.read_text(encoding="utf-8")), alert_speed)
            copies.append(self.directory / "rules" / path.name)
            self._write(copies[-1], yaml.safe_dump(rules, sort_keys=False))
        return copies

    def set_targets(self, targets: Mapping[str, list[TargetGroup]]) -> None:
        """Scrape these from now on; Prometheus notices the changed files within seconds."""
        for job, groups in targets.items():
            self._write(targets_file(self.targets_dir, job), json.dumps(groups, indent=1) + "\n")

    async def is_ready(self) -> bool:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=2.0) as client:
            try:
                return (await client.get(f"{self.url}/-/ready")).is_success
            except httpx.HTTPError:
                return False

    async def stop(self) -> None:
        """End it; it writes its data first."""
        await self._process.stop(_GRACE_SECONDS)

    def kill_now(self) -> None:
        self._process.kill_now()

    def _write(self, path: Path, text: str) -> None:
        """Replace a file atomically, but only if its content changes: Prometheus watches some of them."""
        if self._written.get(path) == text:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text)
        self._written[path] = text

    def _command(self, program: str, port: int) -> ContainerCommand:
        arguments = (
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--storage.tsdb.retention.time={_KEPT_TIME}",
            f"--storage.tsdb.retention.size={_KEPT_BYTES}",
            # The last samples of an earlier session must not count as current. Rules are evaluated more often than
            # this.
            f"--query.lookback-delta={_LOOKBACK}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
        )
        return ContainerCommand(
            argv=(program, *arguments),
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.directory)},
            working_dir=self.directory,
            log_file=self.log_file,
            termination_file=self.directory / "termination",
        )
