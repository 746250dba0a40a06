"""Which Stageline this is: the version of the distribution that is installed."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def stageline_version() -> str:
    """The version, or `source` where the code is imported from a tree that was never installed.

    Reading a distribution's metadata takes longer than all else that is done for a request, so it is read once.
    """
    try:
        return version("stageline")
    except PackageNotFoundError:
        return "source"
