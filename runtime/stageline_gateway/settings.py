"""Everything about a gateway that can be set; parsed once, at the command line."""

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DRAIN_SIGNAL: Final = signal.SIGQUIT
"""Has a gateway refuse new requests, and go on with those that are open until it is told to end."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where groups are found and how long each wait may last."""

    endpoints_path: Path | None
    """The endpoints file (`stageline_api.endpoints`); it may appear later than the gateway. None: a cluster's pods."""
    namespaces: tuple[str, ...] = ("default",)
    """Whose PipelineModels are served, in a cluster."""
    own_namespace: str = ""
    """Of this gateway's pod, where it has one."""
    engine_keys: str = field(default="", repr=False)
    """What engines ask for, a key a line (`engine_access`); in a cluster the namespace's Secret takes its place. Of one
    namespace's engines: those of several are never shown the same key.
    """
    engine_authority: Path | None = None
    """Authorities of the certificates that engines of models with `spec.network.tls` show."""
    relist_seconds: float = 300.0
    """How often what was watched of pods and PipelineModels is compared with a full list, in a cluster."""
    poll_seconds: float = 0.25
    """How often the endpoints file is looked at, and so how long a group that is gone may still be tried."""
    connect_timeout_seconds: float = 2.0
    idle_timeout_seconds: float = 120.0
    """Longest silence of an engine before a request's first token: in its queue, in prefill."""
    stall_timeout_seconds: float = 30.0
    """Longest silence of an engine between two tokens of one answer."""
    probe_interval_seconds: float = 1.0
    """How often each engine is asked whether it takes requests. With the next: one probe period, which is how long an
    engine that is gone may be used."""
    probe_timeout_seconds: float = 1.0
    """How long it may take to answer that."""
    hold_seconds: float = 30.0
    """How long a new request waits while no group of its model is ready."""
    start_hold_seconds: float = 600.0
    """How long it waits for the first group of a model that is, or was within this time, scaled to zero."""
    resume_window_seconds: float | None = None
    """How long an answer that has begun waits for a group that continues it; None: as long as its model says."""
    most_losses: int = 8
    """Engines that had got one request and may be lost before it is given up: it might be what kills them."""
    drain_patience_seconds: float = 10.0
    """How long an answer stays on a group that drains, when another could continue it."""
    call_timeout_seconds: float = 10.0
    """How long an engine or a stage may take over a short question (tokenizing, state)."""
    body_timeout_seconds: float = 30.0
    """How long a client may take to send its request's body."""
    send_timeout_seconds: float = 60.0
    """How long a client may leave its end of a connection full before its answer is given up."""
    keep_alive_seconds: float = 15.0
    """Longest silence of a stream: then it has a comment, or a `ping` on Anthropic's path."""
    otlp_endpoint: str | None = None
    """Collector that spans of requests are sent to (`telemetry.tracing`). None sends none."""
    hosts: frozenset[str] | None = None
    """Names that requests may give as their `Host`, besides addresses and this machine's own; None: any."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests from browsers; `*` is any."""
    strict_fields: bool = False
    """Refuse fields that clients send and that change nothing here, instead of naming them in the answer's header."""
    keys_path: Path | None = None
    """API keys (`admission.keys`): a file, or a directory as a Secret is mounted. None lets everyone in."""
    keys_poll_seconds: float = 1.0
    queue_limit: int = 1024
    """Requests of one model that may wait for their first token; each choice of `n` counts, here and below."""
    open_limit: int = 4096
    """Requests that may be open at once."""
    body_limit_bytes: int = 4 * 1024 * 1024
    """Room for a prompt of 128k token ids several times over."""
    body_room_bytes: int = 128 * 1024 * 1024
    """Of the bodies of all open requests together (`admission.request_body`)."""
    retry_after_seconds: float = 2.0
    """What `Retry-After` says when no group is ready and the engine gave no better figure."""

    @property
    def home_namespace(self) -> str:
        """What requests for no served model are counted under: the namespace that is served, where it is only one."""
        if self.endpoints_path is not None:
            return ""
        return self.namespaces[0] if len(self.namespaces) == 1 else self.own_namespace
