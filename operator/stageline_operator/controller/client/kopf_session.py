"""kopf's own HTTP session, with the operator's address and credentials and a trace hook on its requests."""

from dataclasses import dataclass, field

import aiohttp
import kopf
from kubernetes.aio.client import Configuration


@dataclass(frozen=True, kw_only=True)
class KopfSession(kopf.AiohttpSession):
    """A session with the credentials it was made from, by which kopf knows those that were refused already."""

    connection: kopf.ConnectionInfo
    aiohttp_session: aiohttp.ClientSession = field(compare=False)


async def kopf_session(configuration: Configuration, trace: aiohttp.TraceConfig) -> KopfSession:
    """A session as kopf would make it, with `trace` on its requests. Whoever calls closes it."""
    connection = await _kopf_connection(configuration)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=connection.as_ssl_context()),
        headers=connection.as_http_headers(),
        proxy=connection.proxy_url,
        trace_configs=[trace],
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
