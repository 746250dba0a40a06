"""Mount paths in text become local paths, as whole paths only."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_local.node.container_command import expand, resolve_service_names
from stageline_local.node.mounts import MissingObjectError, PathRewriter

REWRITER = PathRewriter({"/tmp": Path("/s/tmp"), "/etc/app": Path("/s/app"), "/etc/app/sub": Path("/s/other")})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/etc/app", "/s/app"),
        ("/etc/app/config.json", "/s/app/config.json"),
        ("--config=/etc/app/x --tmp=/tmp", "--config=/s/app/x --tmp=/s/tmp"),
        ("/etc/app/sub/y", "/s/other/y"),
        ("/etc/application", "/etc/application"),
        ("/etc/app.d", "/etc/app.d"),
        ("/var/tmp", "/var/tmp"),
        ("file:///tmp/model", "file:///tmp/model"),
        ('{"cache_dir": "/tmp"}', '{"cache_dir": "/s/tmp"}'),
        ("a:/tmp:/etc/app", "a:/s/tmp:/s/app"),
    ],
)
def test_whole_paths_are_rewritten_and_nothing_else(text: str, expected: str) -> None:
    assert REWRITER.rewrite(text) == expected


def test_replaced_text_is_not_looked_at_again() -> None:
    rewriter = PathRewriter({"/tmp": Path("/etc/app/t"), "/etc/app": Path("/tmp/a")})
    assert rewriter.rewrite("/tmp /etc/app") == "/etc/app/t /tmp/a"


@given(st.text())
def test_without_mounts_text_stays_as_it_is(text: str) -> None:
    assert PathRewriter({}).rewrite(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("$(A)/x", "1/x"), ("$(B)", "$(B)"), ("$$(A)", "$(A)"), ("$$$$", "$$"), ("$A", "$A"), ("100%$", "100%$")],
)
def test_references_expand_as_in_kubernetes(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


@given(st.text(alphabet="$()AB x"))
def test_an_escaped_text_expands_to_itself(text: str) -> None:
    assert expand(text.replace("$", "$$"), {"A": "1", "B": "2"}) == text


def test_headless_names_become_addresses_and_unknown_ones_are_missing() -> None:
    addresses = {"p-0.svc-stages.default": "127.1.2.3"}
    assert resolve_service_names("tcp://p-0.svc-stages.default.svc:29500", addresses) == "tcp://127.1.2.3:29500"
    assert resolve_service_names("p-0.svc-stages.default.svc.cluster.local", addresses) == "127.1.2.3"
    with pytest.raises(MissingObjectError, match=r"p-1\.svc-stages"):
        resolve_service_names("p-1.svc-stages.default.svc", addresses)
