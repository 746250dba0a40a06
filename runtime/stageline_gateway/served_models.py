"""Which model a name means, where one gateway serves several namespaces. Pure.

`namespace/name` always means the model of that name in that namespace. A bare name means the only model that has it;
where several namespaces have one, none is preferred: the name alone means nobody's, whichever came first. A served name
may hold a slash itself; where it reads as another model's full name, that other model is meant.

Of several models of one bare name a caller gets the only one that its key opens; where that leaves several, the request
is refused with the names to choose from. A caller never learns of a model that it may not use.

On one machine there are no namespaces: the one there is has an empty name, and every name is a bare one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stageline_gateway.errors import model_ambiguous, model_not_found, not_ready


class KnownNames(Protocol):
    """What is known of one namespace."""

    ever_read: bool
    """Whether anything is: until then a name that isn't there may yet come."""
    first_seen: dict[str, int]
    """Everything that can be asked for there, models and adapters, by name."""


class ServedModel(NamedTuple):
    """One model, or adapter, that requests can ask for."""

    namespace: str
    """Of its PipelineModel; empty on one machine."""
    name: str
    """Its served name, which is its own within the namespace."""

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Caller(Protocol):
    """Whose request it is (`admission.keys`)."""

    @property
    def models(self) -> Set[str] | None:
        """What its key lists; None: everything."""

    def may_use(self, model: ServedModel, is_only_one: bool) -> bool:
        """Whether its key opens the model, which is the only one of its name or isn't."""

    def check_name(self, asked: str, names: Collection[str]) -> None:
        """Raise ApiError 403 for a name that is not for this caller."""


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Everything that a gateway serves. `known` is by namespace, in the order in which models are listed."""

    known: Mapping[str, KnownNames]

    @property
    def all_read(self) -> bool:
        """Whether every namespace has been read once: a name that means nothing then is served nowhere."""
        return all(one.ever_read for one in self.known.values())

    def meant_by(self, asked: str) -> tuple[ServedModel, ...]:
        """The models that `asked` may mean: none, one, or those of one bare name."""
        namespace, slash, name = asked.partition("/")
        if slash and namespace and self._has(namespace, name):
            return (ServedModel(namespace, name),)
        return tuple(ServedModel(each, asked) for each in self.known if self._has(each, asked))

    def asked_by(self, caller: Caller, asked: str, retry_after_seconds: float) -> ServedModel:
        """The model that `caller` gets by the name `asked`.

        Raises:
            ApiError: 400, several models have the name; 403, the caller may not use it, whether or not it exists; 404,
                it isn't served; 503, it isn't known yet what is served.
        """
        meant = self.meant_by(asked)
        opened = self.opened_to(caller, meant)
        if len(opened) == 1:
            return opened[0]
        if opened:
            raise model_ambiguous(asked, [model.full_name for model in opened])
        caller.check_name(asked, {model.name for model in meant})
        if not self.all_read:
            raise not_ready("The gateway has not learned yet which models are served.", retry_after_seconds)
        raise model_not_found(asked)

    def opened_to(self, caller: Caller, models: Sequence[ServedModel]) -> Sequence[ServedModel]:
        """Those that `caller` may use. A bare name in a key's list opens what it means, none while that is several."""
        if caller.models is None:
            return models
        return [model for model in models if caller.may_use(model, self.meant_by(model.name) == (model,))]

    def listed(self) -> Iterator[ServedModel]:
        for namespace, known in self.known.items():
            for name in known.first_seen:
                yield ServedModel(namespace, name)

    def id_of(self, model: ServedModel) -> str:
        """The shortest name that means this model and no other."""
        return model.name if self.meant_by(model.name) == (model,) else model.full_name

    def _has(self, namespace: str, name: str) -> bool:
        return namespace in self.known and name in self.known[namespace].first_seen
