import json

import pytest

from raytide.pipelines.cleaning.scrub.secrets import entropy_bits, replace_secrets

RANDOM = "q7Zr2Xk9Lm4Tn8Vb3Wc6Yd1Pf5Hg0Js7Ka9Qe"
KEY = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabc+/=\n-----END RSA " + "PRIVATE KEY-----"

PGP_BLOCK = "PRIVATE KEY BLOCK-----"
PGP = f"-----BEGIN PGP {PGP_BLOCK}\nVersion: GnuPG v2.0.22 (GNU/Linux)\n\nlQOYBFAKE+/=\n=Ab1/\n-----END PGP {PGP_BLOCK}"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (KEY, "private_key"),
        (json.dumps({"type": "service_account", "private_key": KEY.replace("RSA ", "")}), "private_key"),
        (PGP, "private_key"),
        ("id = AKIA" + "ABCDEFGHIJKLMNOP", "aws_key_id"),
        ("ghp_" + RANDOM[:36], "github_key"),
        ("glpat-" + RANDOM[:20], "gitlab_key"),
        ("xoxb-" + RANDOM[:24], "slack_key"),
        ("AIza" + RANDOM[:35], "google_key"),
        ("sk_live_" + RANDOM[:24], "stripe_key"),
        ("hf_" + RANDOM[:34], "hugging_face_key"),
        ("eyJ" + RANDOM[:12] + ".eyJ" + RANDOM[:12] + "." + RANDOM[:12], "jwt"),
        (f'password = "{RANDOM[:12]}"', "assigned"),
        (f"'api_key': '{RANDOM}'", "assigned"),
    ],
)
def test_secrets_are_replaced(text: str, kind: str) -> None:
    replaced, counts = replace_secrets(f"a = 1\n{text}\nb = 2")
    assert counts == {kind: 1}
    assert "<SECRET>" in replaced
    assert replaced.startswith("a = 1\n") and replaced.endswith("\nb = 2")
    assert replace_secrets(replaced) == (replaced, {})


def test_only_the_password_of_a_url_goes() -> None:
    replaced, counts = replace_secrets("postgres://app:" + RANDOM[:9] + "@db/x")
    assert (replaced, counts) == ("postgres://app:<SECRET>@db/x", {"url_login": 1})
    replaced, counts = replace_secrets("redis://:" + RANDOM[:9] + "@cache:6379/0")
    assert (replaced, counts) == ("redis://:<SECRET>@cache:6379/0", {"url_login": 1})


@pytest.mark.parametrize(
    "text",
    [
        'password = "changeme1"',
        'password = "your_password"',
        'password = "aaaaaaaaaaaa"',
        'token = os.environ["TOKEN"]',
        'key.startswith("-----BEGIN PRIVATE ' + 'KEY-----") and key.endswith("-----END PRIVATE ' + 'KEY-----")',
        'api_key = "${API_KEY}"',
        "https://example.org:8080/path@x",
        "AKIA1234",
    ],
)
def test_placeholders_and_code_stay(text: str) -> None:
    assert replace_secrets(text) == (text, {})


def test_entropy() -> None:
    assert entropy_bits("aaaa") == 0
    assert entropy_bits("abcd") == 2
