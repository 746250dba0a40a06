"""Replaces a file atomically: a reader sees the old content or the new, never a part of it."""

import os
from pathlib import Path


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` as UTF-8 to a draft beside `path`, then give it that name. The umask still narrows `mode`.

    One process at a time may write a path; the draft has the process's id in its name. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=mode)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
