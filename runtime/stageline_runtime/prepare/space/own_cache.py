"""Makes room in a cache that one pod alone uses: entries that it doesn't ask for are removed before it fetches.

An entry is first renamed to a leftover, under its lock, and then deleted: whoever dies in between leaves what the next
run removes, and never a part of an entry under the entry's name. Never called for a cache that others may read.
"""

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from stageline_runtime.prepare.cache import files_with_sizes, is_key, read_manifest
from stageline_runtime.prepare.errors import storage_error
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.publish import PARTIAL_MARK, locked, remove_leftovers


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
                _remove(cache_dir, entry, reporter)
        remove_leftovers(cache_dir, "")
    except OSError as error:
        raise storage_error(error, f"make room in the model cache {cache_dir}") from error


def _remove(cache_dir: Path, entry: Path, reporter: Reporter) -> None:
    with locked(cache_dir, entry.name, "what is to be removed", reporter):
        manifest = read_manifest(entry)
        what = entry.name if manifest is None else manifest.source
        size = sum(files_with_sizes(entry).values())
        leftover = Path(tempfile.mkdtemp(prefix=f".{entry.name}{PARTIAL_MARK}", dir=cache_dir))
        entry.rename(leftover / "removed")
        shutil.rmtree(leftover)
        reporter.note(f"Removed {what} from the cache, which this pod doesn't ask for ({size >> 20} MiB)")
