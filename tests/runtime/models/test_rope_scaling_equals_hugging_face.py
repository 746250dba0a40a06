"""Scaled rotary frequencies are Hugging Face's, number by number, and so are the tokens of models that have them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oracles.family_checks import MAX_TOKENS, PROMPTS, assert_equals_hugging_face, pipeline_tokens
from oracles.pipeline_checks import hugging_face_tokens
from oracles.tiny_models import write_tiny_mistral
from stageline_runtime.model_facts.model_config import UnsupportedModelError, model_config_from_dict
from stageline_runtime.models.rope_scaling import scaled_frequencies

HEAD = 32
SHORT, LONG = [1.0 + 0.1 * index for index in range(HEAD // 2)], [2.0 + 0.5 * index for index in range(HEAD // 2)]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn with all its options": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn with its amplitude": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 128,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def llama(scaling: dict[str, Any]) -> dict[str, Any]:
    """Fields of a small model."""
    return {
        "model_type": "llama",
        "hidden_size": 4 * HEAD,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10_000.0, **scaling},
    }


@pytest.mark.parametrize("longest", [100, 512, 2000])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_for_a_request_as_long_as_the_group_takes(name: str, longest: int) -> None:
    fields = llama(SCALINGS[name])
    actual, amplitude = scaled_frequencies(model_config_from_dict(fields, {}), longest)
    init = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]]
    expected, expected_amplitude = init(LlamaConfig(**fields), torch.device("cpu"), seq_len=longest)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert amplitude == pytest.approx(expected_amplitude, rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn"])
def test_greedy_tokens_are_hugging_faces(name: str, tmp_path: Path) -> None:
    scaling = {"rope_theta": 10_000.0, **SCALINGS[name]}
    assert_equals_hugging_face(write_tiny_mistral(tmp_path, rope_parameters=scaling), stage_counts=(2,))


@pytest.mark.parametrize(("trained", "factors"), [(256, SHORT), (64, LONG)], ids=["within", "beyond"])
def test_longrope_says_hugging_faces_tokens_with_one_rotation_for_all(
    trained: int, factors: list[float], tmp_path: Path
) -> None:
    """The pipeline takes 160 positions. Hugging Face is given the factors that then hold for both kinds of request."""
    scaling = {"rope_theta": 10_000.0, **SCALINGS["longrope"], "original_max_position_embeddings": trained}
    ours = write_tiny_mistral(tmp_path / "ours", head_dim=HEAD, rope_parameters=scaling)
    steady = scaling | {"short_factor": factors, "long_factor": factors}
    theirs = write_tiny_mistral(tmp_path / "theirs", head_dim=HEAD, rope_parameters=steady)
    expected = hugging_face_tokens(theirs, PROMPTS, MAX_TOKENS)
    plain = write_tiny_mistral(tmp_path / "plain", head_dim=HEAD)
    assert hugging_face_tokens(plain, PROMPTS, MAX_TOKENS) != expected, "the rotation changes nothing"
    assert pipeline_tokens(ours, 2) == expected


def test_yarn_stretches_the_context_that_was_trained() -> None:
    fields = llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert model_config_from_dict(fields, {}).context_length == 2048
    assert model_config_from_dict(llama(SCALINGS["linear"]), {}).context_length == 512


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "yarn"}, "factor must be a number above 0, not 0.0"),
        ({"rope_type": "linear", "factor": -1}, "factor must be a number above 0, not -1"),
        ({"rope_type": "longrope", "short_factor": SHORT}, "long_factor must be a list of numbers, not None"),
        (
            {"rope_type": "longrope", "short_factor": SHORT[:3], "long_factor": LONG},
            "short_factor has 3 numbers; heads",
        ),
        (
            {"rope_type": "longrope", "short_factor": ["x"], "long_factor": LONG},
            "short_factor must be a number above 0",
        ),
        (
            {"rope_type": "proportional"},
            "rope_type 'proportional' is not supported; supported: default, dynamic, linear",
        ),
    ],
)
def test_a_scaling_that_lacks_something_is_refused(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        model_config_from_dict(llama(scaling), {})
    assert words in str(refusal.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TRAINED = "original_max_position_embeddings"
TWO_PLACES: dict[str, dict[str, Any]] = {
    "both names": {"rope_parameters": DEFAULT, "rope_scaling": YARN},
    "both names, and a base of its own": {"rope_parameters": DEFAULT, "rope_scaling": YARN | {"rope_theta": 5e5}},
    "an empty older name": {"rope_parameters": YARN, "rope_scaling": {}},
    "two bases": {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_theta": 1e6},
    "a base on top": {"rope_parameters": YARN, "rope_theta": 1e6},
    "two words for the type": {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
    "llama3 without what it was trained with": {"rope_scaling": LLAMA3},
    "two contexts that yarn was trained with": {"rope_parameters": YARN, _TRAINED: 64},
    "one on top": {"rope_scaling": LLAMA3, _TRAINED: 64},
    "two contexts that longrope was trained with": {
        "rope_scaling": {**SCALINGS["longrope"], _TRAINED: 256},
        _TRAINED: 64,
    },
    "one on top that linear scaling has no use for": {"rope_scaling": {"type": "linear", "factor": 2.0}, _TRAINED: 64},
}


@pytest.mark.parametrize("name", TWO_PLACES)
def test_of_two_places_the_one_counts_that_transformers_believes(name: str) -> None:
    fields = llama({}) | {"rope_parameters": None} | copy.deepcopy(TWO_PLACES[name])
    ours = model_config_from_dict(copy.deepcopy(fields), {})
    theirs = LlamaConfig(**fields)
    parameters: Any = theirs.rope_parameters
    actual, amplitude = scaled_frequencies(ours, 512)
    expected, expected_amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        theirs, torch.device("cpu"), seq_len=512
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert amplitude == pytest.approx(expected_amplitude, rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": DEFAULT | {"rope_theta": 1e6}, "rope_scaling": YARN}, "put rope_theta into rope_scaling"),
        ({"rope_parameters": {"full_attention": YARN}}, "by kind of layer"),
    ],
    ids=["a base that nobody reads", "one for each kind of layer"],
)
def test_rotary_parameters_that_would_be_lost_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        model_config_from_dict(llama({}) | fields, {})
