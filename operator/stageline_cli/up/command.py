"""`stageline up`: serve one PipelineModel on this machine, each container a local process.

`--detach` starts a second `up` in its own session and follows its output until it is ready.
"""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from stageline_api import ports
from stageline_api.errors import UserError
from stageline_api.manifests.manifest_loader import load_one_model, refuse
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.serving.model_source import FileSource
from stageline_cli.up.display import Display, LiveDisplay, PlainDisplay
from stageline_cli.up.run import UpOptions, UpRun
from stageline_cli.validate import local_config_problems
from stageline_local.monitoring.options import DEFAULT_PORT, MonitorOptions, find_plotly, find_prometheus
from stageline_local.node.addresses import can_bind
from stageline_local.session.instance import Instance, default_cache_dir, default_state_root, read_record
from stageline_local.session.local_overrides import (
    refuse_no_groups,
    token_secret,
    with_cache,
    with_local_engine,
    without_gang,
    without_tls,
)
from stageline_local.session.session import SessionOptions


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(1, 65535), default=ports.GATEWAY, show_default=True, help="Gateway's port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="IPv4 address the gateway listens on.")
@click.option("--cache", type=click.Path(path_type=Path), help="Model cache. Default: ~/.cache/stageline.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Logs and state. Default: ~/.local/state/stageline.")
@click.option("--once", metavar="PROMPT", help="Answer one prompt on stdout at temperature 0, then exit.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Maximum tokens of the answer of --once.")
@click.option("--detach", is_flag=True, help="Run in the background once ready; `stageline down` stops it.")
@click.option("--timeout-seconds", type=click.FloatRange(min=0, min_open=True), help="Fail if not ready by then.")
@click.option("--monitor", is_flag=True, help="Also run Prometheus with the shipped rules, and a page with the boards.")
@click.option(
    "--monitor-port",
    type=click.IntRange(1, 65534),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port of the boards, on loopback; Prometheus has the next one.",
)
@click.option(
    "--alert-speed",
    type=click.FloatRange(1, 1000),
    default=1.0,
    show_default=True,
    help="Divide every alert's `for` by this, for drills.",
)
@click.option("--plain", is_flag=True, help="Print plain lines on a terminal too.")
def up(
    file: Path,
    port: int,
    host: str,
    cache: Path | None,
    state_dir: Path | None,
    once: str | None,
    max_tokens: int | None,
    detach: bool,
    timeout_seconds: float | None,
    monitor: bool,
    monitor_port: int,
    alert_speed: float,
    plain: bool,
) -> int:
    """Serve the PipelineModel in FILE on this machine.

    Runs every stage as a process with an OpenAI-compatible gateway, and ends all of them on Ctrl-C.
    """
    if detach and once is not None:
        raise click.UsageError("--detach and --once exclude each other")
    model = load_one_model(file)
    refuse([*missing_directory(model), *local_config_problems(model, cache or default_cache_dir())])
    token_secret(model)
    watched = MonitorOptions.with_shipped(monitor_port, alert_speed) if monitor else None
    state = ((state_dir or default_state_root()) / model.name).absolute()
    options = SessionOptions(state, host, port, monitor=watched)
    check_monitor(options)
    refuse_no_groups(model)
    if detach:
        return start_detached(model, file, options, cache, state_dir, timeout_seconds)
    model = without_tls(without_gang(with_local_engine(with_cache(model, cache or default_cache_dir()))))
    return _serve(model, options, UpOptions(once, max_tokens, timeout_seconds), plain)


def _serve(model: PipelineModel, session_options: SessionOptions, options: UpOptions, plain: bool) -> int:
    instance = Instance.claim(session_options.state_dir, model.name, session_options.url)
    try:
        check_ports(session_options)
        _set_old_logs_aside(session_options.state_dir)
        console = Console(stderr=True)
        display: Display = LiveDisplay(console) if console.is_terminal and not plain else PlainDisplay(console)
        try:
            return asyncio.run(_run(model, session_options, options, instance, display))
        finally:
            display.close()
    finally:
        instance.release()


async def _run(
    model: PipelineModel, session_options: SessionOptions, options: UpOptions, instance: Instance, display: Display
) -> int:
    return await UpRun(model, session_options, options, instance, display).run()


def missing_directory(model: PipelineModel) -> list[FieldProblem]:
    """A `file://` source that does not exist here: a pod would wait for it, because a node may mount it later."""
    source = model.spec.model.parsed_source
    if not isinstance(source, FileSource) or Path(source.path).is_dir():
        return []
    value = show_value(model.spec.model.source)
    return [FieldProblem(path="spec.model.source", value=value, rule="there is no such directory on this machine")]


def check_monitor(options: SessionOptions) -> None:
    """Raise `UserError` if monitoring is not installed, or would use the gateway's port."""
    if options.monitor is None:
        return
    find_prometheus()
    find_plotly()
    if options.port in (options.monitor.port, options.monitor.prometheus_port):
        raise UserError(
            f"--port {options.port} is one of the two that --monitor uses; choose others with --monitor-port"
        )


def check_ports(options: SessionOptions) -> None:
    """Raise `UserError` if gateway, boards or Prometheus can't listen."""
    wanted = [(options.host, options.port, "--port")]
    if options.monitor is not None:
        ports_taken = (options.monitor.port, options.monitor.prometheus_port)
        wanted += [("127.0.0.1", port, "--monitor-port") for port in ports_taken]
    for host, port, option in wanted:
        if not can_bind(host, port):
            raise UserError(
                f"can't listen on {host}:{port}: the port is in use or not allowed; choose another with {option}"
            )


def _set_old_logs_aside(state_dir: Path) -> None:
    """Keep the last run's logs, and never mix two runs in one file."""
    logs, previous = state_dir / "logs", state_dir / "logs.previous"
    if logs.exists():
        shutil.rmtree(previous, ignore_errors=True)
        logs.rename(previous)


_LOOK_SECONDS: Final = 0.1


def start_detached(
    model: PipelineModel,
    file: Path,
    options: SessionOptions,
    cache: Path | None,
    state_dir: Path | None,
    timeout_seconds: float | None,
) -> int:
    """Start it and return 0 once it is ready; raises `UserError` if it ends earlier."""
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
    click.echo(f"{model.name} runs in the background (pid {process.pid}); stop it with: stageline down {model.name}")
    return 0


def _follow_until_ready(process: "subprocess.Popen[bytes]", options: SessionOptions, log_path: Path) -> None:
    """Copy the background process's lines to stderr until its record is ready."""
    with log_path.open(encoding="utf-8", errors="replace") as log:
        while True:
            record = read_record(options.state_dir)
            is_ready = record is not None and record.pid == process.pid and record.ready
            exit_status = process.poll()
            sys.stderr.write(log.read())
            sys.stderr.flush()
            if exit_status is not None:
                raise UserError(f"it exited with status {exit_status}; see {log_path}", exit_status or 1)
            if is_ready:
                return
            time.sleep(_LOOK_SECONDS)
