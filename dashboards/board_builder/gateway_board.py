"""*Gateway*: service for clients, and the source of failures: engines, limits, or the gateway itself."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from board_builder import links
from board_builder.annotations import firing_alerts, reformed_groups
from board_builder.board import board
from board_builder.latencies import heat, quantile_lines
from board_builder.layout import Line, Section, line, section
from board_builder.objectives import RED, over_budget
from board_builder.panels import COUNT, AnyPanel, Limits, Series, Text, judged, lines, number
from board_builder.queries import current, events, quantile, rate_by, selected, sum_by
from board_builder.requests import ERRORS, FAILING, error_ratio, request_rate
from board_builder.tables import Column, Key, rows
from board_builder.variables import CLUSTER, choice, cluster_choice, datasource
from board_builder.versions import versions
from stageline_gateway.telemetry import metric_names as names

MODEL: Final = ('cluster=~"$cluster",namespace=~"$namespace"', 'model_name=~"$model_name"')
PER_MODEL: Final = ("cluster", "namespace", "model_name")
STALE: Final = {"endpoints": names.ENDPOINTS_STALE, "keys": names.KEYS_STALE, "certificate": names.TLS_STALE}
LEFT: Final = Limits(7 * 86400, 86400, low_is_bad=True)
"""An alert is a warning from a week on, and critical from a day on."""


def gateway_board() -> Dashboard:
    """One board per installation."""
    groups = names.GROUPS.name
    return board(
        links.GATEWAY,
        "Gateway",
        "Service for clients: requests, errors, latency, limits; and failures of engines.",
        (
            datasource(),
            cluster_choice(groups),
            choice("namespace", "Namespace", "Namespaces that gateways serve.", groups, "namespace", (CLUSTER,)),
            choice("model_name", "Model name", "Names that clients ask for.", groups, "model_name", MODEL[:1]),
        ),
        (reformed_groups(*MODEL), firing_alerts()),
        (_is_it_bad(), _engines(), _latency(), _tokens(), _inputs()),
    )


def _is_it_bad() -> Section:
    codes = Text(
        "Request rate by status",
        "Answers per second by status. 499: the client left. 429: a limit of its key. 503: no capacity or no group. "
        "502: an engine failed and no other could take over.",
        "reqps",
    )
    series = Series(rate_by(("code",), names.REQUESTS.name, MODEL[0], 'model_name=~"$model_name|"'), "{{code}}")
    return section(
        "Overview",
        line(4, *_health(), widths=(4, 4, 4, 4, 4, 4)),
        line(7, _models(), lines(codes, series, stacked=True), widths=(14, 10)),
    )


def _health() -> tuple[AnyPanel, ...]:
    rate = Text("Request rate", "Requests answered per second.", "reqps")
    errors = Text("Error ratio", f"Share of requests that failed. {ERRORS}", "percentunit")
    first = Text("TTFT p99", f"Time to first token: 99 of 100 requests had theirs within this time. {RED}", "s")
    waiting = Text("Requests waiting", "Requests that wait for their first token.", COUNT)
    in_flight = Text("Requests in flight", "Requests being answered right now.", COUNT)
    stale = Text(
        "Stale configuration",
        "Endpoints, API keys or certificate that a gateway can't reload; it uses the last good version. 0 is right.",
        COUNT,
    )
    old = " + ".join(current((), each.name, MODEL[0]) for each in STALE.values())
    return (
        number(rate, request_rate((), *MODEL)),
        number(errors, error_ratio((), *MODEL), FAILING),
        judged(first, quantile(0.99, (), names.TIME_TO_FIRST_TOKEN.name, *MODEL), over_budget("TTFT", *MODEL)),
        number(waiting, sum_by((), selected(names.QUEUED.name, *MODEL))),
        number(in_flight, sum_by((), selected(names.IN_FLIGHT.name, *MODEL))),
        number(stale, old, Limits(1, 1)),
    )


def _models() -> AnyPanel:
    unready = current(PER_MODEL, names.GROUPS.name, 'ready="false"', *MODEL)
    fleet = links.to_board(links.FLEET, namespace="Namespace", model_name="Model")
    return rows(
        Text("Models", "One row per model name: load, errors, latency and the groups that can take requests.", "none"),
        (Key("namespace", "Namespace"), Key("model_name", "Model", fleet, "Open its groups and stages")),
        (
            Column("Requests/s", rate_by(PER_MODEL, names.REQUESTS.name, *MODEL), "reqps"),
            Column("Errors", error_ratio(PER_MODEL, *MODEL), "percentunit", FAILING),
            Column("TTFT p99", quantile(0.99, PER_MODEL, names.TIME_TO_FIRST_TOKEN.name, *MODEL), "s"),
            Column("TPOT p99", quantile(0.99, PER_MODEL, names.TIME_PER_OUTPUT_TOKEN.name, *MODEL), "s"),
            Column("Waiting", sum_by(PER_MODEL, selected(names.QUEUED.name, *MODEL)), "none"),
            Column("Groups not ready", unready, "none", Limits(1, 1)),
        ),
        sort="Errors",
    )


def _engines() -> Section:
    return section("Groups and engines", _groups(), _losses())


def _groups() -> Line:
    readiness = Text("Groups by readiness", "As discovery, probes and circuit breakers see them.", COUNT)
    circuits = Text(
        "Circuit breakers open",
        "Groups whose circuit breaker is open, or half-open with one trial request, because requests to them failed.",
        COUNT,
    )
    losses = Text(
        "Engine failures by kind",
        "Requests that an engine did not finish, in the window, those that another group resumed included. left is no "
        "failure: its group drained.",
        COUNT,
    )
    by_readiness = current(("model_name", "ready"), names.GROUPS.name, *MODEL)
    return line(
        8,
        lines(readiness, Series(by_readiness, "{{model_name}} ready={{ready}}")),
        lines(circuits, Series(current(("model_name",), names.CIRCUITS_OPEN.name, *MODEL), "{{model_name}}")),
        lines(losses, _events(names.ENGINE_LOSSES.name, "kind")),
    )


def _losses() -> Line:
    resumes = Text(
        "Resumed requests",
        "Answers that another group, or the same one after its restart, was asked to resume, by outcome. Clients "
        "don't notice resumed and moved; expired, refused and exhausted reach them as errors.",
        COUNT,
    )
    broken = Text(
        "Interrupted streams",
        "Streams that ended with an error event after their status had been sent, and answers ended because their "
        "reader was too slow, in the window.",
        COUNT,
    )
    return line(
        8,
        lines(resumes, _events(names.RESUMES.name, "outcome")),
        lines(
            broken,
            Series(events(("model_name",), names.BROKEN_ANSWERS.name, *MODEL), "{{model_name}} broken"),
            Series(events(("model_name",), names.SLOW_READERS.name, *MODEL), "{{model_name}} slow reader"),
        ),
    )


def _events(name: str, label: str) -> Series:
    return Series(events(("model_name", label), name, *MODEL), f"{{{{model_name}}}} {{{{{label}}}}}")


def _latency() -> Section:
    first, output = names.TIME_TO_FIRST_TOKEN.name, names.TIME_PER_OUTPUT_TOKEN.name
    first_text = Text("TTFT (time to first token)", "From a request's arrival to its first token.", "s")
    output_text = Text(
        "TPOT (time per output token)",
        "Per finished request: time from first to last token, divided by the number of tokens.",
        "s",
    )
    by_first = Text("TTFT distribution", "Requests by the time to their first token.", "s")
    by_output = Text("TPOT distribution", "Requests by their time per output token.", "s")
    return section(
        "Latency",
        line(8, quantile_lines(first_text, first, *MODEL), heat(by_first, first, *MODEL)),
        line(8, quantile_lines(output_text, output, *MODEL), heat(by_output, output, *MODEL)),
        _parts_of_latency(),
        collapsed=True,
    )


def _parts_of_latency() -> Line:
    gap = Text(
        "ITL (inter-token latency)",
        "Between two events with new tokens of one stream. A high p99 is seen as stutter.",
        "s",
    )
    whole = Text("E2E latency", "From arrival to the end of the answer, for requests that finished.", "s")
    taken = Text(
        "Time to dispatch",
        "From a request's arrival until an engine accepts it: waiting for a ready group, and engines tried before. The "
        "engine's own queue comes after it.",
        "s",
    )
    return line(
        8,
        quantile_lines(taken, names.QUEUE_TIME.name, *MODEL),
        quantile_lines(gap, names.INTER_TOKEN_LATENCY.name, *MODEL),
        quantile_lines(whole, names.E2E_REQUEST_LATENCY.name, *MODEL),
    )


def _tokens() -> Section:
    tokens = Text("Token throughput", "Prompt tokens admitted and tokens generated.", "suffix: tokens/s")
    flight = Text("Requests in flight by model", "Being answered, and of these waiting for their first token.", COUNT)
    return section(
        "Traffic",
        line(
            8,
            lines(
                tokens,
                Series(rate_by(("model_name",), names.PROMPT_TOKENS.name, *MODEL), "{{model_name}} prompt"),
                Series(rate_by(("model_name",), names.GENERATION_TOKENS.name, *MODEL), "{{model_name}} generated"),
            ),
            lines(
                flight,
                Series(sum_by(("model_name",), selected(names.IN_FLIGHT.name, *MODEL)), "{{model_name}} in flight"),
                Series(sum_by(("model_name",), selected(names.QUEUED.name, *MODEL)), "{{model_name}} waiting"),
            ),
        ),
        collapsed=True,
    )


def _inputs() -> Section:
    return section("API keys, limits and configuration", _limits(), _freshness(), collapsed=True)


def _limits() -> Line:
    refusals = Text(
        "Requests rejected by limits",
        "Requests rejected per second, by the key's name (empty without keys) and the error's code.",
        "reqps",
    )
    tokens = Text(
        "Token throughput by API key", "Tokens of prompts and answers, by the key's name.", "suffix: tokens/s"
    )
    stale = Text(
        "Stale configuration by kind", "1 while it can't be reloaded and the last good version is in force.", COUNT
    )
    refused = rate_by(("key_name", "reason"), names.REFUSALS.name, MODEL[0])
    by_key = rate_by(("key_name",), names.KEY_TOKENS.name, MODEL[0])
    return line(
        8,
        lines(refusals, Series(refused, "{{key_name}} {{reason}}")),
        lines(tokens, Series(by_key, "{{key_name}}"), stacked=True),
        lines(stale, *(Series(current((), each.name, MODEL[0]), what) for what, each in STALE.items())),
    )


def _freshness() -> Line:
    age = Text(
        "Discovery age",
        "Time since pods and models, or the endpoints file, were last confirmed. Above five minutes in a cluster the "
        "gateway routes by an outdated list.",
        "s",
    )
    expiry = Text("Certificate expiry", "Until the current certificate expires. No data: no TLS here.", "s")
    return line(
        8,
        lines(age, Series(current((), names.DISCOVERY_AGE.name, MODEL[0]), "oldest"), limits=Limits(200, 300)),
        number(expiry, f"min({selected(names.TLS_EXPIRY.name, MODEL[0])}) - time()", LEFT),
        versions("Gateways", names.BUILD_INFO.name),
    )
