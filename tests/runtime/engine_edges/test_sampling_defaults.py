"""What a model's `generation_config.json` says of sampling holds where a request says nothing, and nowhere else."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import GenerationConfig

from oracles.tiny_models import write_tiny_llama
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt
from stageline_runtime.engine.text.prompts import NO_DEFAULTS, PromptReader
from stageline_runtime.engine.text.sampling_defaults import FILE, read_sampling_defaults
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.termination import RuntimeFailure

QWEN: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def read(directory: Path, **values: Any) -> SamplingParams:
    (directory / FILE).write_text(json.dumps(values))
    return read_sampling_defaults(directory)


def admitted(defaults: SamplingParams, directory: Path, room: int = 64, **given: Any) -> Any:
    """A request as the engine's core gets it; `room` tokens are the model's context."""
    reader = PromptReader.load(
        write_tiny_llama(directory / "model"),
        vocab_size=512,
        max_model_len=room,
        eos_token_ids=(2,),
        sampling_defaults=defaults,
    )
    request = GenerateRequest(request_id="r", prompt=TokenPrompt(token_ids=(5, 6, 7)), sampling=SamplingParams(**given))
    # As it goes from the gateway to the engine.
    return reader.read(GenerateRequest.from_json(request.to_json()))


def test_what_hugging_face_wrote_is_read(tmp_path: Path) -> None:
    written = GenerationConfig(do_sample=True, eos_token_id=2, max_new_tokens=128, min_p=0.05, **QWEN)  # type: ignore[no-untyped-call]
    written.save_pretrained(tmp_path)
    found = read_sampling_defaults(tmp_path)
    assert msgspec.to_builtins(found) == {**QWEN, "min_p": 0.05, "max_tokens": 128}


def test_a_request_that_says_nothing_gets_the_models_values(tmp_path: Path) -> None:
    got = admitted(read(tmp_path, **QWEN, max_new_tokens=20), tmp_path)
    assert got.sampling == RequestSampling(**QWEN, num_prompt_tokens=3)
    assert got.max_new_tokens == 20


def test_what_a_client_gives_goes_before_also_where_it_turns_something_off(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 30,
    }
    got = admitted(read(tmp_path, **QWEN, min_p=0.2, max_new_tokens=20), tmp_path, **given)
    assert got.sampling == RequestSampling(num_prompt_tokens=3)
    assert got.max_new_tokens == 30


@pytest.mark.parametrize("values", [{}, {"eos_token_id": 2, "do_sample": False, "suppress_tokens": [3]}])
def test_a_model_that_says_nothing_changes_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    assert admitted(read(tmp_path, **values), tmp_path).sampling == RequestSampling(num_prompt_tokens=3)


def test_without_the_file_or_when_it_is_left_aside_nothing_changes(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == NO_DEFAULTS
    assert admitted(NO_DEFAULTS, tmp_path).sampling == RequestSampling(num_prompt_tokens=3)


def test_a_default_length_longer_than_the_room_is_the_room(tmp_path: Path) -> None:
    """It is not the client's, so it is no reason to refuse the request."""
    assert admitted(read(tmp_path, max_new_tokens=2048), tmp_path, room=40).max_new_tokens == 37


def test_what_stands_for_off_in_hugging_faces_files_is_off(tmp_path: Path) -> None:
    assert read(tmp_path, top_k=-1, temperature=None) == SamplingParams(top_k=0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 9.5}, "temperature is 9.5: Expected `float` <= 2.0"),
        ({"top_p": 0}, "top_p is 0: Expected `float` > 0.0"),
        ({"top_k": "many"}, "top_k is 'many': Expected `int | null`, got `str`"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: Expected `int` >= 1"),
    ],
)
def test_a_value_that_no_request_may_have_is_refused_by_name(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeFailure) as refused:
        read(tmp_path, **values)
    assert f"{FILE}: {words}" in str(refused.value)
    assert "spec.engine.generationConfig none leaves the file aside" in str(refused.value)


def test_a_field_that_is_not_given_is_not_written() -> None:
    """An engine of an earlier version takes what is missing for its default, and would refuse a null."""
    written = json.loads(SamplingParams(temperature=0.5).to_json())
    assert written["temperature"] == 0.5
    assert not {"top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "json_schema"} & set(written)
    assert msgspec.convert(written, SamplingParams) == SamplingParams(temperature=0.5)
