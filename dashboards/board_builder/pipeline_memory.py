"""Panels of *Pipeline*: requests in microbatches, KV cache, layers."""

from typing import Final

from board_builder.latencies import heat, quantile_lines
from board_builder.layout import Line, Section, line, section
from board_builder.panels import COUNT, AnyPanel, Limits, Series, Text, lines
from board_builder.queries import in_order, mean, rate_by, selected, share, sum_by
from board_builder.stages import GROUP, STAGE
from board_builder.tables import Column, Key, rows
from stageline_runtime import metric_names as names

OF_GROUP: Final = "group {{group}}"
Matchers = tuple[str, ...]


def cohorts(matchers: Matchers) -> Section:
    """How full steps are, and how long requests wait for one."""
    return section("Scheduling and batching", _sizes(matchers), _requests(matchers), _times(matchers), collapsed=True)


def capacity(matchers: Matchers) -> Section:
    """KV cache and memory."""
    return section("KV cache and memory", _caches(matchers), line(7, _held(matchers)), collapsed=True)


def _of_group(name: str, legend: str, matchers: Matchers, label: str = "") -> Series:
    """A gauge of each group's engine, by its own label if it has one."""
    labels = (*GROUP, label) if label else GROUP
    return Series(sum_by(labels, selected(name, *matchers)), f"{OF_GROUP} {legend}".rstrip())


def _sizes(matchers: Matchers) -> Line:
    size = Text(
        "Batch size",
        "Requests (rows) in one step of a cohort, the pipeline's microbatch. As many cohorts as stages are under way "
        "at once: with few requests each is small, and a step costs nearly as much as with many.",
        "none",
    )
    spread = Text("Batch size distribution", "Steps by how many requests they carry. Darker: more steps.", "none")
    members = Text(
        "Running requests by cohort",
        "Running requests of each cohort. If cohorts differ much, steps have unequal length and stages wait.",
        COUNT,
    )
    of_cohort = _of_group(names.COHORT_REQUESTS.name, "cohort {{cohort}}", matchers, "cohort")
    return line(
        8,
        quantile_lines(size, names.COHORT_ROWS.name, *matchers),
        heat(spread, names.COHORT_ROWS.name, *matchers),
        lines(members, of_cohort, stacked=True),
    )


def _requests(matchers: Matchers) -> Line:
    running = Text(
        "Requests running and waiting",
        "Running requests have a slot in the KV cache; waiting ones don't.",
        COUNT,
    )
    flight = Text(
        "Plans in flight", "Steps sent to the stages and not finished. About the number of stages is right.", COUNT
    )
    preempted = Text(
        "Preemptions",
        "Preempted requests per second; they are computed again. If it lasts, the cache is too small.",
        "reqps",
    )
    return line(
        8,
        lines(
            running,
            _of_group(names.NUM_REQUESTS_RUNNING.name, "running", matchers),
            _of_group(names.NUM_REQUESTS_WAITING.name, "waiting", matchers),
        ),
        lines(flight, _of_group(names.PLANS_IN_FLIGHT.name, "", matchers)),
        lines(preempted, Series(rate_by(GROUP, names.PREEMPTIONS.name, *matchers), OF_GROUP)),
    )


def _times(matchers: Matchers) -> Line:
    queue = Text("Engine queue time", "From a request's arrival at the engine to its first step.", "s")
    parts = Text(
        "Request time: queue, prefill, decode",
        "Means over the requests of the window: in the engine's queue, from the first step to the first token "
        "(prefill), and from there to the last (decode).",
        "s",
    )
    of_request = {
        "queue": names.REQUEST_QUEUE_TIME,
        "prefill": names.REQUEST_PREFILL_TIME,
        "decode": names.REQUEST_DECODE_TIME,
    }
    return line(
        8,
        quantile_lines(queue, names.REQUEST_QUEUE_TIME.name, *matchers),
        lines(
            parts, *(Series(mean((), each.name, *matchers), part) for part, each in of_request.items()), stacked=True
        ),
    )


def _caches(matchers: Matchers) -> Line:
    usage = Text(
        "KV cache usage",
        "Share held by running requests. At 100 % new requests wait and running ones may be preempted.",
        "percentunit",
    )
    held = Text(
        "KV cache usage by stage",
        "Tokens in each stage's cache as a share of its capacity; a finished request's until its slot is reused.",
        "percentunit",
    )
    found = Text(
        "Prefix cache hit ratio",
        "Share of prompt tokens looked up in the prefix cache that were found there and not computed again.",
        "percentunit",
    )
    in_use = f"max by (group) ({selected(names.KV_CACHE_USAGE.name, *matchers)})"
    used = sum_by(STAGE, selected(names.STAGE_KV_TOKENS.name, *matchers))
    room = sum_by(STAGE, selected(names.STAGE_KV_CAPACITY.name, *matchers))
    hits = rate_by(GROUP, names.PREFIX_CACHE_HITS.name, *matchers)
    looked_for = rate_by(GROUP, names.PREFIX_CACHE_QUERIES.name, *matchers)
    return line(
        8,
        lines(usage, Series(in_use, OF_GROUP), limits=Limits(0.9, 0.95)),
        lines(held, Series(in_order(f"{used} / ({room} > 0)"), f"{OF_GROUP} stage {{{{stage}}}}")),
        lines(found, Series(share(hits, looked_for), OF_GROUP)),
    )


def _held(matchers: Matchers) -> AnyPanel:
    text = Text(
        "Stages",
        "Each stage's layers, memory of weights and cache, and capacity. KV room is the cache that fits into its "
        "memory: if it is no more than KV tokens, this stage limits the cache.",
        "none",
    )

    def of_stage(name: str) -> str:
        return in_order(sum_by(("group", "stage"), selected(name, *matchers)))

    return rows(
        text,
        (Key("group", "Group"), Key("stage", "Stage")),
        (
            Column("Layers", of_stage(names.STAGE_LAYERS.name), "none"),
            Column("Memory", of_stage(names.STAGE_MEMORY.name), "bytes"),
            Column("KV slots", of_stage(names.STAGE_KV_SLOTS.name), "none"),
            Column("KV tokens", of_stage(names.STAGE_KV_CAPACITY.name), "none"),
            Column("KV room", of_stage(names.KV_ROOM.name), "none"),
        ),
    )
