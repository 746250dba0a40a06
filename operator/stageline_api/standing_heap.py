"""Keeps what a process made while it started out of the garbage collector's rounds.

A stage, an engine or a gateway holds some 200,000 objects of its libraries for its whole life. The collector's full
round walks all of them, 35 to 100 ms in which no step and no token goes on, and comes again and again under load.
"""

import gc


def settle_heap() -> None:
    """What is alive now counts as here to stay; call it once, when the start is over."""
    gc.collect()  # Loading leaves cycles, which would stay too.
    gc.freeze()
