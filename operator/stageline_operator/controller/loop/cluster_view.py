"""Feeds the cache from lists and watches, and tracks which places are readable and how fresh.

Each kind in each namespace is a place with its own reflector. A place that can't be listed or watched does not block
the others: it is noted in `Unreadable` and retried. PipelineModels are listed by their reflector and watched by kopf;
both report to the same place. If the right to list PipelineModels in a namespace is lost, as when it is deleted with
its Role, the namespace is dropped.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from stageline_api import labels
from stageline_kubernetes.client import KubeApi, Listing
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reflector import FIRST_RETRY_SECONDS, Reflector
from stageline_operator.controller.client.resources import (
    NODE,
    PIPELINE_MODEL,
    POD,
    RESOURCE_OF_KIND,
    WATCHED,
    ModelKey,
    Place,
)
from stageline_operator.controller.settings import OperatorSettings
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.gang_view import GangView
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import node_losses
from stageline_operator.controller.view.unreadable import FORBIDDEN, Unreadable

_PATIENCE_SECONDS: Final = 15.0
"""How long lists may fail with transient errors before the operator continues without those places."""
_FRESH_SECONDS: Final = 20.0
"""How long a new leader waits for lists before it acts on the cached objects."""
_LISTED_PATIENCE_SECONDS: Final = 120.0
"""The same limit for a place that was listed before: its watch may still report changes."""
_LISTS_AT_ONCE: Final = 16
_FORGIVEN_SECONDS: Final = 30.0
"""How long a watch may be down before this replica is unready: longer than the longest retry interval."""
NOT_LISTED: Final = "the cluster has not been listed yet"

_log = logging.getLogger(__name__)


@dataclass
class Feed:
    """State of one place, set by its reflector. Times are of the loop's clock."""

    place: Place
    view: "ClusterView"
    heard_at: float | None = None
    """Time of the last event, bookmark or list; None before the first list."""
    failing_since: float | None = None
    broken_since: float | None = -math.inf
    """None while it is watched; -inf until its first watch."""

    @property
    def is_only_listed(self) -> bool:
        """Whether its reflector only lists, while kopf watches."""
        return self.place.resource is PIPELINE_MODEL

    def listed(self, listing: Listing) -> None:
        self.view.take_list(self, listing)

    def heard(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.view.take_events(self, events)

    def failed(self, error: ApiError) -> None:
        if not self.is_only_listed:
            self.note_broken()
        self.view.note_failure(self, error)

    def watch_failed(self, error: ApiError) -> None:
        """kopf's watch of the place has ended."""
        self.note_broken()
        self.view.note_failure(self, error)

    def note_broken(self) -> None:
        self.broken_since = asyncio.get_running_loop().time() if self.broken_since is None else self.broken_since


class ClusterView:
    """Feeds the cache and tracks readable places. `on_change` is called with models to reconcile."""

    def __init__(
        self,
        api: KubeApi,
        cache: ObjectCache,
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        gangs: GangView,
        unreadable: Unreadable,
        on_change: Callable[[ModelKey], None],
    ) -> None:
        self._api = api
        self._cache = cache
        self._namespaces = settings.namespaces or ("",)
        self._relist_seconds = settings.relist_seconds
        self._metrics = metrics
        self._gangs = gangs
        self._unreadable = unreadable
        self._on_change = on_change
        places = [Place(each, name) for each in WATCHED for name in (self._namespaces if each.namespaced else ("",))]
        self._feeds = {place: Feed(place, self) for place in places}
        slots = asyncio.Semaphore(_LISTS_AT_ONCE)
        self._reflectors = {place: self._reflector(feed, slots) for place, feed in self._feeds.items()}
        self._verdict = asyncio.Event()

    def models(self) -> list[tuple[Feed, Callable[[], None]]]:
        """The feed of each served namespace's PipelineModels, for kopf, and the callback that relists them."""
        places = [Place(PIPELINE_MODEL, name) for name in self._namespaces]
        return [(self._feeds[place], self._reflectors[place].relist) for place in places]

    async def next_verdict(self) -> None:
        """Wait until a place becomes readable or unreadable."""
        await self._verdict.wait()

    @property
    def watches_nodes(self) -> bool:
        return self._is_readable(Place(NODE, ""))

    @property
    def serves(self) -> bool:
        """Whether the models and pods of at least one namespace are readable."""
        return any(all(map(self._is_readable, _needed(each))) for each in self._namespaces)

    def problem(self) -> str:
        """Why this replica can't act; empty if it can."""
        if not all(self._is_judged(place) for place in self._feeds):
            return NOT_LISTED
        if self.serves:
            return self._unwatched()
        reasons = (self._unreadable.why(each) for name in self._namespaces for each in _needed(name))
        return f"nothing can be served: {next(filter(None, reasons), '')}"

    def _unwatched(self) -> str:
        """Which watch has been down too long, so that changes arrive minutes late."""
        now = asyncio.get_running_loop().time()
        away = [(feed.broken_since, place) for place, feed in self._feeds.items() if feed.broken_since is not None]
        late = [each for each in away if now - each[0] > _FORGIVEN_SECONDS and self._is_readable(each[1])]
        if not late:
            return ""
        since, place = min(late, key=lambda each: each[0])
        how_long = "has not begun" if since == -math.inf else f"has not run for {now - since:.0f} s"
        others = f", nor {len(late) - 1} more" if len(late) > 1 else ""
        return f"the watch of {place} {how_long}{others}; the log says why"

    def missing(self, namespace: str, kinds: Iterable[str]) -> str:
        """Which of these kinds can't be read in a namespace; empty if all can. Kinds that aren't watched count too."""
        for kind in kinds:
            if why := self._unreadable.needed_for(namespace, [kind]):
                return why
            for where in (namespace, ""):
                place = Place(RESOURCE_OF_KIND[kind], where)
                if place in self._feeds and not self._is_judged(place):
                    return f"{place} have not been listed yet"
        return ""

    def ages_seconds(self) -> dict[str, float]:
        """By plural: seconds since the last list, event or bookmark; the longest over all namespaces."""
        now, ages = asyncio.get_running_loop().time(), dict[str, float]()
        for place, feed in self._feeds.items():
            if feed.heard_at is not None and self._is_readable(place):
                plural = place.resource.plural
                ages[plural] = max(now - feed.heard_at, ages.get(plural, 0.0))
        return ages

    def take_list(self, feed: Feed, listing: Listing) -> None:
        """Replace the cached objects of a place by a list."""
        resource, is_first = feed.place.resource, feed.heard_at is None
        wrong = self._cache.replace(resource.kind, feed.place.namespace, listing.items, listing.version)
        if not is_first and self._is_readable(feed.place) and wrong:
            _log.info("a full list of %s corrected %d objects", resource.plural, wrong)
            self._metrics.corrections.labels(resource.plural).inc(wrong)
        feed.heard_at, feed.failing_since = asyncio.get_running_loop().time(), None
        self._note_readable(feed, is_first)

    def take_events(self, feed: Feed, events: Sequence[Mapping[str, Any]]) -> None:
        """Apply the events of a watch to the cache."""
        for event in events:
            take = self._cache.remove if event["type"] == "DELETED" else self._cache.put
            take(feed.place.resource.kind, event["object"])
        feed.broken_since = feed.failing_since = None
        if feed.heard_at is not None:
            feed.heard_at = asyncio.get_running_loop().time()
        self._note_readable(feed, False)

    def _note_readable(self, feed: Feed, is_first: bool) -> None:
        """A place is readable again once it is listed and watched."""
        is_back = feed.broken_since is None and self._unreadable.clear(feed.place)
        if is_back:
            _log.info("%s can be listed and watched again", feed.place)
        if is_back or is_first:
            self._wake_models(feed.place.namespace)
            self._tell_verdict()

    def note_failure(self, feed: Feed, error: ApiError) -> None:
        """Handle a failed list or watch: wait if the error is transient, then continue without the place."""
        now = asyncio.get_running_loop().time()
        feed.failing_since = now if feed.failing_since is None else feed.failing_since
        patience = _PATIENCE_SECONDS if feed.heard_at is None else _LISTED_PATIENCE_SECONDS
        may_pass = error.is_passing or error.is_expired  # the first page of a list may be too slow
        if may_pass:
            _log.warning("trying again: %s", error)
        if not may_pass or now - feed.failing_since >= patience:
            self._leave_out(feed.place, error)

    async def run(self) -> None:
        """List and watch, until cancelled."""
        await asyncio.gather(*(each.run() for each in self._reflectors.values()))

    async def list_everything(self) -> None:
        """List every place now; wait a limited time if the API server is down or a list fails."""
        looks = {asyncio.ensure_future(self._look(each)) for each in self._feeds.values()}
        try:
            ended, _ = await asyncio.wait(looks, timeout=_FRESH_SECONDS)
            await asyncio.gather(*ended)
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def look_at_model(self, key: ModelKey) -> None:
        """Read one model now, with its pods, its PodGroups, and those of its nodes that seem lost.

        Raises `ApiError`.
        """
        await self.look_at_status(key)
        listing = await self._api.list(POD, key.namespace, f"{POD.selector},{labels.MODEL}={key.name}")
        self._cache.replace(POD.kind, key.namespace, listing.items, listing.version, key)
        model = self._cache.model(key)
        if model is not None and model["spec"].get("placement", {}).get("gang"):
            await self._gangs.look_at_model(key)
        if not self.watches_nodes:
            return
        pods = [manifest for identity, manifest in self._cache.of_model(key) if identity.kind == POD.kind]
        losses = node_losses(self._cache, pods, datetime.now(UTC))
        for name in sorted(losses.lost | losses.unheard):
            await self._look_at_node(name)

    async def _look_at_node(self, name: str) -> None:
        try:
            self._cache.put(NODE.kind, await self._api.get(NODE, "", name))
        except ApiError as error:
            # The next list of nodes detects that the right to read them is gone.
            if not error.is_not_found and error.status not in FORBIDDEN:
                raise

    async def look_at_status(self, key: ModelKey) -> None:
        """Read the current version of one PipelineModel. Raises `ApiError`."""
        try:
            self._cache.put(PIPELINE_MODEL.kind, await self._api.get(PIPELINE_MODEL, key.namespace, key.name))
        except ApiError as error:
            if not error.is_not_found:
                raise
            # The watch may have reported its deletion already.
            if (known := self._cache.model(key)) is not None:
                self._cache.remove(PIPELINE_MODEL.kind, known)

    def _reflector(self, feed: Feed, slots: asyncio.Semaphore) -> Reflector:
        resource, namespace = feed.place
        what = (self._api, resource, namespace, resource.selector, feed, self._relist_seconds)
        return Reflector(*what, watches=not feed.is_only_listed, list_slots=slots)

    async def _look(self, feed: Feed) -> None:
        """List one place; retry transient errors for a while."""
        began = asyncio.get_running_loop().time()
        while True:
            try:
                await self._reflectors[feed.place].list()
            except ApiError as error:
                feed.failed(error)
                if not error.is_passing or asyncio.get_running_loop().time() - began >= _PATIENCE_SECONDS:
                    return
                await asyncio.sleep(max(FIRST_RETRY_SECONDS, error.retry_after_seconds or 0.0))
            else:
                return

    def _leave_out(self, place: Place, error: ApiError) -> None:
        if sentence := self._unreadable.note(place, error):
            _log.log(logging.WARNING if place.resource is NODE else logging.ERROR, "left out: %s", sentence)
            self._wake_models(place.namespace)
            self._tell_verdict()
        if place.resource is PIPELINE_MODEL and place.namespace and error.status in FORBIDDEN:
            self._cache.forget_namespace(place.namespace)

    def _is_judged(self, place: Place) -> bool:
        return self._feeds[place].heard_at is not None or bool(self._unreadable.why(place))

    def _is_readable(self, place: Place) -> bool:
        return self._feeds[place].heard_at is not None and not self._unreadable.why(place)

    def _tell_verdict(self) -> None:
        self._verdict.set()
        self._verdict = asyncio.Event()

    def _wake_models(self, namespace: str) -> None:
        for key in self._cache.model_keys():
            if namespace in ("", key.namespace):
                self._on_change(key)


def _needed(namespace: str) -> tuple[Place, Place]:
    """What must be readable in a namespace before any of its models can be served."""
    return Place(PIPELINE_MODEL, namespace), Place(POD, namespace)
