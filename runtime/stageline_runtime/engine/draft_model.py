"""The last stage's draft model: its directory, its config, and whether it shares the model's vocabulary.

A draft is a token id, so an id must mean the same token in both models. The tokenizers' vocabularies are compared
whole, since a difference would show only as rejected drafts. The rest may differ: family, sizes, vocabulary
padding, context length (beyond its own it makes no drafts).
"""

from pathlib import Path

from stageline_api.errors import UserError
from stageline_api.failures import FailureClass
from stageline_api.resource.field_problem import show_value
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.engine.group.welcome import DraftModel
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.model_facts.model_config import UnsupportedModelError, read_model_config, require_sizes
from stageline_runtime.prepare.cache import prepared_model_dir
from stageline_runtime.termination import RuntimeFailure

FIELD = "spec.engine.speculative.draft.source"


def read_draft_model(config: RuntimeConfig, model_dir: Path) -> DraftModel | None:
    """The draft model of a group with its main model in `model_dir`; None if the config names none.

    Raises:
        RuntimeFailure: class BadConfig, naming the field: it can't be read or run, or it has another vocabulary.
    """
    source = None if config.speculative is None else config.speculative.draft_source
    if source is None:
        return None
    try:
        directory = prepared_model_dir(source, Path(config.cache_dir))
        draft = DraftModel(directory, require_sizes(read_model_config(directory)))
    except (UserError, UnsupportedModelError, ValueError) as error:
        raise _refused(source, f"can't be a draft model: {error}") from error
    difference = _difference(EngineTokenizer.load(model_dir), EngineTokenizer.load(directory))
    if difference is not None:
        raise _refused(source, f"has another vocabulary than the model: {difference}")
    return draft


def _difference(model: EngineTokenizer, draft: EngineTokenizer) -> str | None:
    """A token that only one of them has, or that they number otherwise."""
    mine, other = model.vocabulary(), draft.vocabulary()
    for token, index in sorted(mine.items() - other.items(), key=lambda item: item[1]):
        found = other.get(token)
        return f"token {show_value(token)} is {index}, and {'missing' if found is None else found} in the draft model"
    return None


def _refused(source: str, detail: str) -> RuntimeFailure:
    return RuntimeFailure(FailureClass.BAD_CONFIG, f"{FIELD} {source}: {detail}", operation="read the draft model")
