"""Login of a process with an event loop: from a kubeconfig, or as its pod's service account."""

import os
from pathlib import Path
from typing import Final

from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_kubernetes.places import has_kubeconfig, is_in_cluster, kubeconfig_files

_UNLIMITED: Final = 0


async def load_configuration(kubeconfig: Path | None = None, context: str | None = None) -> Configuration:
    """Address and credentials: the given file, else $KUBECONFIG, else the pod's service account, else ~/.kube/config.

    Raises:
        UserError: there is none, or it can't be read.
    """
    # Each open watch holds a connection: a limit would make writes wait for them.
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
        # The loader raises any exception of its YAML parser, helper programs or files.
        raise UserError(f"can't log in to a cluster with {where}: {error}", USAGE_EXIT_CODE) from error
    return configuration


def _kubeconfig_file(kubeconfig: Path | None, context: str | None) -> str | None:
    """None: use the pod's service account.

    A server's manifest determines its login, so its account precedes a file in the home directory. For a user's command
    (`reader`) the order is reversed, as in kubectl.
    """
    if kubeconfig is not None:
        return str(kubeconfig)
    if not os.environ.get("KUBECONFIG") and context is None and (is_in_cluster() or not has_kubeconfig()):
        return None
    return kubeconfig_files()
