"""The panel of running versions of one component; it shows a process that an upgrade missed."""

from grafana_foundation_sdk.builders import timeseries

from board_builder.panels import COUNT, Series, Text, lines
from board_builder.queries import selected
from board_builder.variables import CLUSTER


def versions(who: str, build_info: str) -> timeseries.Panel:
    """`who` is the name of the processes, as in "Gateways"; `build_info` is their metric with the label `version`."""
    text = Text("Versions", f"{who} by version. Two for longer than a rollout: one was forgotten.", COUNT)
    return lines(text, Series(f"count by (version) ({selected(build_info, CLUSTER)})", "{{version}}"), stacked=True)
