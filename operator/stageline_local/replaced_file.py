"""Replaces a file atomically: a reader sees the old content or the new, never a part of it."""

import os
from pathlib import Path


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` as UTF-8 to a temporary file beside `path`, then rename it. The umask still restricts `mode`.

    Only one process at a time may write a path; the temporary name contains the process id. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=mode)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
