"""The model's tokenizer: `tokenizer.json` and the tokens that only the files beside it have, as transformers loads it.

A token that is added here gets the next free id. Where the files number it otherwise, text would become other ids than
the model was trained with, so that is refused.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from stageline_runtime.model_facts.model_fields import UnsupportedModelError
from stageline_runtime.model_facts.tokenizer_files import (
    TOKENIZER_FILE,
    DeclaredToken,
    TokenizerSettings,
    read_tokenizer_settings,
)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load the tokenizer of the model in `model_dir`, complete.

    Raises:
        UnsupportedModelError: `tokenizer.json` is missing or no tokenizer, or the files beside it disagree with it.
    """
    path = model_dir / TOKENIZER_FILE
    if not path.exists():
        raise UnsupportedModelError(f"{path.name} is missing; only models with a fast tokenizer can be served")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedModelError(f"{path.name} is not a tokenizer: {error}") from error
    _complete(tokenizer, read_tokenizer_settings(model_dir))
    return tokenizer


def _complete(tokenizer: Tokenizer, settings: TokenizerSettings) -> None:
    named = frozenset(settings.special_tokens.values())
    have = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for token in settings.declared:
        own = have.get(token.content)
        if token.index is None and own is not None:
            # A name for a token makes it a special one, also where it was declared as another.
            if not own.special and token.content in named:
                own.special = True
                tokenizer.add_special_tokens([own])
            continue
        is_new = tokenizer.token_to_id(token.content) is None
        tokenizer.add_tokens([_as_added(token)])
        index = tokenizer.token_to_id(token.content)
        if is_new and token.index not in (None, index):
            raise UnsupportedModelError(
                f"{token.file_name} says that {token.content!r} has the id {token.index}, but {TOKENIZER_FILE} lacks "
                f"it and the next id there is {index}"
            )


def _as_added(token: DeclaredToken) -> AddedToken:
    return AddedToken(token.content, special=token.is_special, **(token.flags or {}))
