"""Servers with few file descriptors, and idle connections that use them all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Final, Self

import pytest

from tests.waiting import wait_until
from ziplog.local import Cluster
from ziplog.runtime import local_socket

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog

pytestmark = pytest.mark.timeout(300)

#: The hard limit too, so that a server cannot raise it.
LIMIT: Final = 96
LAUNCHER: Final = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
PAYLOAD: Final = bytes(4_000)


class Crowd:
    """Idle connections to every node; each is reopened when the server closes it."""

    def __init__(self, cluster: Cluster) -> None:
        config = cluster.config
        endpoints = [config.node(name).endpoint.rpartition(":") for name in cluster.nodes]
        self._addresses = [(host, int(port)) for host, _, port in endpoints]
        self._connections: list[tuple[socket.socket, tuple[str, int]]] = []
        #: Number of connections that servers closed.
        self.closed = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        for address in self._addresses:
            for _ in range(LIMIT):
                self._connect(address)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for connection, _ in self._connections:
            connection.close()

    def _connect(self, address: tuple[str, int]) -> None:
        """Open a connection of each kind in turn; TCP while the server refuses the other."""
        connection = None
        if len(self._connections) % 2:
            connection = local_socket.connect(*address)
        if connection is None:
            connection = socket.socket()
            connection.setblocking(False)
            assert connection.connect_ex(address) in {0, errno.EINPROGRESS}
        self._connections.append((connection, address))

    def _run(self) -> None:
        while not self._is_over.wait(0.2):
            for pair in list(self._connections):
                if _is_closed(pair[0]):
                    self.closed += 1
                    pair[0].close()
                    self._connections.remove(pair)
                    self._connect(pair[1])


def _is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            return True
        except OSError as error:
            return error.errno != errno.ENOTCONN
        return True
    return False


def small_cluster(directory: Path) -> Cluster:
    """One shard whose servers may open few files."""
    launcher = directory / "launcher.py"
    launcher.write_text(LAUNCHER)
    return Cluster(
        directory / "data",
        shards=1,
        settings={"segment_bytes": 1 << 20},
        launcher=(str(launcher),),
    )


def is_live(log: ziplog.Log) -> bool:
    [shard] = log.cluster()["shards"]
    return [shard["state"], *(node["state"] for node in shard["replicas"])] == ["live", "up", "up"]


def test_idle_connections_halt_no_server_and_cost_no_record(tmp_path: Path) -> None:
    with small_cluster(tmp_path) as cluster, cluster.connect(timeout=120.0) as log:
        pids = {name: cluster.pid(name) for name in cluster.nodes}
        acked = log.insert_many([PAYLOAD] * 50)
        with Crowd(cluster) as crowd:
            wait_until(lambda: crowd.closed, "a server closes idle connections")
            # Four segments: each needs a descriptor for the next one.
            for _ in range(20):
                acked += log.insert_many([PAYLOAD] * 50)
        acked.append(log.insert_after(b"last"))
        assert {name: cluster.pid(name) for name in cluster.nodes} == pids
        with log.subscribe(follow=False) as records:
            assert [record.rid for record in records] == acked
        segments = tmp_path / "data" / "shard-0-0" / "segments"
        wait_until(lambda: len(list(segments.glob("*.seg"))) >= 4, "there are four segments")


def test_idle_connections_to_a_consensus_port_leave_descriptors_for_clients(tmp_path: Path) -> None:
    with small_cluster(tmp_path) as cluster, contextlib.ExitStack() as opened:
        (node,) = cluster.config.mms
        for _ in range(64):
            address = ("127.0.0.1", node.raft_port)
            opened.enter_context(contextlib.closing(socket.create_connection(address)))
        for _ in range(3):
            with cluster.connect(timeout=60.0) as log:
                assert is_live(log)
                log.append(b"while they are open")


def test_recoveries_end_beside_idle_connections(tmp_path: Path) -> None:
    with small_cluster(tmp_path) as cluster, cluster.connect(timeout=120.0) as log:
        acked = log.insert_many([PAYLOAD] * 50)
        log.sync()
        with Crowd(cluster) as crowd:
            wait_until(lambda: crowd.closed, "a server closes idle connections")
            for victim in ("shard-0-0", "shard-0-1", "shard-0-0"):
                pid = cluster.pid(victim)
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                acked.append(log.insert_after(PAYLOAD))
                wait_until(lambda: is_live(log), "the shard and both its servers are up again")
        with log.subscribe(follow=False) as records:
            assert [record.rid for record in records] == acked
