"""Runs tests/scenarios/*.txt: small scripts, each with the trace that it must produce.

A file holds steps. A step is a few commands, a line of four dashes, and the resulting messages.
Lines that begin with # are comments. `REWRITE=1 pytest tests/unit/test_scenarios.py` writes the
current traces into the files: read the difference before you commit it.

Commands (times in microseconds by default; a message takes 50, a flush 500):

    cluster shards=1 f=1 [epoch_ms=10] [epoch_size=100] [epochs=16]   always the first
    insert CLIENT shard=0 [after=GSN] [count=1] [follows=SEQ] [to=0,1] a new unit, to these servers
    retry CLIENT seq=1 [shard=0] [to=0,1]                              the same again
    subscribe CLIENT server=shard-0-0 start=1 [credit=1000000]
    credit CLIENT server=shard-0-0 credit=2000000
    want CLIENT shard=0 gsn=9
    read CLIENT server=shard-0-0 gsn=1
    lease [in=MICROSECONDS]                                            the next lease is announced
    trim gsn=5
    lose FROM TO            messages between them are lost from now on (either may be *)
    heal                    nothing is lost any more
    restart SERVER          a clean stop and start
    run 1000 | 5ms          time passes
    show                    what each server holds: decided entries, promises, watermarks
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shard.replica import Replica
from tests.actors import Client
from tests.checkers import decided
from tests.world import (
    CLUSTER,
    MS,
    US,
    Link,
    World,
    add_shard,
    first_lease,
    grant,
    placements,
    shard_names,
)
from ziplog import wire
from ziplog.core.entries import Place, Skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.view import Lease

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
#: Messages that are left out of every trace.
_QUIET = ("Heartbeat", "LeaseAnnounced")


class Listener(Client):
    """A scripted client that retransmits nothing by itself."""

    def next_wakeup(self) -> int | None:
        return None

    def _receive(self, message: object) -> None:
        if isinstance(message, wire.InsertAck):
            super()._receive(message)


class Stage:
    """A world that obeys the commands of a script."""

    def __init__(self) -> None:
        self.world = World(Link(delay=lambda: 50 * US))
        self.world.flush_ns = 500 * US
        self.world.tracing = True
        self.shards = self.f = 1
        self.lease: Lease = first_lease(1)
        self.clients: dict[str, Listener] = {}
        self.completed: list[str] = []

    def do(self, line: str) -> list[str]:
        """Execute a command; return its trace."""
        verb, *words = line.split()
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=") for word in words if "=" in word)
        command: Callable[[list[str], dict[str, str]], list[str] | None]
        command = getattr(self, f"_{verb}")
        found = command(plain, named) or []
        trace = [t for t in self.world.trace if t.split(": ")[1].split()[0] not in _QUIET]
        self.world.trace.clear()
        done, self.completed = self.completed, []
        return [*trace, *done, *found]

    def _cluster(self, _plain: list[str], named: dict[str, str]) -> None:
        sizes = {name: int(value) for name, value in named.items()}
        self.shards, self.f = sizes.pop("shards", 1), sizes.pop("f", 1)
        sizes.setdefault("epoch_size", 100)
        self.lease = first_lease(self.shards, **sizes)
        for shard in range(self.shards):
            add_shard(self.world, shard, self.f)
        grant(self.world, self.lease, self.shards, self.f)
        self.world.run(1 * MS)

    def _client(self, name: str) -> Listener:
        if name not in self.clients:
            client = self.clients[name] = Listener(name, self.f)
            client.on_complete = lambda job: self.completed.append(
                f"   {name} is done: seq={job.seq} is at {job.gsns},"
                f" {'fast' if job.fast else 'slow'} path"
            )
            self.world.add(name, client)
        return self.clients[name]

    def _servers(self, named: dict[str, str]) -> list[int]:
        to = named.get("to", "")
        return [int(server) for server in to.split(",")] if to else list(range(self.f + 1))

    def _insert(self, plain: list[str], named: dict[str, str]) -> None:
        self._client(plain[0]).insert(
            self.world, int(named.get("shard", 0)), count=int(named.get("count", 1)),
            after=int(named.get("after", 0)), predecessor=int(named.get("follows", 0)),
            to=self._servers(named), abandon=True,
        )  # fmt: skip

    def _retry(self, plain: list[str], named: dict[str, str]) -> None:
        client, shard = self._client(plain[0]), int(named.get("shard", 0))
        message = client._message(client.jobs[shard, int(named["seq"])])
        for server in self._servers(named):
            self.world.send(plain[0], shard_names(shard, self.f)[server], message)

    def _subscribe(self, plain: list[str], named: dict[str, str]) -> None:
        client, server = self._client(plain[0]), named["server"]
        credit = int(named.get("credit", 1_000_000))
        shard = int(server.split("-")[1])
        self.world.send(plain[0], server, wire.Subscribe(
            CLUSTER, shard, 1, client.id, 1, int(named["start"]), credit))  # fmt: skip

    def _credit(self, plain: list[str], named: dict[str, str]) -> None:
        client, server = self._client(plain[0]), named["server"]
        shard = int(server.split("-")[1])
        message = wire.Credit(CLUSTER, shard, 1, client.id, 1, int(named["credit"]))
        self.world.send(plain[0], server, message)

    def _want(self, plain: list[str], named: dict[str, str]) -> None:
        self._client(plain[0])
        shard = int(named["shard"])
        want = wire.Want(CLUSTER, shard, 1, int(named["gsn"]))
        self.world.send(plain[0], shard_names(shard, self.f)[0], want)

    def _read(self, plain: list[str], named: dict[str, str]) -> None:
        self._client(plain[0])
        server = named["server"]
        read = wire.Read(CLUSTER, int(server.split("-")[1]), 1, 1, int(named["gsn"]))
        self.world.send(plain[0], server, read)

    def _lease(self, _plain: list[str], named: dict[str, str]) -> None:
        self.lease = self.lease.following()
        delay = int(named.get("in", 0))
        grant(self.world, self.lease, self.shards, self.f, starts_in_us=delay)

    def _trim(self, _plain: list[str], named: dict[str, str]) -> None:
        message = wire.LeaseAnnounced(
            CLUSTER, [], 0, placements(self.shards, self.f), int(named["gsn"])
        )
        for shard in range(self.shards):
            for name in shard_names(shard, self.f):
                self.world.send("mms-0", name, message, reply=True)

    def _lose(self, plain: list[str], _named: dict[str, str]) -> None:
        names = list(self.world.nodes)
        for src in names if plain[0] == "*" else plain[:1]:
            for dst in names if plain[1] == "*" else plain[1:]:
                self.world.links[src, dst] = Link(lose=lambda: True)

    def _heal(self, _plain: list[str], _named: dict[str, str]) -> None:
        self.world.links.clear()

    def _restart(self, plain: list[str], _named: dict[str, str]) -> None:
        self.world.restart(plain[0])

    def _run(self, plain: list[str], _named: dict[str, str]) -> None:
        text = plain[0]
        self.world.run(int(text[:-2]) * MS if text.endswith("ms") else int(text) * US)

    def _show(self, _plain: list[str], _named: dict[str, str]) -> list[str]:
        lines = []
        for name, node in self.world.nodes.items():
            if isinstance(node, Replica):
                entries = [_entry(e.decision) for e in decided(self.world, name)]
                guesses = node._backup.guesses.promised.values() if node._backup else ()
                entries += [f"seq={unit.seq}? {unit.gsns}" for unit in guesses]
                stream = node.state.stream
                lines.append(
                    f"   {name}: {'; '.join(entries) or 'nothing'}"
                    f" | stable={stream.stable} frontier={node.state.frontier}"
                )
        return lines


def _entry(decision: object) -> str:
    match decision:
        case Place():
            return f"seq={decision.seq} {decision.gsns}"
        case Skip():
            return f"no-op [{decision.start},{decision.stop})"
    return type(decision).__name__


def play(text: str) -> str:
    """Return the script with the current traces."""
    stage = Stage()
    result: list[str] = []
    found: list[str] = []
    is_command = True
    for line in text.splitlines():
        if line == "----":
            result += [line, *found]
            found, is_command = [], False
        elif not line or line.startswith("#"):
            result.append(line)
            is_command = True
        elif is_command:
            result.append(line)
            found += stage.do(line)
    assert not stage.world.halts
    return "\n".join(result) + "\n"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    text = path.read_text()
    played = play(text)
    if os.environ.get("REWRITE"):
        path.write_text(played)
    assert played.splitlines() == text.splitlines() or os.environ.get("REWRITE")


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 10
