"""The engine's Prometheus series: names in one place, vLLM's base names and meanings under Stageline's prefix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

QUEUE_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""From a step's length (a request that is admitted at once) to minutes in a full queue."""
COHORT_ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of one plan; powers of two, because that is how batch cost is thought about."""


TRANSFER_SECONDS_BUCKETS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
"""From a device-to-device copy to a link that is as good as down."""


class EngineMetrics:
    """Series of one engine on a registry of its own; `model_name` is a label of each."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        label = ["model_name"]

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"stageline_{name}", text, label, registry=self.registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"stageline_{name}", text, label, registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"stageline_{name}", text, label, registry=self.registry, buckets=buckets).labels(
                model_name
            )

        self.running = gauge("num_requests_running", "Requests that hold a KV slot.")
        self.waiting = gauge("num_requests_waiting", "Requests admitted to the queue that hold no KV slot yet.")
        self.kv_usage = gauge("kv_cache_usage_ratio", "Share of the KV cache reserved by running requests, 0 to 1.")
        self.plans_in_flight = gauge("plans_in_flight", "Plans sent to the stages whose completion is not known yet.")
        self.prompt_tokens = counter("engine_prompt_tokens", "Prompt tokens of requests given a KV slot.")
        self.generation_tokens = counter("engine_generation_tokens", "Tokens sampled for live requests.")
        self.plans = counter("engine_plans", "Plans sent to the stages that carry rows.")
        self.queue_seconds = histogram(
            "request_queue_time_seconds",
            "Seconds from a request's arrival at the engine to its first scheduled row.",
            QUEUE_SECONDS_BUCKETS,
        )
        self.cohort_rows = histogram("cohort_rows", "Rows (requests) of one plan.", COHORT_ROWS_BUCKETS)
        self.feedback_latency = histogram(
            "feedback_latency_seconds",
            "Seconds from the last stage's send of a plan's sampled rows until the first stage, which may be busy with "
            "other plans, has taken them. Sampled about once a second from the newest plans, on clocks compared over "
            "the plan bus.",
            TRANSFER_SECONDS_BUCKETS,
        )
        self._p2p_latency = Histogram(
            "stageline_p2p_latency_seconds",
            "Seconds from the start of a hidden tensor's send until the next stage (the label) has it, counted only "
            "where that stage was already waiting, so that it is the link and not the stage. Sampled about once a "
            "second from the newest plans, on clocks compared over the plan bus.",
            [*label, "stage"],
            registry=self.registry,
            buckets=TRANSFER_SECONDS_BUCKETS,
        )
        self._model_name = model_name

    def p2p_latency(self, receiving_stage: int) -> Histogram:
        """The transfers to one stage."""
        return self._p2p_latency.labels(self._model_name, str(receiving_stage))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
