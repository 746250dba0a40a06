"""Secrets are found by their place and by their form, and ordinary words stay."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_cli.on_call.bundle.redaction import REDACTED, Redactor, is_secret_name, redact_object, secret_values

SECRET = 'pl4nted/"sécret"+value'


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "OPENAI_API_KEY",
            "apiKey",
            "dbPassword",
            "AWS_SECRET_ACCESS_KEY",
            "x-api-key",
            "example.com/token",
        ),
        *(
            "PGPASSWORD",
            "MYSQL_PWD",
            "DB_PASS",
            "STORAGE_ACCOUNT_KEY",
            "SSH_KEY",
            "HFTOKEN",
            "API_TOKENS",
            "LDAP_BINDPW",
        ),
        *("AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "tokens_per_second",
        "kv_tokens",
        "tokenSecretRef",
        "monkey",
        "author",
        "NCCL_DEBUG",
        "keys",
        "path",
        "key",
        "topologyKey",
        "PWD",
        "MAX_NUM_BATCHED_TOKENS",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


OBJECTS = (
    {"env": [{"name": "HF_TOKEN", "value": SECRET}]},
    {"data": {"spec.json": json.dumps({"template": {"env": [{"name": "MY_API_KEY", "value": SECRET}]}})}},
    {"args": ["serve", "--hub-token", SECRET]},
    {"args": [f"--api-key={SECRET}"]},
    {"annotations": {"example.com/token": SECRET}},
    [{"deep": {"password": SECRET}}],
)


@pytest.mark.parametrize("found", OBJECTS)
def test_a_secret_in_its_place_is_found_and_blanked(found: object) -> None:
    assert list(secret_values(found)) == [SECRET]
    redacted = json.dumps(redact_object(found), ensure_ascii=False)
    assert "pl4nted" not in redacted, redacted
    assert REDACTED in redacted


def test_of_variables_only_those_known_to_be_harmless_are_shown() -> None:
    env = [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "WORKERS", "value": "4"},
        {"name": "SOMEBODYS_OWN", "value": SECRET},
    ]
    for spelled in (env, {each["name"]: each["value"] for each in env}):
        redacted = json.dumps(redact_object({"env": spelled}), ensure_ascii=False)
        assert "pl4nted" not in redacted, redacted
        assert "INFO" in redacted
        assert '"4"' in redacted


@pytest.mark.parametrize(
    "line",
    [
        "GET https://blob.example/x?sv=1&sig=pl4nted%3D&se=2",
        "GET https://s3.example/x?X-Amz-Signature=pl4nted",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=pl4nted==;EndpointSuffix=x",
        "curl -u admin:pl4nted https://x",
        "DB_PASS=pl4nted PGPASSWORD=pl4nted SSH_KEY=pl4nted psql",
        "postgres://admin:pl4n@pl4nted@db/x",
        "password: two pl4nted words",
    ],
)
def test_secrets_in_lines_of_logs_are_blanked(line: str) -> None:
    redacted = Redactor([]).text(line)
    assert "pl4nted" not in redacted, redacted
    assert REDACTED in redacted


@pytest.mark.parametrize(
    "line",
    [
        "num_tokens=12 max_tokens=5",
        "pod pass=2 of 3",
        "user: admin -u 5",
        "monkey=banana key=value",
        "step 5: token 17 of slot 3",
    ],
)
def test_ordinary_lines_stay(line: str) -> None:
    assert Redactor([]).text(line) == line


def test_what_only_refers_to_a_secret_stays() -> None:
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub-token", "key": "token"}}}]
    assert redact_object({"env": env, "tokenSecretRef": {"name": "hub"}}) == {
        "env": env,
        "tokenSecretRef": {"name": "hub"},
    }


def test_fields_that_repeat_an_object_are_dropped() -> None:
    repeated = {"kubectl.kubernetes.io/last-applied-configuration": f'{{"value": "{SECRET}"}}', "kept": "yes"}
    assert redact_object({"metadata": {"annotations": repeated, "managedFields": [{}]}}) == {
        "metadata": {"annotations": {"kept": "yes"}}
    }


@given(st.text(min_size=6, max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_a_known_value_is_gone_however_it_is_written(secret: str, before: str, after: str) -> None:
    redactor = Redactor([secret])
    for spelled in (secret, json.dumps(secret)[1:-1]):
        assert spelled not in redactor.text(before + spelled + after).replace(REDACTED, "\0\0") or spelled in REDACTED


def test_a_known_value_is_gone_in_base64_too() -> None:
    encoded = base64.b64encode(SECRET.encode()).decode()
    assert encoded.rstrip("=") not in Redactor([SECRET]).text(f"data: {encoded}")


LINES = (
    "Authorization: Bearer abc.def-123",
    '"authorization": "Basic dXNlcjpwYXNz"',
    "curl -H 'authorization: token s3cr3tvalue' http://x",
    "headers={'Authorization': 'Bearer s3cr3tvalue'}",
    "api_key=s3cr3tvalue&model=tiny",
    '{"api_key": "s3cr3tvalue"}',
    "STAGELINE_BUS_TOKEN=s3cr3tvalue",
    "--hf-token s3cr3tvalue",
    "X-Api-Key: s3cr3tvalue",
    "Cookie: session=s3cr3tvalue; theme=dark",
    '{"msg": "login", "token": "s3cr3tvalue"}',
    "https://user:s3cr3tvalue@proxy.example:3128/",
    "using hf_abcdefghijklmnopqrstuv",
    "key sk-proj-abcdefghijklmnop",
    "jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----",
    "AKIAABCDEFGHIJKLMNOP",
)
REMAINS = ("abc.def-123", "dXNlcjpwYXNz", "s3cr3tvalue", "hf_abc", "sk-proj", "eyJ", "MIIEabc", "AKIA")


@pytest.mark.parametrize("line", LINES)
def test_what_looks_like_a_secret_is_blanked_anywhere(line: str) -> None:
    shown = Redactor([]).text(f"2026-11-21 INFO {line} and so on")
    assert REDACTED in shown
    assert not [each for each in REMAINS if each in shown], shown


@pytest.mark.parametrize(
    "line",
    [
        "loaded layers 2-3, waiting for the first plan",
        'stageline_generation_tokens_total{model_name="tiny"} 639.0',
        '{"prompt_tokens_total": 12, "tokens_per_second": 3.5}',
        "token_ids: [1, 2, 3]",
        "http://127.0.0.1:8000/status",
        "the scheduler's words: 0/3 nodes are available",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert Redactor(["a secret value"]).text(line) == line
