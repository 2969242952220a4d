"""The file of a player: what it may have, what is refused, and the examples."""

from __future__ import annotations

import signal
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

import logplayer
from logplayer.config import PlayerFile, read
from logplayer.example import example
from logplayer.kinds import KINDS
from logplayer.options import PlayerOptions
from logplayer.player import Player
from tests.unit.ziplog.cli.fakes import run
from ziplog.errors import ClosedError, ConfigError
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLAYER = '[player]\nname = "orders"\n'
TARGET = '[[target]]\nname = "copy"\nkind = "sqlite"\npath = "copy.db"\n'
HTTP = '[[target]]\nname = "copy"\nkind = "http"\nurl = "http://127.0.0.1/"\n'


@pytest.fixture(autouse=True)
def no_new_modules() -> Iterator[None]:
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if name.startswith("events_of_test"):
            del sys.modules[name]


def parse(tmp_path: Path, text: str) -> PlayerFile:
    path = tmp_path / "player.toml"
    path.write_text(text)
    return read(path)


def test_a_file_has_a_player_and_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIPLOG_BOOTSTRAP", "127.0.0.1:1234")
    more = 'partitions = 3\nkeys = ["user-*", "shop-?"]\nretry_s = 60\n'
    found = parse(tmp_path, f"{PLAYER}lease_s = 2.5\ncommit_ms = 50\n{TARGET}{more}")
    options, (spec,) = found.options, found.targets
    assert (options.name, options.lease_s, options.commit_ms) == ("orders", 2.5, 50)
    assert options.endpoints == ["127.0.0.1:1234"]
    assert (spec.name, spec.partitions, spec.keys) == ("copy", 3, ("user-*", "shop-?"))
    assert (spec.stores_position, spec.retry_s, found.kinds) == (True, 60, ("sqlite",))
    player = logplayer.load(tmp_path / "player.toml")
    assert (player.name, player.endpoints) == ("orders", ["127.0.0.1:1234"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (TARGET, "[player] is missing"),
        (PLAYER, "one target or more"),
        (f"{PLAYER}lese_s = 3\n{TARGET}", "unknown key 'lese_s' in [player]; did you mean 'lease"),
        (f"{PLAYER}lease_s = 0.5\n{TARGET}", "lease_s is 0.5; it must be a number, 1 to 300"),
        (f"{PLAYER}lease_s = true\n{TARGET}", "lease_s is True"),
        (f"{PLAYER}commit_ms = 5\n{TARGET}", "commit_ms is 5"),
        (f"{PLAYER}bootstrap = 'x'\n{TARGET}", "bootstrap is 'x'"),
        (f"{PLAYER}start = 'yesterday'\n{TARGET}", "start in [player] is 'yesterday'"),
        (f"{PLAYER}start = '@yesterday'\n{TARGET}", "start in [player] is '@yesterday'"),
        (f"{PLAYER}on_failed = 'go'\n{TARGET}", "on_failed is 'go'; it must be 'stay' or 'exit'"),
        (
            f"{PLAYER}metrics = '127.0.0.1:1'\n{TARGET}",
            "metrics in [player] is not implemented: `z",
        ),
        (f"{PLAYER}{HTTP}timeout_s = 0\n", "is 0; it must be a number above 0"),
        (f"{PLAYER}{HTTP}timeout_s = 3601\n", "a number above 0, up to 3600 seconds"),
        (f"[player]\nname = 'a/b'\n{TARGET}", "name is 'a/b'"),
        (f"[player]\n{TARGET}", "name is missing in [player]"),
        (f"{PLAYER}{TARGET}{TARGET}", "2 targets are named 'copy'"),
        (f"{PLAYER}{TARGET}[shop]\n", "unknown key 'shop' in the file"),
        (f"{PLAYER}{TARGET}partition = 2\n", "did you mean 'partitions'?"),
        (f"{PLAYER}{TARGET}partitions = 300\n", "partitions is 300"),
        (f"{PLAYER}{TARGET}batch_records = 0\n", "target copy: batch_records is 0"),
        (f"{PLAYER}{TARGET}rejected = 'drop'\n", "'stop' or 'skip' or 'dead-letter'"),
        (f"{PLAYER}{TARGET}statement = 'DELETE FROM t WHERE x = ?'\n", "has the parameter ?"),
        (f"{PLAYER}{TARGET}statement = 'INSERT INTO t VALUES (:kex)'\n", ":key_text"),
        (f"{PLAYER}{TARGET}map = 'nothing'\n", "'MODULE:NAME'"),
        (f"{PLAYER}{TARGET}map = 'events_of_no_test:f'\n", "cannot import events_of_no_test"),
        (f"{PLAYER}{TARGET}map = 'sys:nothing'\n", "sys has no nothing, which map"),
        (f"{PLAYER}{TARGET}map = 'sys:path'\n", "map is ["),
        (f"{PLAYER}[[target]]\nname = 'a'\nkind = 'sqlit'\n", "did you mean 'sqlite'?"),
        (f"{PLAYER}[[target]]\nname = 'a'\nkind = 'kafka'\n", "unknown kind 'kafka'"),
        (f"{PLAYER}[[target]]\nname = 'a'\nkind = ['sqlite']\n", "unknown kind ['sqlite']"),
        (f"{PLAYER}[[target]]\nname = 'a'\nkind = 'sqlite'\n", "path is missing in target 'a'"),
        (f"{PLAYER}[[target]]\nkind = 'sqlite'\n", "name is missing in [[target]]"),
        (f"{PLAYER}{TARGET}".replace("copy", "members"), "not 'members'"),
        (f"{PLAYER}target = 5\n", "unknown key 'target'"),
        (f"target = 5\n{PLAYER}", "[[target]] is 5"),
        ("player = [", "is not valid TOML"),
        (f"player = {'[' * 3000}", "is not valid TOML"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text)
    assert error in str(caught.value)
    assert "player.toml" in str(caught.value)


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.toml")


def test_functions_come_from_modules_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "events_of_test.py").write_text("class A:\n    def f(record): return record\n")
    found = parse(tmp_path, f"{PLAYER}{TARGET}map = 'events_of_test:A.f'\n")
    assert found.targets[0].map is not None
    assert found.targets[0].map.__qualname__ == "A.f"


def test_a_module_that_ends_the_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "events_of_test_3.py").write_text("raise SystemExit(7)\n")
    with pytest.raises(ConfigError, match=r"cannot import events_of_test_3, .*SystemExit: 7"):
        parse(tmp_path, f"{PLAYER}{TARGET}map = 'events_of_test_3:f'\n")


def test_a_module_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "events_of_test_2.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"cannot import events_of_test_2, .*ZeroDivisionError"):
        parse(tmp_path, f"{PLAYER}{TARGET}map = 'events_of_test_2:f'\n")


def test_paths_start_at_the_file(tmp_path: Path) -> None:
    text = (
        f"{PLAYER}[[target]]\nname = 'a'\nkind = 'function'\nfunction = 'builtins:print'\n"
        "rejected = 'dead-letter'\ndead_letter = 'dead.jsonl'\n"
    )
    assert parse(tmp_path, text).targets[0].dead_letter == str(tmp_path / "dead.jsonl")


@pytest.mark.parametrize("place", ["{ env = 'DSN_OF_TEST' }", "{ file = 'dsn' }"])
def test_a_secret_may_be_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("DSN_OF_TEST", "dbname=x password=y")
    (tmp_path / "dsn").write_text("dbname=x password=y\n")
    given: list[Any] = []

    def make(name: str, **settings: Any) -> Any:
        given.append(settings)
        return logplayer.targets.sqlite(name, "x.db")

    monkeypatch.setitem(KINDS, "postgres", KINDS["postgres"]._replace(make=make))  # type: ignore[misc]
    parse(tmp_path, f"{PLAYER}[[target]]\nname = 'a'\nkind = 'postgres'\ndsn = {place}\n")
    assert given == [{"dsn": "dbname=x password=y"}]


@pytest.mark.parametrize(
    ("dsn", "error"),
    [
        ("{ env = 'NO_DSN_OF_TEST' }", "NO_DSN_OF_TEST, which has dsn in target 'a', is not set"),
        ("{ file = 'none' }", "No such file"),
        ("{ fil = 'password' }", "{ env = 'NAME' } or { file = 'PATH' }"),
        ("['password']", "dsn in target 'a' is '(not shown)'"),
    ],
)
def test_a_secret_is_in_no_error(tmp_path: Path, dsn: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, f"{PLAYER}[[target]]\nname = 'a'\nkind = 'postgres'\ndsn = {dsn}\n")
    assert error in str(caught.value)
    assert "password" not in str(caught.value)


def test_a_file_has_a_mirror(tmp_path: Path) -> None:
    head = f"{PLAYER}[[target]]\nname = 'copy'\nkind = 'log'\nbootstrap = '127.0.0.1:1'\n"
    found = parse(tmp_path, f"{head}order = 'key'\npartitions = 4\nenvelope = true\n")
    (spec,) = found.targets
    assert (spec.partitions, spec.stores_position, found.kinds) == (4, True, ("log",))
    with pytest.raises(ConfigError, match=r"order.* is 'all'"):
        parse(tmp_path, f"{head}order = 'all'\n")


# --- examples ---


@pytest.mark.parametrize(
    "kind", ["sqlite", "files", "logdb", "http", "log", "push", "function", "python"]
)
def test_an_example_is_a_file_that_works(tmp_path: Path, kind: str) -> None:
    assert parse(tmp_path, example(kind)).kinds == (kind,)


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_example_shows_every_key_with_a_value_that_is_toml(kind: str) -> None:
    text = example(kind)
    for table in text.split("[[target]]"):
        lines = [line.removeprefix("# ") for line in table.splitlines()]
        shown = [line for line in lines if " = " in line and line.split(" = ")[0].isidentifier()]
        assert len(tomllib.loads("\n".join(shown))) == len(shown) > 5
    assert max(map(len, text.splitlines())) <= 120


def test_the_command_prints_an_example() -> None:
    assert run("player", "example", "sqlite").stdout == example("sqlite")
    result = run("player", "example", "kafka")
    assert result.exit_code == 2


# --- arguments ---


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "a/b"}, "name is 'a/b'"),
        ({"name": "x" * 49}, "name"),
        ({"lease_s": 301}, "lease_s is 301"),
        ({"lease_s": float("nan")}, "lease_s is nan"),
        ({"memory_bytes": 5}, "memory_bytes is 5"),
        ({"idle_ms": 1.5}, "idle_ms is 1.5"),
        ({"hold_s": -1}, "hold_s is -1"),
        ({"targets": []}, "one target or more"),
        ({"log": "x"}, "log is 'x'"),
        ({"start": RecordId(5, -1)}, "start"),
        ({"on_failed": "go"}, "on_failed is 'go'; it must be 'stay' or 'exit'"),
        ({"map": "nothing"}, "map is 'nothing'; it must be a function of a record"),
    ],
)
def test_arguments_are_checked(changes: dict[str, Any], error: str) -> None:
    given: dict[str, Any] = {
        "log": "127.0.0.1:7400",
        "name": "orders",
        "targets": [logplayer.targets.sqlite("copy", "copy.db")],
    }
    with pytest.raises(ConfigError) as caught:
        Player(**given | changes)
    assert error in str(caught.value)


@pytest.mark.parametrize("player", [Player, logplayer.aio.Player])
def test_the_map_of_a_player_is_that_of_the_targets_without_one(player: Any) -> None:
    def own(record: Record) -> Record:
        return record

    def other(_: Record) -> None:
        return None

    plain, mapped = (
        logplayer.targets.sqlite("a", "a.db"),
        logplayer.targets.sqlite("b", "b.db", map=own),
    )
    made = player("127.0.0.1:7400", "orders", [plain, mapped], map=other)
    found = getattr(made, "_player", made).targets
    assert [one.map for one in found] == [other, own]
    assert plain.map is None


def test_a_start_that_is_no_position_is_refused() -> None:
    target = logplayer.targets.sqlite("copy", "copy.db")
    with pytest.raises(TypeError, match="start"):
        Player("127.0.0.1:7400", "orders", [target], start="yesterday")  # type: ignore[arg-type]


def test_a_signal_while_the_file_is_read_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "logplayer.cli.commands.read", lambda _: signal.raise_signal(signal.SIGTERM)
    )
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        result = run("player", "run", "player.toml")
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert result.exit_code == 0


@pytest.mark.parametrize("targets", ["x", ["x"], None, [print]])
def test_targets_must_be_targets(targets: Any) -> None:
    with pytest.raises(TypeError, match="target"):
        Player("127.0.0.1:7400", "orders", targets)


def test_a_player_has_at_most_256_tasks() -> None:
    many = [logplayer.targets.sqlite(f"t{i}", "x.db", partitions=100) for i in range(3)]
    with pytest.raises(ConfigError, match="300 partitions"):
        Player("127.0.0.1:7400", "orders", many)


def test_a_player_that_was_not_started_has_no_status() -> None:
    player = Player("127.0.0.1:7400", "orders", [logplayer.targets.sqlite("copy", "copy.db")])
    with pytest.raises(ClosedError, match="is not started; start it first"):
        player.status()
    with pytest.raises(ClosedError):
        player.join(0)
    player.stop()
    with pytest.raises(ClosedError):
        player.start()


def test_defaults_are_those_of_the_options() -> None:
    assert Player.__init__.__kwdefaults__ == {
        "start": RID_GENESIS,
        "region": None,
        "map": None,
        **{
            name: getattr(PlayerOptions("x"), name)
            for name in (
                "lease_s",
                "memory_bytes",
                "commit_ms",
                "idle_ms",
                "hold_s",
                "on_failed",
            )
        },
    }
