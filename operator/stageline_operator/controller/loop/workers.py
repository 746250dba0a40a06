"""Workers that take due models from the queue, run a pass, and report its outcome to queue and metrics."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from stageline_api.telemetry.logs import lines_about
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.object_writes import StaleError
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.lead.leader import NotLeadingError
from stageline_operator.controller.loop.work_queue import WorkQueue
from stageline_operator.controller.telemetry.metrics import OperatorMetrics

_NAMESPACE_ENDING_SECONDS: Final = 30.0

_log = logging.getLogger(__name__)


class Workers:
    """`stop` lets running passes finish; cancelling `run` does not."""

    def __init__(
        self,
        queue: WorkQueue,
        reconcile: Callable[[ModelKey], Awaitable[float | None]],
        metrics: OperatorMetrics,
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._began: dict[ModelKey, float] = {}
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def stop(self) -> None:
        self._stopping.set()

    async def idle(self) -> None:
        """Wait until no pass runs."""
        await self._idle.wait()

    def longest_pass_seconds(self) -> float:
        """Age of the oldest pass that has not ended."""
        now = time.monotonic()
        return max((now - began for began in self._began.values()), default=0.0)

    async def run(self) -> None:
        """One worker, until cancelled or stopped."""
        while not self._stopping.is_set():
            key = await self._queue.get()
            if self._stopping.is_set():
                self._queue.finish(key)
                return
            self._began[key] = time.monotonic()
            self._idle.clear()
            try:
                with lines_about({"namespace": key.namespace, "model": key.name}):
                    outcome = await self._one_pass(key)
            finally:
                seconds = time.monotonic() - self._began.pop(key)
                if not self._began:
                    self._idle.set()
            self._metrics.reconciles.labels(outcome).inc()
            self._metrics.reconcile_seconds.observe(seconds)

    async def _one_pass(self, key: ModelKey) -> str:
        """Returns the outcome for the metrics; raises only if cancelled."""
        try:
            again_after_seconds = await self._reconcile(key)
        except asyncio.CancelledError:
            self._queue.finish(key)
            raise
        except NotLeadingError as error:
            self._queue.finish(key)
            _log.info("%s", error)
            return "stale"
        except StaleError as error:
            self._queue.fail(key)
            _log.info("observing again: %s", error)
            return "stale"
        except ApiError as error:
            if error.is_namespace_ending:
                self._queue.finish(key, _NAMESPACE_ENDING_SECONDS)
                _log.debug("%s", error)
                return "done"
            kind = "unavailable" if error.is_passing else "refused"
            return self._failed(key, kind, error, error.retry_after_seconds)
        except Exception as error:
            _log.exception("a pass failed unexpectedly")
            return self._failed(key, "unexpected", error, None)
        self._queue.finish(key, again_after_seconds)
        return "done"

    def _failed(self, key: ModelKey, kind: str, error: Exception, retry_after_seconds: float | None) -> str:
        seconds = self._queue.fail(key, retry_after_seconds)
        self._metrics.reconcile_errors.labels(key.namespace, key.name, kind).inc()
        _log.warning("retrying in %.1f s: %s", seconds, error)
        return "error"
