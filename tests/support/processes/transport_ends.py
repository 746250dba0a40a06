"""Two stages of one pipeline on loopback that meet at a real rendezvous: the contracts."""

from typing import Literal

from stageline_api.runtime_config import RuntimeConfig, Timeouts, TlsConfig
from stageline_runtime.contract import PodContract


def transport_contract(
    stage: int,
    port: int,
    step_seconds: float,
    tls: TlsConfig | None = None,
    rendezvous_seconds: float = 120,
    stage_count: int = 2,
    transport: Literal["auto", "gloo"] = "auto",
) -> PodContract:
    """The contract of one of the stages; all must get the same port. With `tls` each has an address of its own."""
    config = RuntimeConfig(
        model_name="m",
        namespace="n",
        served_name="s",
        source="file:///m",
        cache_dir="/c",
        stage_count=stage_count,
        transport=transport,
        timeouts=Timeouts(rendezvous_seconds=rendezvous_seconds, step_seconds=step_seconds),
        tls=tls,
    )
    return PodContract(
        config=config,
        stage=stage,
        stage_count=stage_count,
        group=0,
        incarnation=1,
        pod_ip="127.0.0.1" if tls is None else secure_address(stage),
        master_addr="127.0.0.1",
        master_port=port,
        bus_token="unused",
    )


def secure_address(stage: int) -> str:
    """Where a stage of a ring listens, as in a pod of its own."""
    return f"127.0.0.{11 + stage}"
