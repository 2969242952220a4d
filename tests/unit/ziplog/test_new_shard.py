"""Adding a shard to a cluster file: the rest stays the same, and a failed attempt is resumed."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.ziplog.nodes import make
from ziplog.config import load
from ziplog.deploy import new_shard
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ConfigError, DeadlineError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path / CLUSTER_FILE


def test_a_new_shard_stands_at_the_end_and_all_else_is_as_people_wrote_it(path: Path) -> None:
    text = "# by hand\n" + path.read_text() + "\n# the end, without a line's end"
    path.write_text(text)
    path.chmod(0o640)
    before = load(path)
    added = new_shard.next_shard(path, {0, 1})
    assert path.read_text().startswith(text + "\n\n[[shard]]\n")
    assert load(path).shards == (*before.shards, added)
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in path.parent.glob("cluster*")) == [CLUSTER_FILE]


def test_its_number_is_above_all_that_ever_were_and_its_servers_are_new(path: Path) -> None:
    # The service knows a shard 6 that this file never had.
    added = new_shard.next_shard(path, {0, 6})
    assert added.id == 7
    (server,) = added.replicas
    assert (server.name, server.host, server.raft_port) == ("shard-7-0", "127.0.0.1", None)
    assert server.port not in {7400, 7401, 7402, 7403, 7404}


def test_the_next_attempt_resumes_an_unfinished_shard(path: Path) -> None:
    added = new_shard.next_shard(path, {0})
    text = path.read_text()
    assert new_shard.next_shard(path, {0}) == added
    assert path.read_text() == text
    assert new_shard.next_shard(path, {0, added.id}).id == added.id + 1


def test_a_link_to_the_file_stays_one(path: Path) -> None:
    real = path.with_name("real.toml")
    path.rename(real)
    path.symlink_to(real)
    added = new_shard.next_shard(path, {0})
    assert path.is_symlink()
    assert load(real).shards[-1] == added


def test_a_file_that_cannot_grow_is_left_alone(path: Path) -> None:
    text = path.read_text()
    (path.parent / "shard-1-0").mkdir()
    with pytest.raises(ConfigError, match="already contains 'shard-1-0', perhaps"):
        new_shard.next_shard(path, {0})
    (path.parent / "shard-1-0").rmdir()
    path.write_text(text.replace("[[shard]]", "[[shards]]"))
    with pytest.raises(ConfigError, match="shards"):
        new_shard.next_shard(path, {0})
    # The name is in use by a server of shard 0.
    path.write_text(text.replace("shard-0-0", "shard-1-0"))
    with pytest.raises(ConfigError, match="node name 'shard-1-0' is used more"):
        new_shard.next_shard(path, {0})
    assert path.read_text() == text.replace("shard-0-0", "shard-1-0")


def test_a_host_that_is_not_this_machine_gets_no_servers(path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cannot start servers at 192\.0\.2\.1"):
        new_shard.free_ports(1, "192.0.2.1")


def test_the_servers_of_a_new_shard_get_the_next_free_ports(path: Path) -> None:
    ports = {port for node in load(path).nodes for port in (node.port, node.raft_port) if port}
    above = max(ports) + 1
    with contextlib.ExitStack() as held:
        while True:
            # Another program may hold the port.
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", above)))
                break
            above += 1
        found = new_shard.next_shard(path, {0}).replicas[0].port
        assert above < found < above + 100


def test_the_first_port_of_a_new_shard_can_be_chosen(path: Path) -> None:
    (first,) = new_shard.free_ports(1, "127.0.0.1")
    assert first <= new_shard.next_shard(path, {0}, first).replicas[0].port < first + 100
    with pytest.raises(UnavailableError, match="name the first port to try"):
        new_shard.next_shard(path, {0, 1}, 65_536)


def test_free_ports_are_free_and_none_of_those_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        used = int(listener.getsockname()[1])
        monkeypatch.setattr(new_shard, "_FREE_PORTS", [used, *range(20_000, 20_200)])
        taken = range(20_000, 20_190)
        found = list(new_shard.free_ports(3, "127.0.0.1", taken))
        assert len(set(found)) == 3
        assert set(found) <= set(range(20_190, 20_200))
        with pytest.raises(UnavailableError, match="cannot find 11 free ports"):
            new_shard.free_ports(11, "127.0.0.1", taken)


def test_servers_are_waited_for_until_there_is_no_hope(path: Path) -> None:
    shard = new_shard.next_shard(path, {0})
    (node,) = shard.replicas
    with pytest.raises(DeadlineError, match=f"{node.name} of shard 1 does not listen"):
        new_shard.await_servers(shard, time.monotonic())

    def dead() -> None:
        raise UnavailableError("it ended")

    with pytest.raises(UnavailableError, match="it ended"):
        new_shard.await_servers(shard, time.monotonic() + 60, dead)
    with socket.create_server((node.host, node.port)):
        new_shard.await_servers(shard, time.monotonic() + 60)
        # Another program may listen there.
        with pytest.raises(UnavailableError, match="it ended"):
            new_shard.await_servers(shard, time.monotonic() + 60, dead)
