"""What to install beside Stageline itself, one requirement a line: those of every part, and of the named extras.

`python images/dependencies.py runtime,prepare`, from the repository's root. Extras of Stageline's own are followed.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_OWN_EXTRAS = re.compile(r"stageline\[(.+)\]")


def requirements(project: dict[str, object], extras: list[str]) -> Iterator[str]:
    """Requirements in the order in which they are named; raises KeyError for an extra that isn't there."""
    yield from project["dependencies"]  # type: ignore[misc]
    optional: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    waiting = list(extras)
    for extra in waiting:
        for requirement in optional[extra]:
            own = _OWN_EXTRAS.fullmatch(requirement)
            if own is None:
                yield requirement
            else:
                waiting += [each for each in own[1].split(",") if each not in waiting]


if __name__ == "__main__":
    described = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.write("\n".join(dict.fromkeys(requirements(described, sys.argv[1].split(",")))) + "\n")
