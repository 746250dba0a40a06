"""`kubectl stageline`: the on-call commands as a plugin, which kubectl finds on the PATH as `kubectl-stageline`.

They are the commands of `stageline` with `--cluster` given: who types `kubectl` means the cluster, also on a machine
where a `stageline up` runs. kubectl hands a plugin only what stands behind its name, so `-n` and `--context` go there.
"""

import sys
from typing import Final

from stageline_cli.lazy_group import LazyGroup
from stageline_cli.main import COMMANDS, run

ON_CALL: Final = ("status", "top", "debug-bundle")
CHANGES: Final = ("restart", "rollback", "drain")
"""They know no other place than a cluster."""

plugin = LazyGroup(
    name="kubectl stageline",
    commands_table={name: COMMANDS[name] for name in (*ON_CALL, *CHANGES)},
    help="Show how PipelineModels of a cluster are, and change them.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
        "default_map": {name: {"cluster": True} for name in ON_CALL},
    },
)


def main() -> None:
    """Run the plugin on `sys.argv` and end the process with its exit status."""
    sys.exit(run(group=plugin))
