"""Kinds of objects and their API paths."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ApiResource:
    """One kind of object."""

    kind: str
    group: str
    version: str
    plural: str
    namespaced: bool = field(default=True, kw_only=True)

    @property
    def api_version(self) -> str:
        """`apiVersion` as in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of one object, or of the collection; an empty namespace means all of them."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{place}/{self.plural}" + "".join(f"/{part}" for part in (name, subresource) if part)
