"""Frees capacity in a cache that several models share, before a writer starts.

One process at a time decides, under the lock `.room.lock`. A writer announces in `.<key>.needs` how many bytes it will
write, so that two writers don't count on the same capacity. The announcement holds as long as the writer's lock. An
entry is renamed to a leftover before it is deleted, under its writers' lock and its readers' (`use`). These locks are
acquired without waiting, so an entry in use stays. Without a limit nothing is ever removed.

In a cache used by one pod, `remove_others` removes all entries that the pod doesn't need, before it fetches. Never call
it for a cache that others may read.
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stageline_runtime.prepare.cache import bytes_below, files_with_sizes, is_key
from stageline_runtime.prepare.errors import PrepareError, storage_error
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.publish import PARTIAL_MARK, claimed, lock_file, locked, remove_entry, remove_leftovers
from stageline_runtime.prepare.space.choice import CachedModel, Space, choose
from stageline_runtime.prepare.space.use import last_use, mark_used, use_file

FRESH_SECONDS: Final = 600.0
"""How long an entry stays at least after its last use: a pod's readers start after its preparation has ended."""
_ROOM_KEY: Final = "room"
_NEEDS: Final = ".needs"

Need = Callable[[int], None]
"""Called with how many bytes more are going to be written."""


def unlimited(_: int) -> None:
    """A `Need` for caches without a limit."""


@dataclass(frozen=True, slots=True)
class Room:
    """A cache that removes unused entries when it would hold more than `limit_bytes`."""

    cache_dir: Path
    limit_bytes: int | None
    reporter: Reporter
    fresh_seconds: float = FRESH_SECONDS

    @contextmanager
    def writing(self, key: str) -> Iterator[Need]:
        """For the holder of the lock of `key`: gives what makes room, as often as is needed.

        Raises:
            PrepareError: not even all that may be removed makes room; the message has the numbers.
            OSError: the cache can't be read or written.
        """
        needs = self.cache_dir / f".{key}{_NEEDS}"
        try:
            yield lambda further_bytes: self._make(key, needs, further_bytes)
        finally:
            needs.unlink(missing_ok=True)

    def _make(self, key: str, needs: Path, further_bytes: int) -> None:
        if self.limit_bytes is None:
            return
        with locked(self.cache_dir, _ROOM_KEY, "room in the cache", self.reporter):
            while not self._try(key, further_bytes, self.limit_bytes):
                pass  # a chosen entry is in use by now: choose again
            needs.write_text(str(self._written(key) + further_bytes), encoding="ascii")

    def _try(self, key: str, further_bytes: int, limit_bytes: int) -> bool:
        own = key.partition(".")[0]
        entries = [each for each in sorted(self.cache_dir.iterdir()) if is_key(each.name) and each.name != own]
        models = [self._look_at(entry) for entry in entries]
        announced = self._announced(key)
        free_bytes = shutil.disk_usage(self.cache_dir).free - announced
        space = Space(bytes_below(self.cache_dir) + announced, free_bytes, limit_bytes)
        chosen = choose(models, space, further_bytes, now=time.time(), fresh_seconds=self.fresh_seconds)
        if chosen.short_bytes:
            raise PrepareError(self._refusal(models, space, further_bytes, chosen.short_bytes))
        return all(self._remove(each) for each in chosen.removed)

    def _look_at(self, entry: Path) -> CachedModel:
        with _alone(self.cache_dir, entry) as is_mine:
            if not is_mine:
                mark_used(entry)
            return CachedModel(entry.name, bytes_below(entry), last_use(entry), is_in_use=not is_mine)

    def _remove(self, model: CachedModel) -> bool:
        """Returns False if the entry is in use by now."""
        entry = self.cache_dir / model.key
        with _alone(self.cache_dir, entry) as is_mine:
            if not is_mine or last_use(entry) != model.last_use:
                return False
            what = remove_entry(entry)
        when = datetime.fromtimestamp(model.last_use, UTC).strftime("%Y-%m-%d %H:%M UTC")
        self.reporter.note(f"Removed {what} from the cache to make room ({_shown(model.size_bytes)}, last used {when})")
        return True

    def _announced(self, own_key: str) -> int:
        """What other writers are still going to write."""
        total = 0
        for needs in self.cache_dir.glob(f".*{_NEEDS}"):
            key = needs.name.removeprefix(".").removesuffix(_NEEDS)
            with claimed(lock_file(self.cache_dir, key)) as has_no_writer:
                if key != own_key and not has_no_writer:
                    total += max(0, _number(needs) - self._written(key))
        return total

    def _written(self, key: str) -> int:
        return sum(bytes_below(each) for each in self.cache_dir.glob(f".{key}{PARTIAL_MARK}*"))

    def _refusal(self, models: list[CachedModel], space: Space, needed_bytes: int, short_bytes: int) -> str:
        kept = sum(each.size_bytes for each in models)
        return (
            f"no room for {_shown(needed_bytes)} in the model cache {self.cache_dir}: it holds "
            f"{_shown(space.used_bytes)}, may hold {_shown(space.limit_bytes)} (spec.model.cache.sizeLimit), and its "
            f"volume has {_shown(space.free_bytes)} free. Of {len(models)} other models with {_shown(kept)}, those "
            f"that nobody uses, nor has used for {self.fresh_seconds / 60:g} minutes, are {_shown(short_bytes)} too few"
        )


@contextmanager
def _alone(cache_dir: Path, entry: Path) -> Iterator[bool]:
    """Whether no other process reads or writes `entry`; if so, none does while the block runs."""
    with claimed(use_file(entry)) as is_unread, claimed(lock_file(cache_dir, entry.name)) as is_unwritten:
        yield is_unread and is_unwritten


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0  # its writer has just ended, or is just writing it


def _shown(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def remove_others(cache_dir: Path, kept: Collection[Path], reporter: Reporter) -> None:
    """Remove every entry of the cache, and what killed runs left, except the entries `kept`.

    Raises:
        PrepareError: the cache can't be read or written.
    """
    if not cache_dir.exists():
        return
    try:
        entries = [each for each in sorted(cache_dir.iterdir()) if is_key(each.name) and each.is_dir()]
        for entry in entries:
            if entry not in kept:
                _remove_entry(cache_dir, entry, reporter)
        remove_leftovers(cache_dir, "")
    except OSError as error:
        raise storage_error(error, f"make room in the model cache {cache_dir}") from error


def _remove_entry(cache_dir: Path, entry: Path, reporter: Reporter) -> None:
    with locked(cache_dir, entry.name, "what is to be removed", reporter):
        size = sum(files_with_sizes(entry).values())
        what = remove_entry(entry)
        reporter.note(f"Removed {what} from the cache, which this pod doesn't ask for ({size >> 20} MiB)")
