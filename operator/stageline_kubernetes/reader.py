"""An API server for commands, which block: login as in kubectl, GETs of plain JSON or text, patches and posts.

It writes only what a user's command asks for. It is separate from `client` because commands read from threads with a
blocking HTTP client, for instance a pod's page through the API server's proxy. A machine that only runs commands then
needs no aiohttp.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from kubernetes import config as kube_config
from kubernetes.client import ApiClient, Configuration

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.places import NAMESPACE_FILE, has_kubeconfig, is_in_cluster, kubeconfig_files

TIMEOUT_SECONDS: Final = 10.0
_FIRST_REFUSAL: Final = 300
_SHORTEST_SECRET: Final = 6


class ApiServer:
    def __init__(self, configuration: Configuration, context: str, namespace: str) -> None:
        self._configuration = configuration
        self._client = ApiClient(configuration)
        self.context = context
        """Name of the kubeconfig's context, or `in cluster`."""
        self.namespace = namespace
        """The context's namespace."""

    @property
    def secrets(self) -> tuple[str, ...]:
        configuration = self._configuration
        tokens = [str(token).removeprefix("Bearer ") for token in configuration.api_key.values()]
        return tuple(each for each in (*tokens, configuration.password or "") if len(each) >= _SHORTEST_SECRET)

    def get(self, path: str, query: Mapping[str, str] | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> bytes:
        """The body of a response; raises `ApiError` unless it is a success."""
        return self._ask("GET", path + (f"?{urlencode(query)}" if query else ""), timeout_seconds)

    def patch_json(self, path: str, patch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The object after a JSON patch (RFC 6902), strictly validated by the API server; raises `ApiError`."""
        return self._write("PATCH", path, patch, "application/json-patch+json")

    def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The response to a POST, strictly validated by the API server; raises `ApiError`."""
        return self._write("POST", path, body, "application/json")

    def _write(self, method: str, path: str, body: Any, content_type: str) -> dict[str, Any]:
        query = urlencode({"fieldManager": "stageline", "fieldValidation": "Strict"})
        return dict(json.loads(self._ask(method, f"{path}?{query}", TIMEOUT_SECONDS, body, content_type)))

    def _ask(
        self, method: str, path: str, timeout_seconds: float, body: Any = None, content_type: str | None = None
    ) -> bytes:
        url = f"{self._configuration.host}{path}"
        headers = {"Accept": "application/json, */*", "User-Agent": "stageline"}
        if content_type is not None:
            headers["Content-Type"] = content_type
        try:
            if token := self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization"):
                headers["Authorization"] = token
            answer = self._client.call_api(method, url, headers, body, _request_timeout=timeout_seconds)
            content = bytes(answer.read() or b"")  # type: ignore[no-untyped-call]
        except Exception as error:  # login helpers, TLS and connections raise any exception
            raise ApiError(f"no answer: {_reason(error)}", 0) from error
        if answer.status >= _FIRST_REFUSAL:
            raise ApiError(f"status {answer.status}: {_message(content)}", answer.status)
        return content

    def get_json(self, path: str, **query: str) -> dict[str, Any]:
        """The response as a JSON object; raises `ApiError`."""
        try:
            return dict(json.loads(self.get(path, query)))
        except ValueError as error:
            raise ApiError("the response is no JSON", 0) from error

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()


def log_in(kubeconfig: Path | None, context: str | None) -> ApiServer:
    """Log in as `kubectl` does: the given file, $KUBECONFIG, ~/.kube/config; else the pod's own service account.

    Raises:
        UserError: exit status 2; no login was found; the message says what to provide.
    """
    configuration = Configuration()
    # The library's debug output of a failing request contains its headers.
    configuration.debug = False
    # The caller may retry; a user should not wait for three attempts on a missing server.
    configuration.retries = 0
    file = kubeconfig or kubeconfig_files()
    try:
        if kubeconfig is None and not has_kubeconfig() and is_in_cluster():
            kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return ApiServer(configuration, "in cluster", NAMESPACE_FILE.read_text(encoding="utf-8").strip())
        kube_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(file), context=context, client_configuration=configuration, persist_config=False
        )
        known, current = kube_config.list_kube_config_contexts(str(file))  # type: ignore[no-untyped-call]
    except Exception as error:  # the loader raises any exception of its YAML parser, helper programs or files
        raise UserError(f"can't log in to a cluster by {file}: {_reason(error)}", USAGE_EXIT_CODE) from error
    chosen = next((one for one in known if one["name"] == context), current)
    return ApiServer(configuration, chosen["name"], chosen["context"].get("namespace") or "default")


def _message(body: bytes) -> str:
    """The message of a Status object, else the start of the text."""
    try:
        return str(json.loads(body)["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return " ".join(body[:300].decode(errors="replace").split()) or "no words"


def _reason(error: Exception) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__
