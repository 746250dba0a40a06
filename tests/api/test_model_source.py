"""Source strings: what they mean, that a canonical string reads back as itself, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.resource.serving.model_source import (
    PATTERNS,
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    ModelSource,
    PackageSource,
    SourceError,
    parse_source,
)

_SEGMENT = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,12}", fullmatch=True)
_HUB_NAME = st.from_regex(r"[A-Za-z0-9]([._-]?[A-Za-z0-9]){0,8}", fullmatch=True)
_SOURCES: st.SearchStrategy[ModelSource] = st.one_of(
    st.builds(lambda parts: FileSource("/" + "/".join(parts)), st.lists(_SEGMENT, min_size=1, max_size=4)),
    st.builds(
        lambda org, name, revision: HubSource(f"{org}/{name}", revision),
        _HUB_NAME,
        _HUB_NAME,
        st.none() | st.builds("/".join, st.lists(_HUB_NAME, min_size=1, max_size=3)),
    ),
    st.builds(
        lambda name, version, parts: PackageSource(name, version, "/".join(parts) + ".gguf"),
        st.from_regex(r"[a-z0-9]([-]?[a-z0-9]){0,8}", fullmatch=True),
        st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}(rc1|\+cpu)?", fullmatch=True),
        st.lists(_SEGMENT, min_size=1, max_size=3),
    ),
    st.builds(
        lambda claim, parts: ClaimSource(claim, "/".join(parts)),
        st.from_regex(r"[a-z0-9]([-.]?[a-z0-9]){0,8}", fullmatch=True),
        st.lists(_SEGMENT, max_size=3),
    ),
    st.builds(
        lambda parts, tag: ImageSource("/".join(parts) + tag),
        st.lists(_HUB_NAME, min_size=1, max_size=3),
        st.sampled_from(["", ":1", f"@sha256:{'0' * 64}"]),
    ),
)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("file:///models/smollm2/", FileSource("/models/smollm2")),
        ("hf://org/name", HubSource("org/name", None)),
        ("hf://org/name@refs/pr/3", HubSource("org/name", "refs/pr/3")),
        ("pypi://LLM_Smol==0.1.2/Model.Q4_1.gguf", PackageSource("llm-smol", "0.1.2", "Model.Q4_1.gguf")),
        ("pvc://models/smollm2/", ClaimSource("models", "smollm2")),
        ("pvc://models", ClaimSource("models", "")),
        ("oci://registry.dev:5000/m/smollm2:1", ImageSource("registry.dev:5000/m/smollm2:1")),
        ("pypi://a==1/pkg/data/m.gguf", PackageSource("a", "1", "pkg/data/m.gguf")),
    ],
)
def test_a_source_string_is_read(text: str, source: ModelSource) -> None:
    assert parse_source(text) == source


@given(_SOURCES)
def test_a_canonical_source_reads_back_as_itself(source: ModelSource) -> None:
    assert parse_source(source.canonical) == source


@given(_SOURCES)
def test_what_the_parser_takes_the_api_server_takes(source: ModelSource) -> None:
    assert any(re.search(pattern, source.canonical) for pattern in PATTERNS), source.canonical


@given(
    st.text(max_size=60) | st.builds("{}://{}".format, st.sampled_from(["file", "hf", "pypi", "pvc", "oci"]), st.text())
)
def test_any_text_is_read_or_refused_as_a_source_error(text: str) -> None:
    try:
        source = parse_source(text)
    except SourceError:
        return
    assert parse_source(source.canonical) == source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("smollm2", "must start with file://, hf://, pypi://, pvc:// or oci://"),
        ("oci://", "oci:// needs an image"),
        ("oci://image:tag:tag", "oci:// needs an image"),
        ("pvc:///dir", "pvc:// needs a claim"),
        ("pvc://Claim/dir", "pvc:// needs a claim"),
        ("pvc://claim/../dir", "without dots"),
        ("s3://bucket/x", "unknown scheme s3://"),
        ("file://models/x", "three slashes"),
        ("file:////x", "three slashes"),
        ("file:///", "below the root"),
        ("file:///a/../b", 'may not have an empty, "." or ".." segment'),
        ("file:///a b", "spaces"),
        ("hf://gpt2", 'org/name, not "gpt2"'),
        ("hf://a/b/c", 'org/name, not "a/b/c"'),
        ("hf://org/na--me", 'may not contain ".." or "--"'),
        ("hf://org/name@", 'after "@", not ""'),
        ("hf://org/name@a/../b", "segment"),
        ("pypi://dist/m.gguf", "exact version"),
        ("pypi://dist>=1/m.gguf", "exact version"),
        ("pypi://==1/m.gguf", "distribution name"),
        ("pypi://dist==1", "needs a file"),
        ("pypi://dist==1/../m.gguf", "segment"),
        ("pypi://dist==1/m.bin", "ends in .gguf"),
        ("pypi://dist==1/m.gguf?x=1", "may hold only"),
        ("hf://org/" + "x" * 1024, "at most 1024 characters"),
    ],
)
def test_a_malformed_source_is_refused_by_the_part_that_is_wrong(text: str, words: str) -> None:
    with pytest.raises(SourceError, match=re.escape(words)):
        parse_source(text)
