"""What is promised of single models: the rules that the chart then makes, run by Prometheus' own tester."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import helm_python
import pytest
import yaml

from boards.alert_scenarios import Firing, Scenario, series, write_cases
from boards.promtool import needs_promtool, promtool
from cluster.rendered_chart import rendered_objects, rendered_rules
from stageline_api.telemetry import metric_buckets
from stageline_gateway.telemetry import metric_names as names

SMALL: Final = {"namespace": "team-a", "model_name": "smollm2/135m"}
LARGE: Final = {"namespace": "team-a", "model_name": "llama-70b"}
ELSEWHERE: Final = {"namespace": "team-b", "model_name": "smollm2/135m"}
"""Of the small one's name and another's namespace: what holds for all holds for it."""
MODELS: Final = (SMALL, LARGE, ELSEWHERE)


def promised(model: Mapping[str, str], **objectives: float) -> dict[str, Any]:
    """An entry of `perModel`."""
    return {"namespace": model["namespace"], "modelName": model["model_name"], **objectives}


TIGHT_AND_LOOSE: Final = (
    promised(SMALL, firstTokenSeconds=0.5, outputTokenSeconds=0.02, failedRequestRatio=0.0001),
    promised(LARGE, firstTokenSeconds=15, outputTokenSeconds=1, slowRequestRatio=0.05, failedRequestRatio=0.05),
)


def write_rules(directory: Path, *per_model: Mapping[str, Any]) -> list[Path]:
    """The rules of a cluster where this is promised, as files; runbooks are annotated as in the shipped rules."""
    paths = []
    for name, spec in rendered_rules(objectives={"perModel": list(per_model)}).items():
        paths.append(directory / f"{name}.yaml")
        text = yaml.safe_dump(spec).replace("runbook: docs/", "runbook_url: docs/")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def latency(histogram: str, bounds: tuple[float, ...], seconds: float, of_ten: int = 10) -> dict[str, str]:
    """So many of ten requests of every model take so long, the others no time."""
    found = {}
    for model in MODELS:
        labels = {**model, "pod": "gateway-0"}
        for bound in bounds:
            name = series(f"{histogram}_bucket", **labels, le=str(float(bound)))
            found[name] = f"0+{10 if seconds <= bound else 10 - of_ten}x130"
        found[series(f"{histogram}_bucket", **labels, le="+Inf")] = "0+10x130"
        found[series(f"{histogram}_count", **labels)] = "0+10x130"
    return found


def first_tokens_after(seconds: float, of_ten: int = 10) -> dict[str, str]:
    """As the gateway's buckets say it."""
    return latency(names.TIME_TO_FIRST_TOKEN.name, metric_buckets.FIRST_TOKEN, seconds, of_ten)


def tokens_apart_by(seconds: float) -> dict[str, str]:
    """As the gateway's buckets say it."""
    return latency(names.TIME_PER_OUTPUT_TOKEN.name, metric_buckets.TOKEN_GAP, seconds)


def failures(of_thousand: int) -> dict[str, str]:
    """So many of a thousand requests of every model fail, evenly."""
    found = {}
    for model in MODELS:
        for code, each in (("200", 1000 - of_thousand), ("503", of_thousand)):
            found[series(names.REQUESTS.name, **model, pod="gateway-0", code=code)] = f"0+{each}x130"
    return found


def fire(alert: str, value: str, *models: Mapping[str, str], windows: tuple[str, ...] = ("1h",)) -> tuple[Firing, ...]:
    """The rules of a budget that fire, for each model by their long windows."""
    return tuple(Firing(alert, model, value, window=window) for model in models for window in windows)


FIRST, OUTPUT, FAILED = (f"Stageline{each}BudgetBurn" for each in ("FirstToken", "OutputToken", "Failure"))
SCENARIOS: Final = (
    Scenario(
        "first tokens after 1 s: late for the small model alone",
        first_tokens_after(1),
        {"10m": fire(FIRST, "100%", SMALL)},
    ),
    Scenario(
        "first tokens after 8 s: in time for the large model alone",
        first_tokens_after(8),
        {"10m": fire(FIRST, "100%", SMALL, ELSEWHERE)},
    ),
    Scenario(
        "first tokens after 30 s: late for all",
        first_tokens_after(30),
        {"10m": fire(FIRST, "100%", *MODELS)},
    ),
    Scenario(
        "two first tokens in ten after 30 s: twenty times what may be late, four times of the large model",
        first_tokens_after(30, of_ten=2),
        {"10m": fire(FIRST, "20%", SMALL, ELSEWHERE)},
    ),
    Scenario(
        "tokens 40 ms apart: slow for the small model alone",
        tokens_apart_by(0.04),
        {"10m": fire(OUTPUT, "100%", SMALL)},
    ),
    Scenario(
        "tokens 0.5 s apart: quick enough for the large model alone",
        tokens_apart_by(0.5),
        {"10m": fire(OUTPUT, "100%", SMALL, ELSEWHERE)},
    ),
    Scenario(
        "two requests in a thousand fail: twenty times, twice and a twenty-fifth of what may",
        failures(2),
        {"10m": fire(FAILED, "0.2%", SMALL)},
    ),
    Scenario(
        "twenty requests in a thousand fail: less than may of the large model alone",
        failures(20),
        {"10m": fire(FAILED, "2%", SMALL, ELSEWHERE)},
    ),
)


@needs_promtool
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_an_alert_holds_each_model_to_what_is_promised_of_it(scenario: Scenario, tmp_path: Path) -> None:
    rules = write_rules(tmp_path, *TIGHT_AND_LOOSE)
    cases = tmp_path / "cases.yaml"
    write_cases(scenario, cases, rules)
    promtool("check", "rules", "--lint=all", "--lint-fatal", *rules)
    promtool("test", "rules", cases)


def samples(record: str, *values: tuple[Mapping[str, str], float]) -> dict[str, Any]:
    """What promtool must find of a recorded name after ten minutes."""
    found = [{"labels": series(record, **labels), "value": value} for labels, value in values]
    return {"expr": record, "eval_time": "10m", "exp_samples": found}


@needs_promtool
def test_what_an_entry_leaves_out_holds_as_for_all(tmp_path: Path) -> None:
    """And what a model's objective is can be seen before its first request."""
    quiet = {"namespace": "team-c", "model_name": "quiet"}
    rules = write_rules(
        tmp_path, promised(SMALL, firstTokenSeconds=0.5), promised(quiet, outputTokenSeconds=2.5, slowRequestRatio=0.02)
    )
    asked = first_tokens_after(1) | tokens_apart_by(0.04) | failures(1)
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in asked.items()],
        "promql_expr_test": [
            samples("model:stageline_first_token_seconds:objective", (SMALL, 0.5), (LARGE, 2), (ELSEWHERE, 2)),
            samples(
                "model:stageline_output_token_seconds:objective",
                *((model, 0.15) for model in MODELS),
                (quiet, 2.5),
            ),
            samples(
                "model:stageline_slow_request_ratio:objective", *((model, 0.01) for model in MODELS), (quiet, 0.02)
            ),
            samples("model:stageline_failed_request_ratio:objective", *((model, 0.001) for model in MODELS)),
        ],
    }
    cases = tmp_path / "cases.yaml"
    document = {"rule_files": list(map(str, rules)), "evaluation_interval": "15s", "tests": [test]}
    cases.write_text(yaml.safe_dump(document), encoding="utf-8")
    promtool("test", "rules", cases)


def test_rules_about_how_budgets_are_spent_stay_as_they_are() -> None:
    own, shipped = rendered_rules(objectives={"perModel": list(TIGHT_AND_LOOSE)}), rendered_rules()
    assert {name for name in shipped if own[name] != shipped[name]} == {"objectives"}
    before = [rule["record"] for group in shipped["objectives"]["groups"] for rule in group["rules"]]
    assert [rule["record"] for group in own["objectives"]["groups"] for rule in group["rules"]] == before


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (
        [promised(SMALL, firstTokenSeconds=3)],
        "at '/monitoring/objectives/perModel/0/firstTokenSeconds': value must be one of 0.005, 0.01,",
    ),
    ([promised(SMALL, outputTokenSeconds=0.05)], "perModel/0/outputTokenSeconds': value must be one of 0.001, 0.0025,"),
    ([promised(SMALL, slowRequestRatio=0.2)], "perModel/0/slowRequestRatio': maximum: got 0.2, want 0.05"),
    ([promised(SMALL, failedRequestRatio=0)], "perModel/0/failedRequestRatio': exclusiveMinimum"),
    ([promised(SMALL, firstTokens=2)], "perModel/0': additional properties 'firstTokens' not allowed"),
    ([{"modelName": "a", "firstTokenSeconds": 2}], "perModel/0': missing property 'namespace'"),
    ([{"namespace": "a", "firstTokenSeconds": 2}], "perModel/0': missing property 'modelName'"),
    ([promised({**SMALL, "model_name": 'a"} or vector(1) #'}, firstTokenSeconds=2)], "perModel/0/modelName': 'a\"}"),
    ([promised({**SMALL, "namespace": "Team A"}, firstTokenSeconds=2)], "perModel/0/namespace': 'Team A' does not"),
    (
        [promised(SMALL)],
        "perModel[0]: nothing is promised for smollm2/135m in namespace team-a: give one or more of firstTokenSeconds, "
        "outputTokenSeconds, slowRequestRatio, failedRequestRatio",
    ),
    (
        [
            promised(SMALL, firstTokenSeconds=2),
            promised(LARGE, firstTokenSeconds=2),
            promised(SMALL, outputTokenSeconds=1),
        ],
        "perModel[2]: smollm2/135m in namespace team-a has an entry already, perModel[0]: make them one",
    ),
]


@pytest.mark.parametrize(("per_model", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_wrong_entry_is_refused_by_its_place_also_where_no_rules_are_rendered(
    per_model: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(helm_python.HelmError) as refusal:
        rendered_objects({"monitoring": {"rules": "never", "objectives": {"perModel": per_model}}})
    assert words in str(refusal.value)
