"""Each alert against scripted series: when it fires, what it then says, and what it must not be set off by."""

from pathlib import Path
from typing import Final

import pytest

from boards.alert_scenarios import Scenario, alert_names, write_cases
from boards.control_alert_scenarios import GATEWAY_SOURCES, OPERATOR, SCRAPES
from boards.group_alert_scenarios import LIVES, PIPELINES
from boards.promtool import needs_promtool, promtool
from boards.queue_alert_scenarios import QUEUES
from boards.user_alert_scenarios import BUDGETS, PRESENCE

SCENARIOS: Final = (
    *PRESENCE,
    *QUEUES,
    *BUDGETS,
    *LIVES,
    *PIPELINES,
    *OPERATOR,
    *GATEWAY_SOURCES,
    *SCRAPES,
)


@needs_promtool
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_exactly_the_alerts_fire_that_should(scenario: Scenario, tmp_path: Path) -> None:
    cases = tmp_path / "cases.yaml"
    write_cases(scenario, cases)
    promtool("test", "rules", cases)


def test_each_alert_has_a_scenario_where_it_fires_and_one_that_comes_close() -> None:
    fired = {each.alert for scenario in SCENARIOS for firing in scenario.firing_at.values() for each in firing}
    spared = {alert for scenario in SCENARIOS for alert in scenario.spares}
    assert fired == set(alert_names()) >= spared
    assert set(alert_names()) - spared == set()
