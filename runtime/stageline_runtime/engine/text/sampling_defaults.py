"""Sampling defaults from a model's `generation_config.json`, for requests that set none.

Fields and their meaning are those of Hugging Face's `GenerationConfig`, and the choice among them is vLLM's
(`--generation-config auto`): `do_sample` and lists of suppressed tokens are ignored. Client-supplied values always
take precedence. A value that no request could have is refused when the engine starts, never ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stageline_api.engine_http import SamplingParams
from stageline_api.failures import FailureClass
from stageline_runtime.model_facts.model_fields import read_json
from stageline_runtime.termination import RuntimeFailure

FILE: Final = "generation_config.json"
_FIELDS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Hugging Face's name of each, and the request's."""


def read_sampling_defaults(model_dir: Path) -> SamplingParams:
    """Those of the model in `model_dir`: None wherever it says nothing.

    Raises:
        RuntimeFailure: class ModelLoad, naming the file, the field and the value that no request may have.
    """
    path = model_dir / FILE
    found = read_json(path) if path.exists() else {}
    values = {ours: _checked(theirs, ours, found[theirs]) for theirs, ours in _FIELDS.items() if theirs in found}
    return SamplingParams(**values)


def _checked(theirs: str, ours: str, value: Any) -> Any:
    # Both stand for "off" in Hugging Face's files.
    given = 0 if ours == "top_k" and value == -1 else value
    try:
        return getattr(msgspec.convert({ours: given}, SamplingParams), ours)
    except msgspec.ValidationError as error:
        rule, _, _ = str(error).partition(" - at ")
        detail = f"{FILE}: {theirs} is {value!r}: {rule}; spec.engine.generationConfig none leaves the file aside"
        raise RuntimeFailure(FailureClass.MODEL_LOAD, detail, operation="read the sampling defaults") from error
