"""A certificate's end, read from what the TLS files hold."""

from datetime import UTC, datetime

import pytest
import trustme
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from stageline_gateway.server.tls import NoExpiryError, expiry_of


@pytest.mark.parametrize(
    "end", [datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),
            datetime(2050, 1, 1, tzinfo=UTC), datetime(2199, 5, 6, tzinfo=UTC)]
)  # fmt: skip
def test_the_end_is_that_of_the_first_certificate(end: datetime) -> None:
    authority = trustme.CA()
    first = authority.issue_cert("a.example", not_after=end).cert_chain_pems[0].bytes().decode()
    other = authority.issue_cert("b.example", not_after=datetime(2040, 1, 1, tzinfo=UTC)).cert_chain_pems[0]
    assert x509.load_pem_x509_certificate(first.encode()).not_valid_after_utc == end
    assert expiry_of(f"subject=CN = a.example\n{first}{other.bytes().decode()}") == end


CERTIFICATE = trustme.CA().issue_cert("a.example").cert_chain_pems[0].bytes().decode()


@given(st.integers(0, len(CERTIFICATE) - 1), st.characters(max_codepoint=127))
def test_a_damaged_certificate_raises_nothing_else(place: int, letter: str) -> None:
    damaged = CERTIFICATE[:place] + letter + CERTIFICATE[place + 1 :]
    try:
        expiry_of(damaged)
    except NoExpiryError:
        pass


@given(st.text())
def test_text_is_not_a_certificate(text: str) -> None:
    with pytest.raises(NoExpiryError):
        expiry_of(text)
