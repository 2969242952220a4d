"""Settings of targets: what cannot work raises when the target is made."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from logplayer import targets
from logplayer.contract import TargetSpec
from logplayer.targets.settings import KEYS
from ziplog.errors import ConfigError


def handle(record: object) -> None:
    """Do nothing with a record."""


async def wait(record: object) -> None:
    """Do nothing with a record, in a loop."""


def test_settings_become_the_fields_of_the_target() -> None:
    spec = targets.function(
        "shop", handle, partitions=4, keys="user-*", map=print, batch_records=7, batch_bytes=8,
        retry_first_ms=1, retry_last_ms=2, retry_s=3, rejected="dead-letter",
        dead_letter=Path("dead.jsonl"),
    )  # fmt: skip
    assert spec == TargetSpec(
        name="shop", connect=spec.connect, stores_position=False, partitions=4, keys=("user-*",),
        map=print, batch_records=7, batch_bytes=8, retry_first_ms=1, retry_last_ms=2, retry_s=3,
        rejected="dead-letter", dead_letter="dead.jsonl",
    )  # fmt: skip


def test_defaults_are_those_of_the_contract() -> None:
    spec = targets.sqlite("warehouse", "warehouse.db")
    assert spec == TargetSpec(
        name="warehouse", connect=spec.connect, stores_position=True, keeps_rejected=True
    )


def test_every_setting_is_a_field_of_the_target() -> None:
    assert set(KEYS) < set(TargetSpec.__struct_fields__)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("partitions", 0), ("partitions", 257), ("partitions", True), ("partitions", "4"),
        ("keys", 5), ("keys", [b"x"]), ("keys", [""]), ("keys", ""), ("keys", []),
        ("map", "shop:to_row"), ("map", 5),
        ("batch_records", 0), ("batch_bytes", 0), ("batch_bytes", 2**30),
        ("retry_first_ms", 0), ("retry_last_ms", 50), ("retry_s", -1), ("retry_s", 0.5),
        ("rejected", "drop"), ("dead_letter", "dead.jsonl"), ("dead_letter", 5),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^target shop: {setting} is .*; it must be "):
        targets.function("shop", handle, **{setting: value})


def test_unknown_setting_is_refused_with_the_closest_name() -> None:
    with pytest.raises(ConfigError, match="target shop: unknown setting 'batch_record'; did you"):
        targets.function("shop", handle, batch_record=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="there are partitions, keys"):
        targets.function("shop", handle, zzz=5)  # type: ignore[call-arg]


def test_dead_letters_need_a_file_unless_the_target_keeps_them() -> None:
    with pytest.raises(
        ConfigError, match="dead_letter is missing: rejected='dead-letter' needs the path of a file"
    ):
        targets.function("shop", handle, rejected="dead-letter")
    assert not targets.sqlite("s", "a.db", rejected="dead-letter").dead_letter
    with pytest.raises(ConfigError, match="left out: this target keeps rejected records itself"):
        targets.sqlite("s", "a.db", rejected="dead-letter", dead_letter="dead.jsonl")


@pytest.mark.parametrize("name", ["", "a/b", "members", "x" * 49, ".a", "ä", 5, None])
def test_invalid_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="the target's name is "):
        targets.function(name, handle)


@pytest.mark.parametrize(
    "make",
    [
        lambda: targets.function("t", 5),
        lambda: targets.sqlite("t", "a.db", apply=wait),
        lambda: targets.function("t", dict),
        lambda: targets.sqlite("t", ""),
        lambda: targets.sqlite("t", ":memory:"),
        lambda: targets.sqlite("t", b"a.db"),  # type: ignore[arg-type]
        lambda: targets.sqlite("t", "a.db", "INSERT INTO t VALUES (?)"),
        lambda: targets.sqlite("t", "a.db", "INSERT INTO t VALUES (:id)"),
        lambda: targets.sqlite("t", "a.db", ""),
        lambda: targets.sqlite("t", "a.db", apply=5),  # type: ignore[arg-type]
        lambda: targets.sqlite("t", "a.db", "DELETE FROM t", max),
        lambda: targets.dbapi("t", 5, paramstyle="qmark"),  # type: ignore[arg-type]
        lambda: targets.dbapi("t", dict, paramstyle="other"),  # type: ignore[arg-type]
        lambda: targets.dbapi("t", dict, paramstyle="qmark", blob=""),  # type: ignore[arg-type]
        lambda: targets.dbapi("t", dict),  # type: ignore[arg-type]
        lambda: targets.custom("t", 5, stores_position=True),  # type: ignore[arg-type]
        lambda: targets.log("t", "a"),
        lambda: targets.logdb("t", "a"),
        lambda: targets.push("t", "a"),
        lambda: targets.push("t", "10.0.0.1:7600"),
    ],
)
def test_invalid_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"^target t: "):
        make()


def test_own_targets_say_whether_they_store_positions() -> None:
    spec = targets.custom("own", dict, stores_position=True, keeps_rejected=True)  # type: ignore[arg-type]
    assert (spec.stores_position, spec.keeps_rejected, spec.connect) == (True, True, dict)


def test_making_a_target_connects_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "warehouse.db"
    targets.sqlite("warehouse", path).connect().close()
    targets.dbapi("other", lambda: sqlite3.connect(path), paramstyle="qmark").connect().close()
    targets.dbapi(
        "other", lambda: sqlite3.connect(path), "DELETE FROM t", "qmark"
    ).connect().close()
    assert not path.exists()


async def wait_with_cursor(cursor: object, records: object) -> None:
    """Do nothing with records, in a loop."""


def yield_of_cursor(cursor: object, records: object) -> Any:
    yield cursor, records


@pytest.mark.parametrize("apply", [wait_with_cursor, yield_of_cursor, 5])
def test_apply_must_do_its_work_in_the_call(apply: Any) -> None:
    allowed = r"apply is .* a list of records, and no coroutine or generator"
    with pytest.raises(ConfigError, match=allowed):
        targets.sqlite("copy", "copy.db", apply=apply)
    with pytest.raises(ConfigError, match=allowed):
        targets.logdb("copy", "127.0.0.1:7500", apply)


def test_a_push_target_has_a_receiver_and_no_connection() -> None:
    spec = targets.push("copy", "127.0.0.1:7600", batch_records=7)
    assert spec == TargetSpec(
        name="copy", connect=None, receiver="127.0.0.1:7600", stores_position=True,
        keeps_rejected=True, batch_records=7,
    )  # fmt: skip
    assert targets.push("copy", "10.0.0.1:7600", insecure=True).receiver == "10.0.0.1:7600"
    assert not targets.push("f", "127.0.0.1:7600", stores_position=False).stores_position


@pytest.mark.parametrize(
    ("address", "settings", "error"),
    [
        ("127.0.0.1", {}, "'host:port'"), (7600, {}, "'host:port'"), ("127.0.0.1:0", {}, "port"),
        ("10.0.0.1:7600", {}, "unless insecure=True"),
        ("127.0.0.1:1", {"batch_bytes": 2**24}, "at most 8388608"),
        ("127.0.0.1:1", {"stores_position": 1}, "True or False"),
        ("127.0.0.1:1", {"rejected": "dead-letter", "dead_letter": "x"}, "keeps rejected records"),
    ],
)  # fmt: skip
def test_a_push_target_that_cannot_work_is_refused(
    address: Any, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        targets.push("copy", address, **settings)
