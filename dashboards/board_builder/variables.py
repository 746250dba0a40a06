"""Variables of a board. Each choice only offers values that match the choices before it."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models import dashboard as models

from board_builder.panels import DATASOURCE
from board_builder.queries import selected


def datasource() -> DatasourceVariable:
    """The Prometheus data source."""
    variable = DatasourceVariable("datasource").label("Data source").type("prometheus")
    return variable.description("The Prometheus that scrapes Stageline.")


CLUSTER: Final = 'cluster=~"$cluster"'


def cluster_choice(metric: str) -> QueryVariable:
    """Clusters, if one Prometheus has several; all of them match, also if series have no such label."""
    return choice("cluster", "Cluster", "Clusters, where series say which they are of.", metric, "cluster")


def choice(
    name: str, label: str, description: str, metric: str, of: str, matchers: tuple[str, ...] = (), *, multi: bool = True
) -> QueryVariable:
    """Values of the label `of` on a series that always exists, narrowed by `matchers`.

    With `multi` several can be chosen, initially all; an empty label then matches too.
    """
    query = {"query": f"label_values({selected(metric, *matchers)}, {of})", "refId": name, "qryType": 1}
    variable = QueryVariable(name).label(label).description(description).datasource(DATASOURCE).query(query)
    variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.NATURAL_ASC)
    if not multi:
        return variable.multi(False).include_all(False)
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return variable.multi(True).include_all(True).all_value(".*").current(everything)


def hidden(name: str, description: str, metric: str, of: str, matchers: tuple[str, ...]) -> QueryVariable:
    """All values of a label that match the choices; users can't choose among them.

    Links between boards pass on choices by name, so a hidden variable must not have the name of a choice.
    """
    variable = choice(name, name, description, metric, of, matchers).hide(models.VariableHide.HIDE_VARIABLE)
    variable.build().all_value = None
    variable.build().skip_url_sync = True
    return variable
