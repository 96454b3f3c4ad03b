import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.specs.cleaning import PII_KINDS, PiiKind
from raytide.pipelines.cleaning.scrub.personal import is_iban, is_luhn, scrub_personal


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Write to jane.doe+x@mail.example.org today.", "email"),
        ("card 4111 1111 1111 1111 ok", "credit_card"),
        ("amex 378282246310005.", "credit_card"),
        ("IBAN GB82 WEST 1234 5698 7654 32 or", "iban"),
        ("DE89370400440532013000", "iban"),
        ("SSN 078-05-1120.", "ssn"),
        ("Call +1 212-555-0123 now", "phone"),
        ("Call (212) 555-0123 now", "phone"),
        ("+442079460958", "phone"),
        ("+33 1 23 45 67 89", "phone"),
        ("+14155552671 2024-05-17 10:33:01", "phone"),
        ("+49 2041 12 30 56", "phone"),
        ("+49-30-1234567", "phone"),
        ("+49 (0)30 1234567", "phone"),
        ("+91 98765 43210", "phone"),
        ("from 8.8.8.8:53", "ip"),
        ("at 2001:4860:4860:0000:0000:0000:0000:8888", "ip"),
        ("from [2a00:1450:4001:81b::200e]: refused", "ip"),
        ("2001:4860:4860::8888: ok", "ip"),
    ],
)
def test_personal_data_is_replaced(text: str, kind: PiiKind) -> None:
    scrubbed, counts = scrub_personal(text, PII_KINDS)
    assert counts == {kind: 1}
    assert f"<{kind.upper()}>" in scrubbed
    assert scrub_personal(scrubbed, PII_KINDS) == (scrubbed, {})


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # Luhn
        "0000 0000 0000 0000",
        "GB82 WEST 1234 5698 7654 33",  # modulus 97
        "666-12-1234 and 000-12-1234 and 900-12-1234",
        "192.168.0.1, 127.0.0.1, 10.1.2.3 and version 1.2.3.4000",
        "2001:db8::1, fe80::1, a::b, std::2000 and 2024:05:17 12:30:00",
        "on 2024-05-17 and 17.05.2024",
        "at 2024-05-17 12:30:00, 17.05.2024 10.30 or 05-17-2024 23:59",
        "2019.12.31.10",
        "12:30 2024-05-17 and page 12 17.05.2024, GMT+1 2024-05-17",
        "+3.14159265358, 12:30:00 +0200 and +10 +20 +30 +40",
        "image@2x.png",
        "@decorator and a@b",
        "0.1234567890123 and 1234567",
    ],
)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert scrub_personal(text, PII_KINDS) == (text, {})


def test_words_after_an_account_number_stay() -> None:
    text = "ES91 2100 0418 4502 0005 1332 BIC X, BE68 5390 0754 7034 PAID 2 EUR"
    assert scrub_personal(text, PII_KINDS) == ("<IBAN> BIC X, <IBAN> PAID 2 EUR", {"iban": 2})


def test_a_number_after_a_date_is_replaced() -> None:
    assert scrub_personal("2024-05-17 212-555-0123", PII_KINDS) == ("2024-05-17 <PHONE>", {"phone": 1})


def test_only_the_kinds_asked_for_are_replaced() -> None:
    text = "a@b.org from 8.8.8.8"
    assert scrub_personal(text, ("ip",)) == ("a@b.org from <IP>", {"ip": 1})


@given(st.text(alphabet="0123456789", min_size=1, max_size=30))
def test_exactly_one_check_digit_fits(number: str) -> None:
    assert sum(is_luhn(number + digit) for digit in "0123456789") == 1


def test_a_swapped_pair_breaks_an_iban() -> None:
    whole = "DE89370400440532013000"
    for i in random.Random(0).sample(range(4, len(whole) - 1), 10):
        swapped = whole[:i] + whole[i + 1] + whole[i] + whole[i + 2 :]
        assert is_iban(swapped) == (whole[i] == whole[i + 1])
