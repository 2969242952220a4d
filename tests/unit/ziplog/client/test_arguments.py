"""Arguments of a client."""

from __future__ import annotations

import pytest

from ziplog.client import arguments
from ziplog.errors import ConfigError
from ziplog.types import RID_GENESIS, cluster_id
from ziplog.wire import Limits

LAST = 2**63 - 1


@pytest.mark.parametrize("number", [1, LAST])
def test_a_demanded_cluster_is_its_number_in_messages(number: int) -> None:
    given = cluster_id(number)
    assert arguments.log_address("a:1", given) == (["a:1"], number)
    assert arguments.log_address(f"ziplog://a:1/?cluster={given}", None) == (["a:1"], number)


@pytest.mark.parametrize("given", ["0" * 32, cluster_id(LAST + 1), "a" * 32, "f" * 33, "A" * 32])
def test_an_id_that_no_cluster_has_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("ZIPLOG_CLUSTER_ID", given)
    with pytest.raises(ConfigError, match=r"cluster_id is .*; it must be 32 hexadecimal digits"):
        arguments.log_address("a:1", None)


def test_an_empty_id_admits_any_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIPLOG_CLUSTER_ID", "7" * 32)
    assert arguments.log_address("a:1", "") == (["a:1"], 0)


def test_a_key_without_a_utf_8_form_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"key is '\\udcff'; it must be bytes, or a str that"):
        arguments.insert(b"x", RID_GENESIS, "\udcff", Limits(), 0)
    with pytest.raises(ConfigError, match="key is"):
        arguments.insert_many([b"x"], RID_GENESIS, None, ["\udcff"], Limits(), 0)
