"""The panel that shows a version somebody forgot: processes of one component by what they were built from."""

from grafana_foundation_sdk.builders import timeseries

from board_builder.panels import Series, Text, lines


def versions(who: str, build_info: str) -> timeseries.Panel:
    """`who` are the processes, as in "Gateways"; `build_info` is the name of their metric with the label `version`."""
    text = Text("Versions", f"{who} by version. Two for longer than a rollout: one was forgotten.", "none")
    return lines(text, Series(f"count by (version) ({build_info})", "{{version}}"), stacked=True)
