"""Two stages of one pipeline on loopback that meet at a real rendezvous: the contracts."""

from stageline_api.runtime_config import RuntimeConfig, Timeouts
from stageline_runtime.contract import PodContract


def transport_contract(stage: int, port: int, step_seconds: float) -> PodContract:
    """The contract of one of two stages; both must get the same port."""
    config = RuntimeConfig(
        model_name="m",
        namespace="n",
        served_name="s",
        source="file:///m",
        cache_dir="/c",
        stage_count=2,
        timeouts=Timeouts(rendezvous_seconds=120, step_seconds=step_seconds),
    )
    return PodContract(
        config=config,
        stage=stage,
        stage_count=2,
        group=0,
        incarnation=1,
        pod_ip="127.0.0.1",
        master_addr="127.0.0.1",
        master_port=port,
        bus_token="unused",
    )
