"""What of a program's output is shown in a status."""

from __future__ import annotations

import pytest

from everloop_operator.core.jobs.scrub import scrub


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"key tml-0123456789ab-{'x' * 43} refused", "tml-0123456789ab"),
        ("hf_abcdefghijklmnop", "hf_abc"),
        ("sk-abcdefghijklmnop", "sk-abc"),
        ("AKIAABCDEFGHIJKLMNOP", "AKIAABC"),
        ("ghp_abcdefghijklmnopqrst", "ghp_abc"),
        ("Authorization: Bearer abc.def-ghi_jkl", "abc.def"),
        ("token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.c2ln", "eyJhbGci"),
        ("https://ann:hunter2@hub.example/x", "hunter2"),
        ("PASSWORD=hunter22", "hunter22"),
        ('{"api_key": "hunter22"}', "hunter22"),
        ("WANDB_API_KEY=0123456789abcdef", "0123456789abcdef"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEow", "MIIEow"),
    ],
)
def test_secrets_are_hidden(text: str, secret: str) -> None:
    """Keys by their shape, and whatever stands behind a telling name."""
    shown = scrub(f"before {text} after", 2048)
    assert secret not in shown
    assert "[hidden]" in shown


def test_the_end_is_kept() -> None:
    """An error stands at the end; control characters are no text."""
    shown = scrub("x" * 5000 + "\x1b[31m\nValueError: no reward\n", 100)
    assert shown.endswith("\nValueError: no reward\n")
    assert len(shown) == 100
    assert "\x1b" not in shown


def test_ordinary_output_stays() -> None:
    """A traceback is still readable."""
    text = "Traceback (most recent call last):\n  File \"loop.py\", line 7, in <module>\nKeyError: 'tokens'\n"
    assert scrub(text, 2048) == text
