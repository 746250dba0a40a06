"""How to reach the API server and as whom: from a kubeconfig, or from inside a pod."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import kopf
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration

from stageline_api.errors import USAGE_EXIT_CODE, UserError

_SERVICE_HOST_VARIABLE: Final = "KUBERNETES_SERVICE_HOST"
_POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def load_configuration(kubeconfig: Path | None, context: str | None) -> Configuration:
    """Address and credentials: the file given, else $KUBECONFIG, else the pod's service account, else ~/.kube/config.

    Raises:
        UserError: there is none, or it can't be read.
    """
    configuration = Configuration()
    file = _kubeconfig_file(kubeconfig, context)
    try:
        if file is None:
            kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await kube_config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=file, context=context, client_configuration=configuration, persist_config=False
            )
    except Exception as error:
        where = "the pod's service account" if file is None else f"kubeconfig {file}"
        # The loader raises whatever its YAML, its helper programs or its files raise.
        raise UserError(f"can't log in to a cluster with {where}: {error}", USAGE_EXIT_CODE) from error
    return configuration


def own_namespace() -> str | None:
    """Namespace of the pod this runs in; None outside a cluster."""
    try:
        return _POD_NAMESPACE_FILE.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class KopfSession(kopf.AiohttpSession):
    """A session with the credentials it was made from, by which kopf knows those that were refused already."""

    connection: kopf.ConnectionInfo
    aiohttp_session: aiohttp.ClientSession = field(compare=False)


async def kopf_session(configuration: Configuration, told: aiohttp.TraceConfig) -> KopfSession:
    """A session as kopf would make it, whose requests `told` hears of. Whoever calls closes it."""
    connection = await _kopf_connection(configuration)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=connection.as_ssl_context()),
        headers=connection.as_http_headers(),
        proxy=connection.proxy_url,
        trace_configs=[told],
    )
    return KopfSession(server=connection.server, aiohttp_session=session, connection=connection)


async def _kopf_connection(configuration: Configuration) -> kopf.ConnectionInfo:
    """The same address and credentials in kopf's terms; a token is read anew each time."""
    header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (header or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=str(configuration.host),
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=(scheme or "Bearer") if token else None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )


def _kubeconfig_file(kubeconfig: Path | None, context: str | None) -> str | None:
    """None means: as the pod's service account."""
    if kubeconfig is not None:
        return str(kubeconfig)
    from_environment = os.environ.get("KUBECONFIG")
    if from_environment:
        return from_environment
    default = Path.home() / ".kube" / "config"
    if context is None and _SERVICE_HOST_VARIABLE in os.environ:
        return None
    return str(default) if default.exists() or context is not None else None
