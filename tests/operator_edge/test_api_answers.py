"""What the API server may answer, read into: try again, after how long, or tell a person; never a secret."""

import pytest

from stageline_kubernetes.errors import error_of


@pytest.mark.parametrize(
    ("status", "is_passing"),
    [
        (0, True),
        (408, True),
        (429, True),
        (500, True),
        (503, True),
        (504, True),
        (400, False),
        (403, False),
        (422, False),
    ],
)
def test_overload_and_outages_pass_and_refusals_do_not(status: int, is_passing: bool) -> None:
    assert error_of("create pods", status, {}, {}, hide_message=False).is_passing is is_passing


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({}, {"details": {"retryAfterSeconds": 3}}, 3.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}, None),
        ({}, {}, None),
        ({}, "<html>a proxy's page</html>", None),
    ],
    ids=["header", "details", "date", "nothing", "not-json"],
)
def test_how_long_to_wait_is_read_wherever_it_is_said(
    headers: dict[str, str], body: object, seconds: float | None
) -> None:
    assert error_of("list pods", 429, body, headers, hide_message=False).retry_after_seconds == seconds


def test_an_answer_about_a_secret_is_not_repeated() -> None:
    error = error_of("create secrets", 422, {"reason": "Invalid", "message": "data: s3cret"}, {}, hide_message=True)
    assert "s3cret" not in str(error)
    assert "422 Invalid" in str(error)
