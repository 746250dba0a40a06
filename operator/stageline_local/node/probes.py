"""Startup, readiness and liveness probes with the kubelet's thresholds.

The other two probes start after the startup probe has passed once. Readiness decides whether the pod gets traffic and
never ends a container; a failed startup or liveness probe does.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

_DEFAULT_PERIOD_SECONDS: Final = 10.0
_DEFAULT_TIMEOUT_SECONDS: Final = 1.0


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of one attempt; `message` is the reason of a failure."""

    passed: bool
    message: str = ""


@dataclass(frozen=True)
class ProbeTally:
    """Consecutive results, and the verdict by the thresholds (None: undecided)."""

    success_threshold: int = 1
    failure_threshold: int = 3
    successes: int = 0
    failures: int = 0

    def after(self, passed: bool) -> "ProbeTally":
        """The tally after one more result; a different result restarts the count."""
        return ProbeTally(
            self.success_threshold,
            self.failure_threshold,
            self.successes + 1 if passed else 0,
            0 if passed else self.failures + 1,
        )

    @property
    def verdict(self) -> bool | None:
        """True or False once a threshold is reached."""
        if self.successes >= self.success_threshold:
            return True
        if self.failures >= self.failure_threshold:
            return False
        return None


ExecCommand = Callable[[list[str]], Awaitable[int]]
"""Runs a command in a container's environment and returns its exit status."""


async def attempt(probe: Mapping[str, Any], pod_ip: str, ports: Mapping[str, int], run: ExecCommand) -> ProbeResult:
    """Run one probe once, within its timeout."""
    timeout_seconds = float(probe.get("timeoutSeconds", _DEFAULT_TIMEOUT_SECONDS))
    try:
        async with asyncio.timeout(timeout_seconds):
            match probe:
                case {"httpGet": get}:
                    return await _http_get(get, pod_ip, ports)
                case {"tcpSocket": socket}:
                    return await _tcp_connect(socket.get("host", pod_ip), port_number(socket["port"], ports))
                case {"exec": {"command": command}}:
                    status = await run(list(command))
                    return ProbeResult(status == 0, f"command exited with status {status}" if status else "")
    except TimeoutError:
        return ProbeResult(False, f"no answer within {timeout_seconds:g} s")
    raise ValueError("a probe needs httpGet, tcpSocket or exec")


def port_number(port: int | str, ports: Mapping[str, int]) -> int:
    """A probe's port; it may be the name of a container port."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    return ports[port]


async def _http_get(get: Mapping[str, Any], pod_ip: str, ports: Mapping[str, int]) -> ProbeResult:
    url = f"http://{get.get('host', pod_ip)}:{port_number(get['port'], ports)}{get.get('path', '/')}"
    try:
        # trust_env: the user's proxy must not handle requests to containers.
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=None) as client:
            response = await client.get(url)
    except httpx.HTTPError as error:
        return ProbeResult(False, f"GET {url}: {error or type(error).__name__}")
    passed = 200 <= response.status_code < 400
    return ProbeResult(
        passed, "" if passed else f"GET {url}: HTTP {response.status_code} {response.text[:200]}".strip()
    )


async def _tcp_connect(host: str, port: int) -> ProbeResult:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return ProbeResult(False, f"connect to {host}:{port}: {error.strerror}")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ProbeResult(True)


async def run_probe(
    probe: Mapping[str, Any],
    try_once: Callable[[], Awaitable[ProbeResult]],
    on_verdict: Callable[[bool, str], Awaitable[None]],
    stop_after_first_success: bool = False,
) -> None:
    """Run a probe every period forever and report each verdict; a startup probe ends with its first success."""
    tally = ProbeTally(int(probe.get("successThreshold", 1)), int(probe.get("failureThreshold", 3)))
    await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
    while True:
        result = await try_once()
        tally = tally.after(result.passed)
        if tally.verdict is not None:
            await on_verdict(tally.verdict, result.message)
            if tally.verdict and stop_after_first_success:
                return
        await asyncio.sleep(float(probe.get("periodSeconds", _DEFAULT_PERIOD_SECONDS)))
