"""Makes room in a cache that one pod alone uses: entries that it doesn't ask for are removed before it fetches.

An entry goes under its lock (`publish.remove_entry`). Never called for a cache that others may read.
"""

from collections.abc import Collection
from pathlib import Path

from stageline_runtime.prepare.cache import files_with_sizes, is_key
from stageline_runtime.prepare.errors import storage_error
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.publish import locked, remove_entry, remove_leftovers


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
        size = sum(files_with_sizes(entry).values())
        what = remove_entry(entry)
        reporter.note(f"Removed {what} from the cache, which this pod doesn't ask for ({size >> 20} MiB)")
