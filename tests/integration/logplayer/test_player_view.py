"""The view of examples/player_view.py has the newest payload of each key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from player_view import View, main, playing

if TYPE_CHECKING:
    import pytest

    import ziplog
    from ziplog.types import RecordId


def insert(log: ziplog.Log, payload: bytes, key: bytes | None) -> RecordId:
    (rid,) = log.insert_many([payload], keys=[key])
    return rid


def test_view_is_kept_up_to_date(log: ziplog.Log, capsys: pytest.CaptureFixture[str]) -> None:
    view = View()
    log.insert_many([b"old"] * 3, keys=[b"a", b"b", b"c"])
    with playing(view, log) as player:
        player.wait_until(insert(log, b"new", b"b"), timeout=60)
        assert view == {b"a": b"old", b"b": b"new", b"c": b"old"}
        player.wait_until(insert(log, b"", b"c"), timeout=60)
        insert(log, b"no key", None)
        assert view == {b"a": b"old", b"b": b"new"}
    assert not log.cursors("view-*")
    main(",".join(log.endpoints))
    assert capsys.readouterr().out == "a old\nb new\n"
