"""A command's prefix that gives it what a pod's container has: a numbered user without a name, and a read-only root.

Namespaces do it, without an image: every mount is made read-only in a mount namespace of its own, all but the named
files and directories, and the user is one of whom no passwd file knows, in a user namespace. Neither needs root where
the kernel lets users make namespaces. The process keeps its id: nothing forks on the way to the command.
"""

import functools
import subprocess
from collections.abc import Sequence
from typing import Final

import pytest

NAMELESS_UID: Final = 10001
"""The images' user."""
_USER_VARIABLES: Final = ("LOGNAME", "USER", "LNAME", "USERNAME")

_SCRIPT: Final = r"""
set -eu
user=$1
shift
writable=
while [ "$1" != -- ]; do
    [ -e "$1" ] || : > "$1"
    mount --bind "$1" "$1"
    writable="$writable $1 "
    shift
done
shift
while read -r _ _ _ _ point options _; do
    case $writable in *" $point "*) continue ;; esac
    case $point in
        /proc | /proc/* | /sys | /sys/* | /dev | /dev/*) ;;
        *) mount -o "remount,bind,ro,${options#r[ow],}" "$point" ;;
    esac
done <<MOUNTS
$(cat /proc/self/mountinfo)
MOUNTS
exec unshare --user "--map-user=$user" "--map-group=$user" -- "$@"
"""


def as_nameless_user(writable: Sequence[str] = (), *, keeps_home: bool = False) -> tuple[str, ...]:
    """Words to put before a command; `writable` are the paths that stay so, all without spaces.

    `keeps_home` leaves HOME as it is, for a container whose manifest sets it.
    """
    forgotten = (*_USER_VARIABLES, *(() if keeps_home else ("HOME",)))
    return (
        "env",
        *(word for name in forgotten for word in ("-u", name)),
        *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _SCRIPT, "sh", str(NAMELESS_UID)),
        *writable,
        "--",
    )


@functools.cache
def _refusal() -> str | None:
    """Why no process can be given these here; None where it can."""
    tried = subprocess.run([*as_nameless_user(), "id", "-u"], capture_output=True, text=True, check=False)
    return None if tried.stdout.strip() == str(NAMELESS_UID) else tried.stderr.strip()


def skip_without_namespaces() -> None:
    """Skip the test where the kernel grants no namespaces, as in some containers."""
    if (why := _refusal()) is not None:
        pytest.skip(f"no process can get a uid and mounts of its own here: {why}")
