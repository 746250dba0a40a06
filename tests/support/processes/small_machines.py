"""Machines with little memory: the command of a stage that believes in one (`short_stage.py`)."""

from pathlib import Path
from typing import Final

_SHORT_STAGE: Final = Path(__file__).with_name("short_stage.py")


def short_stage_command(num_blocks: int) -> tuple[str, str]:
    """A stage of two in float32 on a machine that has room for `num_blocks` blocks, wherever they are cut."""
    return str(_SHORT_STAGE), str(num_blocks)
