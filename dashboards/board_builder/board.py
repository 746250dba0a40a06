"""Properties that all boards share, and their JSON: the same bytes from the same sources."""

import json
from collections.abc import Sequence

from grafana_foundation_sdk.builders.dashboard import AnnotationQuery, Dashboard, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync

from board_builder import links
from board_builder.layout import Section, lay_out


def board(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[DatasourceVariable | QueryVariable],
    annotations: Sequence[AnnotationQuery],
    sections: Sequence[Section],
) -> Dashboard:
    """A board of the last hour, refreshed twice a minute."""
    made = Dashboard(f"Stageline / {title}").uid(uid).description(description).tags([links.TAG])
    made.time("now-1h", "now").refresh("30s").timezone("browser").editable().tooltip(DashboardCursorSync.CROSSHAIR)
    made.variables([*variables]).annotations([*annotations]).links([links.all_boards(), links.runbooks()])
    lay_out(made, sections)
    return made


def as_json(made: Dashboard) -> str:
    """Sorted and indented, so that a change of one panel is a change of its lines."""
    return json.dumps(made.build(), cls=JSONEncoder, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
