"""docs/guarantees.md: every test that a promise names exists, and every promise names one."""

from __future__ import annotations

import re

from tests.named_tests import ROOT, check_exists

PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert named
    for file, name in named:
        check_exists(file, name)


def test_every_promise_names_its_test() -> None:
    promised = PAGE.partition("## What is not guaranteed")[0]
    for promise in re.split(r"^\* ", promised, flags=re.MULTILINE)[1:]:
        assert "`tests/" in promise, promise
