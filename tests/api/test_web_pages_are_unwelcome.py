"""Who asks on a port without keys: machines by address, never a browser on behalf of some page."""

import pytest

from stageline_api.engine_access import is_of_this_machine, why_unwelcome


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.7:8100", "localhost", "localhost:8100", "a.localhost", "[::1]", "[fd00::7]:8100"],
)
def test_addresses_and_this_machine_are_no_names_of_others(host: str) -> None:
    assert is_of_this_machine(host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8100", "localhost.evil.example", "", "1.2.3.4.evil", "["]
)
def test_names_that_anybody_can_point_here_are(host: str) -> None:
    assert not is_of_this_machine(host)


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"origin": "http://evil.example"}, "web pages"),
        ({"origin": "null"}, "web pages"),
        ({"sec-fetch-site": "cross-site"}, "web pages"),
        ({"sec-fetch-site": "same-origin"}, "web pages"),
        ({"host": "evil.example:8100"}, "this port's address"),
        ({"content-type": "text/plain"}, "application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, "application/json"),
    ],
)
def test_what_a_page_can_send_is_refused(headers: dict[str, str], word: str) -> None:
    assert word in (why_unwelcome({"host": "127.0.0.1:8100"} | headers) or "")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json"},
        {"content-type": "Application/JSON; charset=utf-8"},
        {"sec-fetch-site": "none"},
        {"host": "10.1.2.3:8100", "user-agent": "Prometheus/3"},
    ],
)
def test_what_machines_send_is_taken(headers: dict[str, str]) -> None:
    assert why_unwelcome({"host": "127.0.0.1:8100"} | headers) is None


def test_a_port_with_a_name_of_its_own_is_asked_by_it() -> None:
    assert why_unwelcome({"host": "stageline-gateway-admin.ns.svc:9100"}, any_name=True) is None
