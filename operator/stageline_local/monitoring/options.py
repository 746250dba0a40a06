"""Options of `up --monitor`, and the paths of its programs."""

import shutil
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stageline_api.errors import UserError
from stageline_dashboards import shipped

DEFAULT_PORT: Final = 8090
"""Port of the boards page; Prometheus has the next port, like the gateway's admin port."""


@dataclass(frozen=True)
class MonitorOptions:
    """`alert_speed` divides the `for` times of alerts: 1 normally, more in a drill."""

    port: int = DEFAULT_PORT
    alert_speed: float = 1.0
    boards: tuple[Path, ...] = ()
    rules: tuple[Path, ...] = ()

    @classmethod
    def with_shipped(cls, port: int, alert_speed: float) -> "MonitorOptions":
        return cls(port, alert_speed, tuple(shipped.board_paths()), tuple(shipped.rule_paths()))

    @property
    def prometheus_port(self) -> int:
        return self.port + 1

    @property
    def boards_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def prometheus_url(self) -> str:
        return f"http://127.0.0.1:{self.prometheus_port}"


def find_prometheus(path: str | None = None) -> str:
    """Path of the program; raises `UserError` with how to install it."""
    found = shutil.which("prometheus", path=path)
    if found is None:
        raise UserError(
            "--monitor runs Prometheus, which is not installed: apt-get install prometheus "
            "(or put its binary from https://prometheus.io/download/ on PATH)"
        )
    return found


def find_plotly() -> Path:
    """The plotting library's script in its wheel; raises `UserError` with how to install it."""
    missing = [name for name in ("aiohttp", "plotly") if find_spec(name) is None]
    script = None if missing else Path(str(resources.files("plotly"))) / "package_data" / "plotly.min.js"
    if script is None or not script.is_file():
        what = " and ".join(missing) or "a plotly with its script"
        raise UserError(f"--monitor draws boards with {what}, which is not installed: pip install 'stageline[monitor]'")
    return script
