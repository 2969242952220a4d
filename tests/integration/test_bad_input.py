"""User errors against real processes: each raises a typed error and changes nothing else."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.waiting import wait_until
from ziplog.errors import (
    ClosedError,
    ConfigError,
    NoSuchRecordError,
    RecordTooLargeError,
    TrimmedError,
    UnavailableError,
)
from ziplog.local import Cluster
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(120)

#: Far beyond every lease that a test's cluster gives out.
NEVER_GIVEN = 2**62
#: A call with this time-out has ended, however busy the machine is, when this deadline comes.
SHORT_S, LATE_S = 0.5, 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("bad"), shards=2) as running:
        yield running
        assert running.dead() == []


@pytest.fixture
def log(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect(timeout=60.0) as client:
        yield client


def all_records(log: ziplog.Log) -> list[ziplog.Record]:
    first = RecordId.parse(log.cluster()["trimmed_before"])
    return list(log.subscribe(max(first, RecordId(0, 0)), follow=False))


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "limit"), [(1024 * 1024 + 1, 1024 * 1024), (2**25, 2**20)])
def test_an_oversized_record_is_refused_and_nothing_is_inserted(
    log: ziplog.Log, size: int, limit: int
) -> None:
    before = all_records(log)
    for attempt, results in (
        (lambda: log.insert_after(bytes(size)), []),
        (lambda: log.insert_many([b"fits", bytes(size)]), [None, None]),
        (lambda: log.append_many([bytes(size), b"fits", b""]), [None, None, None]),
        (lambda: log.insert_nowait(bytes(size)), []),
    ):
        with pytest.raises(RecordTooLargeError) as refused:
            attempt()
        assert (refused.value.size, refused.value.limit) == (size, limit)
        assert refused.value.results == results
        assert str(size) in str(refused.value)
    assert all_records(log) == before


def test_an_oversized_key_is_refused_and_nothing_is_inserted(log: ziplog.Log) -> None:
    before = all_records(log)
    with pytest.raises(RecordTooLargeError, match="key has 4098 bytes") as refused:
        log.insert_after(b"x", key="é" * 2049)
    assert (refused.value.size, refused.value.limit) == (4098, 4096)
    for keys in ({"key": bytes(4097)}, {"keys": [None, bytes(4097)]}):
        with pytest.raises(RecordTooLargeError) as refused:
            log.insert_many([b"x", b"y"], **keys)  # type: ignore[arg-type]
        assert refused.value.results == [None, None]
    assert all_records(log) == before


def test_the_largest_record_and_key_pass(log: ziplog.Log) -> None:
    payload, key = bytes(1024 * 1024), bytes(4096)
    record = log.read_record(log.insert_after(payload, key=key))
    assert (record.payload, record.key) == (payload, key)
    rids = log.insert_many([payload] * 9)
    assert [log.read_record(rid).payload for rid in rids] == [payload] * 9
    keys = [key, None, *[key] * 300]
    rids = log.insert_many([b"x"] * len(keys), keys=keys)
    assert [log.read_record(rid).key for rid in rids] == keys


def test_a_str_payload_is_refused(log: ziplog.Log) -> None:
    for attempt in (
        lambda: log.insert_after("text"),  # type: ignore[arg-type]
        lambda: log.insert_many([b"x", "text"]),  # type: ignore[list-item]
        lambda: log.insert_nowait("text"),  # type: ignore[arg-type]
        lambda: log.insert_after(b"x", key=7),  # type: ignore[arg-type]
        lambda: log.insert_after(b"x", "3@0"),  # type: ignore[arg-type]
        lambda: log.read_record("3@0"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            attempt()


def test_recent_is_no_single_position(log: ziplog.Log) -> None:
    for attempt in (
        lambda: log.insert_after(b"x", ziplog.RID_RECENT),
        lambda: log.read_record(ziplog.RID_RECENT),
        lambda: log.trim(ziplog.RID_RECENT),
    ):
        with pytest.raises(
            ConfigError, match="RID_RECENT is for subscriptions, speculations and cursors"
        ):
            attempt()


@pytest.mark.parametrize("rid", [RecordId(2**63, 0), RecordId(1, 2**31), RecordId(1, -1)])
def test_a_rid_out_of_range_is_refused(log: ziplog.Log, rid: RecordId) -> None:
    with pytest.raises(ConfigError):
        log.read_record(rid)
    with pytest.raises(ConfigError):
        log.insert_after(b"x", rid)


def test_a_policy_that_names_no_shard(log: ziplog.Log) -> None:
    before = all_records(log)
    log.set_policy(ziplog.policy.pin(99))
    with pytest.raises(UnavailableError, match="shard 99"):
        log.insert_after(b"x", timeout=SHORT_S)
    log.set_policy(lambda *_: "0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shard id"):
        log.insert_after(b"x")
    log.set_policy(ziplog.policy.random())
    assert all_records(log) == before


# --- positions -------------------------------------------------------------------------------


def test_positions_without_a_record(log: ziplog.Log) -> None:
    first = log.insert_after(b"first")
    ahead = log.insert_after(b"ahead", RecordId(first.gsn + 1000, first.shard))
    assert ahead.gsn > first.gsn + 1000
    skipped = next(
        RecordId(gsn, ahead.shard)
        for gsn in range(first.gsn + 1, ahead.gsn)
        if owner_of(log, gsn) == ahead.shard
    )
    wait_until(lambda: "no-op" in why(log, skipped), f"{skipped} is a no-op")
    # A no-op is as good an `after` as a record.
    assert log.insert_after(b"after a no-op", skipped) > skipped
    assert "there is no such shard" in why(log, RecordId(first.gsn, 77))
    assert "does not own" in why(log, RecordId(first.gsn, 1 - first.shard))
    assert why(log, RecordId(NEVER_GIVEN, 0))
    assert "before every record" in why(log, ziplog.RID_GENESIS)


def owner_of(log: ziplog.Log, gsn: int) -> int:
    answers = {shard: why(log, RecordId(gsn, shard)) for shard in (0, 1)}
    return next(shard for shard, answer in answers.items() if "does not own" not in answer)


def why(log: ziplog.Log, rid: RecordId) -> str:
    """Why there is no record at `rid`."""
    with pytest.raises(NoSuchRecordError) as missing:
        log.read_record(rid)
    assert missing.value.rid == rid
    return str(missing.value)


def test_a_position_that_was_never_assigned(log: ziplog.Log) -> None:
    before = all_records(log)
    for attempt in (
        lambda: log.insert_after(b"x", RecordId(NEVER_GIVEN, 0)),
        lambda: log.insert_many([b"x", b"y"], RecordId(NEVER_GIVEN, 1)),
        lambda: log.insert_nowait(b"x", RecordId(NEVER_GIVEN, 0)).result(LATE_S),
        lambda: log.trim(RecordId(NEVER_GIVEN, 0)),
    ):
        with pytest.raises(NoSuchRecordError):
            attempt()
    with pytest.raises(NoSuchRecordError):
        log.flush()
    assert all_records(log) == before
    log.insert_after(b"the log goes on")


def test_an_after_of_another_or_an_unknown_shard_is_only_a_position(log: ziplog.Log) -> None:
    first = log.insert_after(b"first")
    for shard in (1 - first.shard, 77):
        assert log.insert_after(b"next", RecordId(first.gsn, shard)).gsn > first.gsn


def test_a_trimmed_position(log: ziplog.Log) -> None:
    old = log.insert_after(b"old")
    first = log.insert_after(b"first", old)
    log.trim(first)
    with pytest.raises(TrimmedError) as trimmed:
        log.read_record(old)
    assert trimmed.value.first.gsn == first.gsn
    for start in (ziplog.RID_GENESIS, old):
        with pytest.raises(TrimmedError) as trimmed:
            log.subscribe(start, timeout=LATE_S).fetch()
        assert trimmed.value.first.gsn == first.gsn
    assert log.read_record(first).payload == b"first"
    assert log.insert_after(b"after a trimmed one", old) > first


# --- wrong addresses -------------------------------------------------------------------------


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Listen, and treat each connection with `serve`, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()


def garbage(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)) * 64)


def greeting(connection: socket.socket) -> None:
    """Speak ZMTP 3.1 as far as the greeting, and then nonsense."""
    hello = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
    connection.sendall(hello + b"\x04\x29\x05READY" + b"\xff" * 200)


def http_like(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno\n")
    connection.close()


def nothing(_: socket.socket) -> None:
    """Accept, and say nothing."""


@pytest.mark.parametrize("serve", [garbage, greeting, http_like, nothing])
def test_another_program_listens_at_the_bootstrap_address(
    serve: Callable[[socket.socket], None],
) -> None:
    with (
        listening(serve) as endpoint,
        pytest.raises(UnavailableError, match=re.escape(endpoint)),
    ):
        ziplog.connect(endpoint, timeout=SHORT_S)


def test_no_process_listens_at_the_bootstrap_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(UnavailableError) as unavailable:
        ziplog.connect([endpoint, "host.invalid:7400"], timeout=SHORT_S)
    assert endpoint in str(unavailable.value)
    assert "host.invalid:7400" in str(unavailable.value)


def test_a_real_web_server_at_the_bootstrap_address() -> None:
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            endpoint = f"127.0.0.1:{server.server_port}"
            with pytest.raises(UnavailableError, match=re.escape(endpoint)):
                ziplog.connect(endpoint, timeout=SHORT_S)
        finally:
            server.shutdown()
            thread.join()


def test_the_address_of_a_storage_server_is_refused(cluster: Cluster) -> None:
    endpoint = cluster.config.shards[0].replicas[0].endpoint
    with pytest.raises(UnavailableError, match=re.escape(endpoint)):
        ziplog.connect(endpoint, timeout=SHORT_S)


@pytest.mark.parametrize("service", ["mms", "failure_handlers"])
def test_a_consensus_port_names_itself(cluster: Cluster, service: str) -> None:
    node = getattr(cluster.config, service)[0]
    endpoint = f"{node.host}:{node.raft_port}"
    why = (
        f"this is the consensus port of {node.name} of cluster 'local'; its membership service is"
        f" at {cluster.endpoint}"
    )
    with pytest.raises(UnavailableError, match=re.escape(f"{endpoint} ({why})")):
        ziplog.connect(endpoint, timeout=LATE_S)


def test_one_good_address_of_several_suffices(cluster: Cluster) -> None:
    with (
        listening(nothing) as silent,
        listening(garbage) as loud,
        ziplog.connect(f"{silent},{loud},{cluster.endpoint}") as log,
    ):
        assert log.read_record(log.insert_after(b"found")).payload == b"found"


@pytest.mark.parametrize("text", ["", "localhost", "a:b", "127.0.0.1:0", "127.0.0.1:65536", "x:1,"])
def test_a_malformed_address_is_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        ziplog.connect(text)


# --- a closed client -------------------------------------------------------------------------


def test_a_closed_client_raises_closed_error(cluster: Cluster) -> None:
    log = cluster.connect()
    rid = log.insert_after(b"x")
    subscription = log.subscribe(rid)
    log.close()
    log.close()
    calls: list[Callable[[], Any]] = [
        lambda: log.insert_after(b"x"),
        lambda: log.insert_many([b"x"]),
        lambda: log.insert_nowait(b"x"),
        log.flush,
        lambda: log.read_record(rid),
        log.subscribe,
        lambda: next(subscription),
        subscription.fetch,
        lambda: log.trim(rid),
        log.check_tail,
        log.cluster,
        lambda: log.set_policy(ziplog.policy.random()),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    subscription.close()


def test_closing_ends_the_calls_under_way_in_other_threads(cluster: Cluster) -> None:
    log = cluster.connect(timeout=100.0)
    end = log.check_tail()
    subscription = log.subscribe(RecordId(end.gsn + 1, 0))
    log.set_policy(ziplog.policy.pin(99))
    pending = log.insert_nowait(b"never")
    raised: list[Exception] = []
    entered = threading.Barrier(3)

    def call(what: Callable[[], object]) -> None:
        entered.wait()
        try:
            what()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            raised.append(error)

    threads = [
        threading.Thread(target=call, args=(what,))
        for what in (lambda: log.insert_after(b"never"), lambda: next(subscription))
    ]
    for thread in threads:
        thread.start()
    entered.wait()
    log.close()
    for thread in threads:
        thread.join(LATE_S)
        assert not thread.is_alive()
    assert [type(error) for error in raised] == [ClosedError, ClosedError]
    with pytest.raises(ClosedError):
        pending.result(LATE_S)
