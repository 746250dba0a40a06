"""Every variable of the pod contract is checked: missing or wrong, it is named with its value."""

import json
from pathlib import Path

import pytest

from stageline_api import env
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.contract import read_contract, read_engine_keys
from stageline_runtime.termination import RuntimeFailure

REQUIRED = (
    env.CONFIG,
    env.STAGE_INDEX,
    env.STAGE_COUNT,
    env.GROUP_INDEX,
    env.INCARNATION,
    env.POD_IP,
    env.MASTER_ADDR,
    env.BUS_TOKEN,
)
INTEGERS = (env.STAGE_INDEX, env.STAGE_COUNT, env.GROUP_INDEX, env.INCARNATION, env.MASTER_PORT, env.RENDEZVOUS_SECONDS)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A valid config file for two stages."""
    settings = RuntimeConfig(
        model_name="m", namespace="n", served_name="s", source="file:///m", cache_dir="/c", stage_count=2
    )
    path = tmp_path / "config.json"
    path.write_text(settings.model_dump_json())
    return path


@pytest.fixture
def environ(config: Path) -> dict[str, str]:
    """A valid contract."""
    return {
        env.CONFIG: str(config),
        env.STAGE_INDEX: "1",
        env.STAGE_COUNT: "2",
        env.GROUP_INDEX: "0",
        env.INCARNATION: "7",
        env.POD_IP: "127.0.0.2",
        env.MASTER_ADDR: "127.0.0.1",
        env.BUS_TOKEN: "very-secret",
    }


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(RuntimeFailure) as caught:
        read_contract(environ)
    assert caught.value.failure_class is FailureClass.BAD_CONFIG
    assert "very-secret" not in caught.value.detail
    return caught.value.detail


def test_a_whole_contract(environ: dict[str, str]) -> None:
    contract = read_contract(environ)
    assert (contract.stage, contract.stage_count, contract.incarnation, contract.master_port) == (1, 2, 7, 29500)
    assert read_contract(environ | {env.MASTER_PORT: "12345"}).master_port == 12345


def test_a_pod_waits_for_the_others_as_the_config_says_unless_its_own_variable_does(environ: dict[str, str]) -> None:
    assert read_contract(environ).meeting_seconds == 120
    assert read_contract(environ | {env.RENDEZVOUS_SECONDS: "1920"}).meeting_seconds == 1920


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named(environ: dict[str, str], name: str, value: str | None) -> None:
    del environ[name]
    if value is not None:
        environ[name] = value
    assert refusal(environ) == f"{name} is not set"


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["one", "1.5", "0x10", " "])
def test_a_number_that_is_none_is_named(environ: dict[str, str], name: str, value: str) -> None:
    assert refusal(environ | {name: value}) == f"{name}={value!r} is not an integer"


@pytest.mark.parametrize("value", ["-1", "2", "99"])
def test_a_stage_outside_the_group(environ: dict[str, str], value: str) -> None:
    assert refusal(environ | {env.STAGE_INDEX: value}) == f"{env.STAGE_INDEX}={value} is not between 0 and 1"


def test_a_stage_count_other_than_the_config_s(environ: dict[str, str]) -> None:
    assert refusal(environ | {env.STAGE_COUNT: "3"}) == f"{env.STAGE_COUNT}=3 differs from the config's stage_count 2"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stage_count": "two"}, "config.json: stage_count: "),
        ({"unheard_of": 1}, "config.json: unheard_of: "),
        ({"timeouts": {"step_seconds": "soon"}}, "config.json: timeouts.step_seconds: "),
    ],
)
def test_a_config_with_a_wrong_field(
    environ: dict[str, str], config: Path, change: dict[str, object], sentence: str
) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert refusal(environ).startswith(sentence)


def test_a_config_that_is_no_json(environ: dict[str, str], config: Path) -> None:
    config.write_text("{")
    assert refusal(environ).startswith("config.json: ")
    assert "JSON" in refusal(environ)


def test_a_config_that_is_not_there(environ: dict[str, str], config: Path) -> None:
    config.unlink()
    assert refusal(environ) == f"{env.CONFIG}: {config} can't be read: No such file or directory"


def test_a_config_that_is_not_text(environ: dict[str, str], config: Path) -> None:
    config.write_bytes(b"\xff\xfe\x00")
    assert refusal(environ).startswith("config.json: ")


KEY = "key-of-an-engine-0"


def test_an_engine_reads_its_keys_and_may_go_without_on_loopback_alone() -> None:
    assert read_engine_keys("10.0.3.7", {env.ENGINE_KEYS: KEY}) == (KEY,)
    assert read_engine_keys("127.64.0.9", {}) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "without keys an engine answers on loopback alone, not on 10.0.3.7"),
     ({env.ENGINE_KEYS: "\n"}, "STAGELINE_ENGINE_KEYS is not set"),
     ({env.ENGINE_KEYS: f"{KEY}\nshort"}, "STAGELINE_ENGINE_KEYS: key 2 must be 16 or more")],
)  # fmt: skip
def test_an_engine_that_anybody_could_ask_does_not_start(given: dict[str, str], words: str) -> None:
    with pytest.raises(RuntimeFailure, match=words) as caught:
        read_engine_keys("10.0.3.7", given)
    assert caught.value.failure_class is FailureClass.BAD_CONFIG
    assert "short" not in caught.value.detail
