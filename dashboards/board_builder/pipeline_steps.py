"""Panels of *Pipeline*: steps, and tensors between stages."""

from board_builder.latencies import heat
from board_builder.layout import Line, Section, line, section
from board_builder.panels import Series, Text, lines
from board_builder.queries import in_order, quantile, rate_by
from board_builder.stages import STAGE
from stageline_runtime import metric_names as names

OF_STAGE = "group {{group}} stage {{stage}}"
OF_GROUP = "group {{group}}"
Matchers = tuple[str, ...]


def steps(matchers: Matchers) -> Section:
    """Compute times of stages and transfer times of tensors."""
    return section("Steps and transfers", _compute(matchers), _transfers(matchers), _throughput(matchers))


def _p50_and_p99(labels: tuple[str, ...], histogram: str, legend: str, matchers: Matchers) -> tuple[Series, Series]:
    return (
        Series(in_order(quantile(0.5, labels, histogram, *matchers)), f"{legend} p50"),
        Series(in_order(quantile(0.99, labels, histogram, *matchers)), f"{legend} p99"),
    )


def _compute(matchers: Matchers) -> Line:
    decodes = Text(
        "Decode step time, p50 and p99",
        "Compute time of one decode step on each stage, without waits. A stage above the others has too many layers "
        "or a slow node; a p99 far above the p50 means that other processes use the node.",
        "s",
    )
    prefills = Text("Prefill step time, p99", "Compute time of one prefill step on each stage.", "s")
    spread = Text("Step time distribution", "Steps of all stages by their compute time. Darker: more steps.", "s")
    step = names.STAGE_STEP.name
    prefill = quantile(0.99, STAGE, step, 'kind="prefill"', *matchers)
    return line(
        8,
        lines(decodes, *_p50_and_p99(STAGE, step, OF_STAGE, ('kind="decode"', *matchers))),
        lines(prefills, Series(in_order(prefill), OF_STAGE)),
        heat(spread, step, *matchers),
    )


def _transfers(matchers: Matchers) -> Line:
    hops = Text(
        "Transfer latency, p50 and p99",
        "From the start of a hidden tensor's send until the next stage (the label) has it, if that stage was "
        "already waiting: the link, not the stage.",
        "s",
    )
    back = Text(
        "Feedback latency, p50 and p99",
        "From the last stage's send of sampled tokens until the first stage has received them.",
        "s",
    )
    sent = Text("Bytes sent", "Hidden tensors to the next stage and feedback to the first, by sender.", "Bps")
    sent_rate = rate_by((*STAGE, "tensor"), names.P2P_BYTES.name, *matchers) + " > 0"
    return line(
        8,
        lines(hops, *_p50_and_p99(STAGE, names.P2P_LATENCY.name, OF_STAGE, matchers)),
        lines(back, *_p50_and_p99(("group",), names.FEEDBACK_LATENCY.name, OF_GROUP, matchers)),
        lines(sent, Series(in_order(sent_rate), f"{OF_STAGE} {{{{tensor}}}}")),
    )


def _throughput(matchers: Matchers) -> Line:
    rate = Text("Step rate by kind", "Steps per second of each stage by kind. dummy: steps without a request.", "ops")
    tokens = Text("Token throughput", "Tokens processed by each stage, without padding.", "suffix: tokens/s")
    by_kind = rate_by((*STAGE, "kind"), names.STAGE_STEPS.name, *matchers) + " > 0"
    return line(
        8,
        lines(rate, Series(in_order(by_kind), f"{OF_STAGE} {{{{kind}}}}")),
        lines(tokens, Series(in_order(rate_by(STAGE, names.STAGE_TOKENS.name, *matchers)), OF_STAGE)),
    )
