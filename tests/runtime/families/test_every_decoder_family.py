"""Each family of transformers' decoders is either served, token for token, or refused by a sentence that is true."""

import re
from pathlib import Path
from typing import Any

import pytest

from oracles.decoder_families import ServedBy, default_config, judged, write_tiny
from oracles.families_page import PAGE, names_on_the_page, page
from oracles.family_checks import assert_equals_hugging_face
from stageline_runtime.model_facts.model_config import read_model_config

SERVED, REFUSED = names_on_the_page()
BY_NAME_ALONE = {"dots1": "mixtures of experts", "granite_swa": "attention sinks", "hrm_text": "run several times"}
"""Families whose reason no field shows: what the refusal has to name."""


def test_the_page_says_what_the_code_does() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make generate"


@pytest.mark.soak
@pytest.mark.parametrize("name", SERVED)
def test_a_family_that_is_served_says_what_hugging_face_says(name: str, tmp_path: Path) -> None:
    family = judged(name)
    model_dir = write_tiny(family.name, tmp_path)
    config = read_model_config(model_dir)
    assert (config.architecture, config.is_covered) == (family.name, family.path is ServedBy.COVERAGE)
    assert_equals_hugging_face(model_dir, stage_counts=(2,))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_true(name: str) -> None:
    family = judged(name)
    assert family.path is ServedBy.REFUSED
    fields = default_config(family.name)
    if family.name in BY_NAME_ALONE:
        assert family.reason.startswith(f"model_type '{family.name}' is not supported: ")
        assert BY_NAME_ALONE[family.name] in family.reason
    elif "base_model_pp_plan" in family.reason:
        assert not has_plan(family.name), family
    elif told := re.match(r"config\.json has (\w+):", family.reason):
        assert fields[told[1]], family
    elif told := re.match(r"layer_types '(\w+)' is not supported", family.reason):
        assert told[1] in fields["layer_types"], family
    elif told := re.match(r"(\w+) (\S+) (of model_type '\S+' )?is not supported", family.reason):
        assert said(fields[told[1]]) == told[2], family
    else:
        raise AssertionError(f"no test knows how to hold this against the config: {family}")


def test_a_model_of_deepseek_is_pointed_to_the_engine_that_runs_it() -> None:
    found = {name: judged(name).reason for name in REFUSED if name.startswith("deepseek")}
    assert {"deepseek_v2", "deepseek_v3"} < found.keys()
    assert [name for name, reason in found.items() if not reason.endswith("serve it with engine.name: vllm")] == []


def said(value: Any) -> str:
    return repr(value) if not isinstance(value, bool) else str(value).lower()


def has_plan(name: str) -> bool:
    """Whether transformers itself says where the family's model can be cut."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return bool(CONFIG_MAPPING[name].base_model_pp_plan)
