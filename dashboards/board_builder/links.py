"""Where boards lead: to each other, with model and time range kept, and to the runbooks."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

TAG: Final = "stageline"
"""On every board; the list of boards is made from it."""
RUNBOOKS: Final = "/docs/runbooks"
"""Where `stageline up --monitor` serves them; the chart puts its value `monitoring.runbooksUrl` in its place."""
FLEET, PIPELINE, GATEWAY, OPERATOR = "stageline-fleet", "stageline-pipeline", "stageline-gateway", "stageline-operator"
"""Fixed for good: links and bookmarks hold them."""


def all_boards() -> DashboardLink:
    """A list of Stageline's boards, which keeps variables and time range."""
    link = DashboardLink("Stageline").type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
    return link.include_vars(True).keep_time(True).icon("external link")


def runbooks() -> DashboardLink:
    """What to do about each alert."""
    link = (
        DashboardLink("Runbooks")
        .type(DashboardLinkType.LINK)
        .url(f"{RUNBOOKS}/README.md")
        .icon("doc")
        .target_blank(True)
    )
    return link.tooltip("What each alert means, how to confirm it and what to do")


def to_board(uid: str, **fields: str) -> str:
    """A data link to another board, which sets variables from fields of the row that was clicked."""
    chosen = "".join(f"&var-{name}=${{__data.fields.{field}}}" for name, field in fields.items())
    return f"/d/{uid}?${{__url_time_range}}&var-datasource=${{datasource}}{chosen}"


def to_runbook(field: str) -> str:
    """A data link to the runbook of the alert that a field names."""
    return f"{RUNBOOKS}/${{__data.fields.{field}}}.md"
