"""Keeps what a process made while it started out of the garbage collector's rounds.

A stage or an engine holds some 200,000 objects of its libraries for its whole life. The collector's full round walks
all of them, 50 to 100 ms in which no step goes on, and comes again after every few thousand steps.
"""

import gc


def settle_heap() -> None:
    """What is alive now counts as here to stay; call it once, when the start is over."""
    gc.collect()  # Loading leaves cycles, which would stay too.
    gc.freeze()
