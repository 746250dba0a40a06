"""`kubectl stageline`: the on-call commands as a kubectl plugin, named `kubectl-stageline` on the PATH.

They are the commands of `stageline` with `--cluster`: a kubectl user means the cluster, even on a machine with a
running `stageline up`. kubectl only passes on arguments after the plugin's name, so `-n` and `--context` go there.
"""

import sys
from typing import Final

from stageline_cli.lazy_group import LazyGroup
from stageline_cli.main import COMMANDS, run

ON_CALL: Final = ("status", "top", "debug-bundle")
CHANGES: Final = ("restart", "rollback", "drain")
"""These only work on a cluster."""

plugin = LazyGroup(
    name="kubectl stageline",
    commands_table={name: COMMANDS[name] for name in (*ON_CALL, *CHANGES)},
    help="Show the state of a cluster's PipelineModels, and change them.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
        "default_map": {name: {"cluster": True} for name in ON_CALL},
    },
)


def main() -> None:
    """Run the plugin on `sys.argv` and exit with its status."""
    sys.exit(run(group=plugin))
