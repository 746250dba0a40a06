"""Removes secrets from everything that leaves this machine. Pure.

It works in two ways. By place: the value of a variable or field with a secret's name, in any object at any depth,
including JSON in strings. By form: anything in text that looks like a token, a password in a URL, an authorization
header or a private key. A value found by place is then removed from every other text, also if escaped or in base64.
"""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

REDACTED: Final = "[redacted]"
SHORTEST_SECRET: Final = 6
"""Shorter values are removed in their place but not from other texts, where they would match ordinary words."""

_SECRET_NAME: Final = re.compile(
    r"(?:^|[_\-./])(?:api[_\-]?key|access[_\-]?key|private[_\-]?key|secret|token|passwd|password|passphrase|"
    r"credential|credentials|authorization|auth|bearer|cookie|pat)s?(?:$|[_\-.])",
    re.IGNORECASE,
)
_SECRET_VARIABLE: Final = re.compile(
    r"(?:PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|PW|KEY|TOKENS?|SECRETS?|CREDENTIALS?|CONNECTION_?STRING|DSN|SIGNATURE)$"
)
"""For names in capitals, such as variables, the ending is enough: `PGPASSWORD`, `HFTOKEN`, `SSH_KEY`."""
_NOT_SECRET_VARIABLE: Final = re.compile(r"^(?:OLD)?PWD$|(?:^|_)(?:MAX|NUM)_.*TOKENS$")
_PLAIN_VARIABLE: Final = re.compile(
    r"^(?:STAGELINE|NCCL|GLOO|TORCH|TORCHINDUCTOR|TRITON|CUDA|NVIDIA|OMP|MKL|KMP|MALLOC|PYTHON|UVICORN|KUBERNETES)_\w+$"
    r"|^(?:PYTHON[A-Z]*|PATH|LD_LIBRARY_PATH|HOME|HOSTNAME|LANG|LC_\w+|TZ|TMPDIR|TERM|NO_PROXY|HTTPS?_PROXY|HF_HOME"
    r"|HF_ENDPOINT|HF_HUB_\w+|TRANSFORMERS_\w+|TOKENIZERS_PARALLELISM|POD_\w+|NODE_NAME)$"
)
"""Variables of a pod that are kept; the values of all others belong to the user and are removed."""
_PLAIN_VALUE: Final = re.compile(r"|true|false|-?\d{1,5}(?:\.\d+)?", re.IGNORECASE)
_NOT_SECRET: Final = re.compile(r"(?:^|[_-])tokens(?:$|[_-])|Ref$|Path$|_(?:path|file)$", re.IGNORECASE)
"""Counts of tokens, and names of places that contain a secret."""
_OPTION: Final = re.compile(r"--([\w-]+)=(.+)", re.DOTALL)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_DROPPED_FIELDS: Final = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})

_FORMS: Final = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(r"\b(?:hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[abprs])[_-][\w-]{10,}"),
    re.compile(r"\bsk-[\w-]{10,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
)
_AFTER_A_NAME: Final = (
    # Authorization: Bearer x; "authorization": "Basic x"; --header 'authorization: x'
    re.compile(
        r"(?i)(\b(?:proxy-)?authorization\b\\?[\"']?\s*[:=,]\s*\\?[\"']?(?:(?:bearer|basic|token|digest)\s+)?)([^\s\"'\\,;)\]}]+)"
    ),
    re.compile(r"(?i)(\b(?:set-)?cookie\\?[\"']?\s*[:=]\s*\\?[\"']?)([^\r\n\"']+)"),
    re.compile(r"(?i)(\bbearer\s+)([\w.~+/=-]{6,})"),
    # A password may have spaces: match to the end of its line or string.
    re.compile(r"(?i)((?:passwd|password|passphrase)\\?[\"']?\s*:\s*\\?[\"']?)([^\r\n\"',;)\]}]{3,})"),
    # token=x, api_key: x, "password": "x", --hf-token x; a longer name (tokens, token_ids) does not match.
    re.compile(
        r"(?i)((?:api[_-]?key|access[_-]?key|secret|token|passwd|password|passphrase)\\?[\"']?\s*[:=]\s*\\?[\"']?)(?!\[redacted)"
        r"([^\s\"'\\,;)\]}&]{3,})"
    ),
    re.compile(r"(?i)(--[\w-]*(?:api-key|access-key|secret|token|password)[ =])([^\s\"',\]]{3,})"),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@\"']*:)([^\s/\"']+)(?=@)"),
    # Variables as a shell or a log writes them: PGPASSWORD=x, SSH_KEY=x.
    re.compile(r"(\b[A-Z0-9_]*(?:PASS|PASSWD|PASSWORD|PWD|PW|KEY|TOKEN|SECRET|CREDENTIALS?)=[\"']?)([^\s\"',;]{3,})"),
    # Signed URLs and connection strings: ?sig=x, X-Amz-Signature=x, AccountKey=x.
    re.compile(r"(?i)(\b(?:sig|x-[a-z]+-signature|signature|accountkey|sharedaccesskey|pwd)=)([^\s&\"',;]{3,})"),
    # curl -u user:password
    re.compile(r"((?:^|\s)(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"']+:)([^\s\"']+)"),
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or field with this name contains a secret: `HF_TOKEN`, `apiKey`, `db.password`."""
    if name.isupper():
        if _NOT_SECRET_VARIABLE.search(name):
            return False
        if _SECRET_VARIABLE.search(name):
            return True
    spelled = _CAMEL.sub("_", name)
    return bool(_SECRET_NAME.search(spelled)) and not _NOT_SECRET.search(name)


def is_plain_variable(name: str, value: str) -> bool:
    """Whether a container's variable may be shown: a known variable without secrets, or a small number."""
    if is_secret_name(name):
        return False
    return bool(_PLAIN_VARIABLE.search(name) or _PLAIN_VALUE.fullmatch(value))


def secret_values(value: Any) -> Iterator[str]:
    """Every value in a secret's place, in objects of any depth."""
    match value:
        case Mapping():
            named = value.get("name")
            if isinstance(named, str) and isinstance(value.get("value"), str) and is_secret_name(named):
                yield value["value"]
            for name, each in value.items():
                if isinstance(each, str) and is_secret_name(str(name)):
                    yield each
                else:
                    yield from secret_values(each)
        case list() | tuple():
            for before, each in zip(["", *value], value, strict=False):
                if isinstance(each, str) and _names_a_secret(before):
                    yield each
                else:
                    yield from secret_values(each)
        case str() if (option := _OPTION.fullmatch(value)) is not None and is_secret_name(option[1]):
            yield option[2]
        case str() if (inner := _json_in(value)) is not None:
            yield from secret_values(inner)
        case _:
            pass


def redact_object(value: Any) -> Any:
    """The same object without the values in secrets' places, and without fields that repeat the whole object."""
    match value:
        case Mapping():
            named = value.get("name")
            hides = isinstance(named, str) and is_secret_name(named)
            return {
                name: REDACTED
                if isinstance(each, str) and each and ((hides and name == "value") or is_secret_name(str(name)))
                else redact_object(_plain_variables(each) if name == "env" else each)
                for name, each in value.items()
                if name not in _DROPPED_FIELDS
            }
        case list() | tuple():
            return [
                REDACTED if isinstance(each, str) and _names_a_secret(before) else redact_object(each)
                for before, each in zip(["", *value], value, strict=False)
            ]
        case str() if (option := _OPTION.fullmatch(value)) is not None and is_secret_name(option[1]):
            return f"--{option[1]}={REDACTED}"
        case str() if (inner := _json_in(value)) is not None:
            return json.dumps(redact_object(inner), indent=2)
        case _:
            return value


def _plain_variables(env: Any) -> Any:
    """The `env` of a container or a process with only the values that may be shown."""
    match env:
        case list() | tuple():
            return [
                {**each, "value": REDACTED}
                if isinstance(each, Mapping)
                and isinstance(each.get("value"), str)
                and not is_plain_variable(str(each.get("name")), each["value"])
                else each
                for each in env
            ]
        case Mapping():
            return {
                name: REDACTED if isinstance(each, str) and not is_plain_variable(str(name), each) else each
                for name, each in env.items()
            }
        case _:
            return env


class Redactor:
    """Holds the values that must not appear in any text."""

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values if len(value) >= SHORTEST_SECRET for form in _spellings(value)}
        # Longest first: one may be part of another.
        ordered = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str) -> str:
        """The text without known values and without anything that looks like a secret."""
        text = self.known(text)
        for form in _FORMS:
            text = form.sub(REDACTED, text)
        for form in _AFTER_A_NAME:
            text = form.sub(lambda found: found[1] + REDACTED, text)
        return text

    def known(self, text: str) -> str:
        """The text without known values; for large generated texts without user content."""
        return text if self._known is None else self._known.sub(REDACTED, text)


def _names_a_secret(word: Any) -> bool:
    """Whether the next word on a command line is a secret: `--hf-token`, but not `--token=x`."""
    return isinstance(word, str) and word.startswith("--") and "=" not in word and is_secret_name(word.lstrip("-"))


def _spellings(value: str) -> Iterator[str]:
    yield value
    yield json.dumps(value)[1:-1]
    yield quote(value, safe="")
    yield base64.b64encode(value.encode()).decode().rstrip("=")


def _json_in(text: str) -> Any:
    """The object in a JSON string; None if there is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        inner = json.loads(text)
    except ValueError:
        return None
    return inner if isinstance(inner, dict | list) else None
