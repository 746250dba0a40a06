"""Login of a process that runs an event loop: from a kubeconfig, or as the service account of its pod."""

import os
from pathlib import Path
from typing import Final

from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_kubernetes.places import has_kubeconfig, is_in_cluster, kubeconfig_files

_UNLIMITED: Final = 0


async def load_configuration(kubeconfig: Path | None = None, context: str | None = None) -> Configuration:
    """Address and credentials: the file given, else $KUBECONFIG, else the pod's service account, else ~/.kube/config.

    Raises:
        UserError: there is none, or it can't be read.
    """
    # Open watches hold a connection each: a limit would let them keep writes waiting.
    configuration = Configuration(connection_pool_maxsize=_UNLIMITED)
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


def _kubeconfig_file(kubeconfig: Path | None, context: str | None) -> str | None:
    """None means: as the pod's service account.

    A server in a pod is what its manifest makes it, so its account comes before a file in the home directory. For a
    person's command (`reader`) it is the other way round, as for kubectl.
    """
    if kubeconfig is not None:
        return str(kubeconfig)
    if not os.environ.get("KUBECONFIG") and context is None and (is_in_cluster() or not has_kubeconfig()):
        return None
    return kubeconfig_files()
