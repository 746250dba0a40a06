"""`stageline up --detach`: a second `up` in a session of its own, followed until it is ready."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import click

from stageline_api.errors import UserError
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.session.instance import read_record
from stageline_local.session.session import SessionOptions

_LOOK_SECONDS: Final = 0.1


def start_detached(
    model: PipelineModel,
    file: Path,
    options: SessionOptions,
    cache: Path | None,
    state_dir: Path | None,
    timeout_seconds: float | None,
) -> int:
    """Start it and return 0 once it is ready; raises `UserError` when it ends before."""
    command = [sys.executable, "-m", "stageline_cli.main", "up", str(file.absolute()), "--plain"]
    command += ["--host", options.host, "--port", str(options.port)]
    for name, value in (("--cache", cache), ("--state-dir", state_dir)):
        command += [name, str(value.absolute())] if value is not None else []
    if options.monitor is not None:
        command += ["--monitor", "--monitor-port", str(options.monitor.port)]
        command += ["--alert-speed", str(options.monitor.alert_speed)]
    command += ["--timeout-seconds", str(timeout_seconds)] if timeout_seconds is not None else []
    running = read_record(options.state_dir)
    if running is not None and running.is_running():
        raise UserError(f"{model.name} is already up (pid {running.pid}, {running.url})")
    options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path = options.state_dir / "up.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    try:
        _follow_until_ready(process, options, log_path)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    click.echo(f"{model.name} runs in the background (pid {process.pid}); end it with: stageline down {model.name}")
    return 0


def _follow_until_ready(process: "subprocess.Popen[bytes]", options: SessionOptions, log_path: Path) -> None:
    """Copy the background's lines to stderr until its record says ready."""
    with log_path.open(encoding="utf-8", errors="replace") as log:
        while True:
            record = read_record(options.state_dir)
            is_ready = record is not None and record.pid == process.pid and record.ready
            exit_status = process.poll()
            sys.stderr.write(log.read())
            sys.stderr.flush()
            if exit_status is not None:
                raise UserError(f"it ended with exit status {exit_status}; see {log_path}", exit_status or 1)
            if is_ready:
                return
            time.sleep(_LOOK_SECONDS)
