"""Which graph mode a plan runs in: a pure function of the group's setting and the plan's rows, for the engine alone.

`auto` means `off` on CPU. Compiled layers were measured no faster than the decode kernel that runs without them, and
compiling takes longer than a cold start may.
"""

from collections.abc import Sequence
from typing import assert_never

from stageline_runtime.plan_bus.messages import GraphMode, PlanRow

AUTO_ON_CPU = GraphMode.OFF


def resolve_graphs(asked: str, *, auto: GraphMode = AUTO_ON_CPU) -> GraphMode:
    """The most a group captures. `asked` is `spec.engine.graphs`, `auto` what the word `auto` means for the group.

    Raises:
        ValueError: `asked` is none of `auto`, `off`, `piecewise` and `full`.
    """
    return auto if asked == "auto" else GraphMode(asked)


def plan_graph_mode(graphs: GraphMode, rows: Sequence[PlanRow], *, dummy: bool) -> GraphMode:
    """The mode of a plan with these rows in a group that captures up to `graphs`.

    Whole layers are captured for single-token rows alone, because only their attention has one shape for every
    context; a plan that computes nothing (a heartbeat) runs nothing captured.
    """
    if not rows and not dummy:
        return GraphMode.OFF
    match graphs:
        case GraphMode.OFF | GraphMode.PIECEWISE:
            return graphs
        case GraphMode.FULL:
            return GraphMode.FULL if all(row.num_tokens == 1 for row in rows) else GraphMode.PIECEWISE
        case _:
            assert_never(graphs)
