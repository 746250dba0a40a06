"""The installed version of Stageline."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def stageline_version() -> str:
    """The version, or `source` if the code is imported from a tree that was never installed.

    Reading a distribution's metadata is slow compared with a request, so it is read once.
    """
    try:
        return version("stageline")
    except PackageNotFoundError:
        return "source"
