"""Ends a child process: as it is asked to first, the hard way when it doesn't hear."""

import signal
import subprocess


def end_process(process: subprocess.Popen[bytes], seconds: float, with_signal: signal.Signals = signal.SIGTERM) -> None:
    """Returns when the process has ended; `seconds` is for each of the two ways."""
    process.send_signal(with_signal)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=seconds)
