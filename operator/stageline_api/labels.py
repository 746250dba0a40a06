"""Label and annotation keys that Stageline sets on objects. Code reads these and never parses names."""

from typing import Final

MODEL: Final = "stageline.dev/model"
GROUP: Final = "stageline.dev/group"
STAGE: Final = "stageline.dev/stage"
REVISION: Final = "stageline.dev/revision"
INCARNATION: Final = "stageline.dev/incarnation"

RESTART: Final = "stageline.dev/restart"
"""Annotation of a PipelineModel: a new value retries its failed groups."""
APPLIED_HASH: Final = "stageline.dev/applied-hash"
"""Annotation of an object created by the operator: hash of its manifest."""
TLS_NAME: Final = "stageline.dev/tls-name"
"""Annotation of a stage's pod: its engine speaks HTTPS with a certificate for this DNS name."""

APP_NAME: Final = "app.kubernetes.io/name"
APP_INSTANCE: Final = "app.kubernetes.io/instance"
APP_COMPONENT: Final = "app.kubernetes.io/component"
APP_PART_OF: Final = "app.kubernetes.io/part-of"
APP_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
APP_VERSION: Final = "app.kubernetes.io/version"
