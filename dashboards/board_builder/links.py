"""Links of boards: to each other, with model and time range kept, and to the runbooks."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import DashboardLink
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

TAG: Final = "stageline"
"""Tag of every board; the list of boards uses it."""
RUNBOOKS: Final = "/docs/runbooks"
"""Path at which `stageline up --monitor` serves them; the chart replaces it by its value `monitoring.runbooksUrl`."""
FLEET, PIPELINE, GATEWAY, OPERATOR = "stageline-fleet", "stageline-pipeline", "stageline-gateway", "stageline-operator"
"""Never change these: links and bookmarks contain them."""


def all_boards() -> DashboardLink:
    """A list of Stageline's boards; it keeps variables and time range."""
    link = DashboardLink("Stageline").type(DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(True)
    return link.include_vars(True).keep_time(True).icon("external link")


def runbooks() -> DashboardLink:
    """The link to the runbooks."""
    link = (
        DashboardLink("Runbooks")
        .type(DashboardLinkType.LINK)
        .url(f"{RUNBOOKS}/README.md")
        .icon("doc")
        .target_blank(True)
    )
    return link.tooltip("What each alert means, how to confirm it and what to do")


def to_board(uid: str, **fields: str) -> str:
    """A data link to another board; it sets variables from fields of the clicked row."""
    chosen = "".join(f"&var-{name}=${{__data.fields.{field}}}" for name, field in fields.items())
    return f"/d/{uid}?${{__url_time_range}}&var-datasource=${{datasource}}{chosen}"


def to_runbook(field: str) -> str:
    """A data link to the runbook of the alert in a field."""
    return f"{RUNBOOKS}/${{__data.fields.{field}}}.md"
