"""Push targets over real sockets: a receiver with SQLite behind it, which is killed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

import logplayer
from logplayer import aio, targets
from logplayer.contract import Rejected
from tests.integration.logplayer.playing import (
    Filled,
    Process,
    assert_exactly_once,
    history,
    insert,
)
from tests.unit.ziplog.cli.fakes import run
from tests.waiting import wait_until
from ziplog.deploy.new_shard import free_ports
from ziplog.errors import ClosedError, ConfigError, UnavailableError
from ziplog.types import RecordId

if TYPE_CHECKING:
    import ziplog
    from ziplog.types import Record

pytestmark = pytest.mark.timeout(240)
_PROGRAM = Path(__file__).parents[3] / "examples" / "player_receiver.py"


class ReceiverProcess:
    """The receiver of the examples, in a process; it ends with the block."""

    def __init__(self, database: Path, port: int) -> None:
        self._command = [sys.executable, str(_PROGRAM), str(database), str(port)]
        self.start()

    def start(self) -> None:
        self.running = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.running.stdout is not None
        assert "receiver ready" in self.running.stdout.readline()

    def kill(self) -> None:
        self.running.kill()
        self.running.communicate(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def tail(log: ziplog.Log) -> RecordId:
    return RecordId(log.check_tail().gsn + 1, 0)


def pushing(filled: Filled, port: int) -> None:
    """Have a player's file push to a receiver."""
    head, _ = filled.file.read_text().split("[[target]]")
    table = f'[[target]]\nname = "copy"\nkind = "push"\naddress = "127.0.0.1:{port}"\n'
    filled.file.write_text(f"{head}{table}batch_records = 20\nretry_last_ms = 200\n")


def test_each_record_is_there_once_although_receiver_and_player_are_killed(
    log: ziplog.Log, tmp_path: Path
) -> None:
    start = tail(log)
    filled = Filled(tmp_path, log, "killed", start)
    (port,) = free_ports(1, "127.0.0.1")
    pushing(filled, port)
    chance = random.Random(1)
    with ReceiverProcess(filled.path, port) as receiver, Process(filled.file) as first:
        first.ready()
        with Process(filled.file) as second:
            second.ready()
            expected = 0
            for round_ in range(3):
                insert(log, 200)
                expected += 200
                reached = expected - chance.randrange(1, 200)
                wait_until(lambda: filled.count() >= reached, "some are there")  # noqa: B023
                receiver.kill()
                if round_ == 1:
                    first.send(signal.SIGKILL)
                receiver.start()
            wait_until(lambda: filled.count() >= expected, "all records are there")
            assert_exactly_once(filled.rows(), history(log, start))
            assert second.stop()[0] == 0
    assert {cursor.state for cursor in log.cursors("killed/*")} == {"free"}


def test_the_example_runs_as_it_is(
    log: ziplog.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIPLOG_BOOTSTRAP", ",".join(log.endpoints))
    file = tmp_path / "player.toml"
    file.write_text(run("player", "example", "push").stdout)
    assert 'address = "127.0.0.1:7600"' in file.read_text()
    (port,) = free_ports(1, "127.0.0.1")  # 7600 may be in use here.
    file.write_text(file.read_text().replace("7600", f"{port}"))
    checked = run("player", "check", str(file))
    assert checked.exit_code == 1
    assert f"cannot reach the receiver at 127.0.0.1:{port}: connection refused" in checked.stderr
    last = insert(log, 10)[-1]
    filled = Filled(tmp_path, log, "example", RecordId(0, 0))
    with ReceiverProcess(filled.path, port):
        checked = run("player", "check", str(file))
        assert (checked.exit_code, "exactly once" in checked.stderr) == (0, True)
        with Process(file) as process:
            process.ready()
            wait_until(lambda: log.cursors("push/copy/0")[0].position > last, "it has all")
            assert process.stop()[0] == 0
    gsns = [gsn for gsn, _, _ in filled.rows()]
    assert gsns == [record.rid.gsn for record in log.subscribe(RecordId(0, 0), follow=False)]


def test_a_rejection_reaches_the_player_and_the_record_stays_with_the_receiver(
    log: ziplog.Log, tmp_path: Path
) -> None:
    start, seen = tail(log), []

    def handle(record: Record) -> None:
        if record.payload == b"3":
            raise Rejected("it is three")
        seen.append(record.payload)

    dead = tmp_path / "dead.jsonl"
    behind = targets.function("f", handle, rejected="dead-letter", dead_letter=dead)
    with logplayer.Receiver("127.0.0.1:0", behind) as receiver:
        push = targets.push("f", receiver.endpoint, stores_position=False, rejected="dead-letter")
        with logplayer.Player(log, "rejected", [push], start=start, commit_ms=50) as player:
            player.wait_until(insert(log, 6, keys=1)[-1], timeout=60)
            assert player.status()["tasks"][0]["rejected"] == 1
        assert sorted(seen) == [b"0", b"1", b"2", b"4", b"5"]
        assert "it is three" in dead.read_text()


def test_another_program_at_the_address_fails_the_task(log: ziplog.Log, tmp_path: Path) -> None:
    address = log.endpoints[0]
    with logplayer.Player(log, "wrong", [targets.push("f", address)], start=tail(log)) as player:
        wait_until(lambda: player.status()["tasks"][0]["state"] == "failed", "the task fails")
        assert f"no receiver at {address}" in player.status()["tasks"][0]["last_error"]
    file = tmp_path / "player.toml"
    file.write_text(
        f'[player]\nname = "wrong"\nbootstrap = "{address}"\n[[target]]\nname = "f"\n'
        f'kind = "push"\naddress = "{address}"\n'
    )
    checked = run("player", "check", str(file))
    assert checked.exit_code == 2
    assert "this is membership node" in checked.stderr


def test_a_receiver_starts_once_and_closes() -> None:
    target = targets.function("f", print)
    receiver = logplayer.Receiver("127.0.0.1:0", target)
    with receiver:
        assert not receiver.endpoint.endswith(":0")
        with pytest.raises(ClosedError):
            receiver.start()
        with pytest.raises(UnavailableError):
            logplayer.Receiver(receiver.endpoint, target).start()
    receiver.close()
    receiver.serve()
    with pytest.raises(ClosedError):
        receiver.start()
    never = logplayer.Receiver("127.0.0.1:0", target)
    never.close()
    with pytest.raises(ClosedError):
        never.serve()


def test_a_receiver_with_coroutines() -> None:
    async def use() -> None:
        async with aio.Receiver("127.0.0.1:0", targets.function("f", print)) as receiver:
            serving = asyncio.create_task(receiver.serve())
            await asyncio.sleep(0)
            await receiver.close()
            await serving

    asyncio.run(use())


@pytest.mark.parametrize(
    ("address", "target", "error"),
    [
        ("0.0.0.0:7600", targets.function("f", print), "unless insecure=True"),
        ("127.0.0.1", targets.function("f", print), "'host:port'"),
        (None, None, "address is None; it must be 'host:port'"),
        ("127.0.0.1:0", targets.function("f", print, keys="a*"), "give it to targets.push"),
        ("127.0.0.1:0", targets.function("f", print, map=print), "give it to targets.push"),
        ("127.0.0.1:0", targets.push("f", "127.0.0.1:1"), "a target that the receiver reaches"),
    ],
)
def test_a_receiver_that_cannot_work_is_refused(address: Any, target: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        logplayer.Receiver(address, target)


def test_a_receiver_without_a_target_is_refused() -> None:
    with pytest.raises(TypeError, match=r"target is None, not what logplayer\.targets returns"):
        logplayer.Receiver("127.0.0.1:0", None)  # type: ignore[arg-type]
