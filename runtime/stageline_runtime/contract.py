"""Reads the pod contract: environment variables and the resolved config, checked once at the entry."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from stageline_api import engine_access, env, ports
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import RuntimeConfig, TlsConfig
from stageline_api.telemetry.logs import configure_logging, identify, log_settings
from stageline_runtime.prepare.space.use import hold_models
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.tls.certificates import PodIdentity, TlsError
from stageline_runtime.tls.served import ServedCertificate

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodContract:
    """What a container knows about its place in the group."""

    config: RuntimeConfig
    stage: int
    stage_count: int
    group: int
    incarnation: int
    pod_ip: str
    master_addr: str
    master_port: int
    bus_token: str
    rank: int = 0
    """Of the processes of this stage."""
    rendezvous_seconds: int | None = None
    """How long this pod waits for the others, where that is not what the config says."""

    @property
    def ranks(self) -> int:
        """How many processes this stage is."""
        return self.config.stage_ranks

    @property
    def meeting_seconds(self) -> float:
        """How long to wait until engine and stages are connected."""
        own = self.rendezvous_seconds
        return self.config.timeouts.rendezvous_seconds if own is None else own


def begin(component: str, *, hides_values: bool = False) -> PodContract:
    """Start the log of a container's process, then read the contract; raises RuntimeFailure (BadConfig).

    Until the process ends no other process evicts its models from a shared cache.
    """
    try:
        configure_logging(component, log_settings(), hides_values=hides_values)
    except ValueError as error:
        raise _bad(str(error)) from error
    contract = read_contract()
    hold_models(contract.config)
    identify(
        namespace=contract.config.namespace,
        model=contract.config.model_name,
        group=contract.group,
        incarnation=contract.incarnation,
    )
    if component != "engine":  # which works for all stages, in the pod of the first
        identify(stage=contract.stage)
    if env.STAGE_RANK in os.environ:
        identify(rank=contract.rank)
    return contract


def read_contract(environ: Mapping[str, str] = os.environ) -> PodContract:
    """Read and check the contract; raises RuntimeFailure (BadConfig), naming the variable and its value."""
    config = read_config(environ)
    stage = _integer(environ, env.STAGE_INDEX)
    stage_count = _integer(environ, env.STAGE_COUNT)
    if stage_count != config.stage_count:
        raise _bad(f"{env.STAGE_COUNT}={stage_count} differs from the config's stage_count {config.stage_count}")
    if not 0 <= stage < stage_count:
        raise _bad(f"{env.STAGE_INDEX}={stage} is not between 0 and {stage_count - 1}")
    contract = PodContract(
        config=config,
        stage=stage,
        stage_count=stage_count,
        group=_integer(environ, env.GROUP_INDEX),
        incarnation=_integer(environ, env.INCARNATION),
        pod_ip=_text(environ, env.POD_IP),
        master_addr=_text(environ, env.MASTER_ADDR),
        master_port=_integer(environ, env.MASTER_PORT, default=ports.RENDEZVOUS),
        bus_token=_text(environ, env.BUS_TOKEN),
        rank=_integer(environ, env.STAGE_RANK, default=0),
        rendezvous_seconds=_integer(environ, env.RENDEZVOUS_SECONDS) if env.RENDEZVOUS_SECONDS in environ else None,
    )
    if not 0 <= contract.rank < contract.ranks:
        raise _bad(f"{env.STAGE_RANK}={contract.rank} is not between 0 and {contract.ranks - 1}")
    return contract


def read_engine_keys(pod_ip: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys that the engine requires. Keys are optional on an address that only this machine's processes reach.

    Raises:
        RuntimeFailure: class BadConfig; there are none for another address, or one that can't be used.
    """
    text = environ.get(env.ENGINE_KEYS, "")
    try:
        keys = engine_access.read_keys(text)
    except ValueError as error:
        raise _bad(f"{env.ENGINE_KEYS}: {error}") from None
    if not keys and not engine_access.is_loopback(pod_ip):
        raise _bad(f"{env.ENGINE_KEYS} is not set: without keys an engine answers on loopback alone, not on {pod_ip}")
    return keys


def read_identity(config: RuntimeConfig) -> PodIdentity | None:
    """The model's certificate, as currently mounted; None without `spec.network.tls`.

    Raises:
        RuntimeFailure: class RendezvousTimeout: the Secret may be fixed while the group is made again.
    """
    return _read_tls(config, PodIdentity)


def read_served(config: RuntimeConfig) -> ServedCertificate | None:
    """What the engine shows its callers; None without `spec.network.tls`. Raises as `read_identity` does."""
    return _read_tls(config, ServedCertificate)


def _read_tls(config: RuntimeConfig, read: Callable[[TlsConfig], _Read]) -> _Read | None:
    if config.tls is None:
        return None
    try:
        return read(config.tls)
    except TlsError as error:
        raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, f"spec.network.tls: {error}", operation="tls") from error


def read_config(environ: Mapping[str, str] = os.environ) -> RuntimeConfig:
    """Read the resolved config that `STAGELINE_CONFIG` names.

    Raises:
        RuntimeFailure: class BadConfig, naming the file and the problem.
    """
    path = Path(_text(environ, env.CONFIG))
    try:
        return RuntimeConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _bad(f"{env.CONFIG}: {path} can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise _bad(f"{path.name}: {field}: {first['msg']}") from error


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise _bad(f"{name} is not set")
    return value


def _integer(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(_text(environ, name))
    except ValueError as error:
        raise _bad(f"{name}={value!r} is not an integer") from error


def _bad(detail: str) -> RuntimeFailure:
    return RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="contract")
