"""Weight files that are fetched one by one into a published entry, each once however many stages need it.

Every shard has a lock and a hidden directory of its own beside the entry, under the rules of `publish`, and joins the
entry by one rename. It comes from the commit that the entry's manifest names, and must be what that says. When
nothing is missing, no request is made.
"""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from stageline_api.resource.serving.model_source import HubSource, parse_source
from stageline_runtime.prepare.cache import Manifest, missing_shards, read_manifest
from stageline_runtime.prepare.errors import PrepareError, storage_error
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.publish import PARTIAL_MARK, locked, remove_leftovers, sync_one
from stageline_runtime.prepare.space.make_room import Room


def fetch_shards(entry: Path, names: Iterable[str] | None, reporter: Reporter, limit_bytes: int | None = None) -> None:
    """Fetch those of the shards `names` (None: of all) that `entry` lists and lacks, and make room as `Room` does.

    Raises:
        PrepareError: one can't be fetched or stored; the message names it.
    """
    missing = missing_shards(entry, names)
    if not missing:
        return
    manifest = read_manifest(entry)
    assert manifest is not None, "an entry that lists shards has a manifest"
    for name in missing:
        try:
            _fetch(entry, manifest, name, Room(entry.parent, limit_bytes, reporter))
        except PrepareError as error:
            # The entry could be made from this repository once, so trying again may help.
            raise PrepareError(f"cannot fetch {name}: {error.message}") from error
        except OSError as error:
            raise storage_error(error, f"store {name} in the model cache {entry.parent}") from error


def _fetch(entry: Path, manifest: Manifest, name: str, room: Room) -> None:
    from stageline_runtime.prepare.hub.source import (
        download_shard,  # the Hub client takes time, and a full cache needs none
    )

    source = parse_source(manifest.source)
    assert isinstance(source, HubSource), "only the Hub gives shards"
    cache_dir, key, reporter = entry.parent, f"{entry.name}.{name}", room.reporter
    with locked(cache_dir, key, name, reporter), room.writing(key) as need:
        remove_leftovers(cache_dir, key)
        if not missing_shards(entry, [name]):
            reporter.note(f"Found {name} in the cache")
            return
        expected = manifest.shards[name]
        need(expected.size_bytes or 0)
        partial = Path(tempfile.mkdtemp(prefix=f".{key}{PARTIAL_MARK}", dir=cache_dir))
        try:
            whole = download_shard(source, manifest.resolved, name, expected, partial, reporter)
            sync_one(whole)
            _publish(whole, entry, manifest, reporter)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _publish(whole: Path, entry: Path, manifest: Manifest, reporter: Reporter) -> None:
    """Move the file into the entry that asked for it, not into one that was made in its place from another commit."""
    with locked(entry.parent, entry.name, "this model", reporter):
        if read_manifest(entry) != manifest:
            raise PrepareError(f"the cache entry {entry} was made again meanwhile; try again")
        whole.replace(entry / whole.name)
        sync_one(entry)
