"""The blocking API on real sockets: threads, Ctrl-C, closing."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.forking import in_child
from tests.unit.ziplog.client.served import ServedCluster
from ziplog import RID_GENESIS, RID_RECENT, RecordId, wire
from ziplog.client.common.requests import Counters, InsertRequest, StatusRequest
from ziplog.client.engines import blocking_engine
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.client.engines.signals import SHIELD
from ziplog.core.node import Complete, Received
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.runtime.clock import now_ns
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.core.node import Effect, Event


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


@pytest.fixture(name="log")
def _log(cluster: ServedCluster) -> Iterator[ziplog.Log]:
    log = ziplog.connect(cluster.endpoint)
    yield log
    log.close()


@pytest.fixture(autouse=True)
def _no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make polling so rare that a waiting thread must be handed the driver role."""
    monkeypatch.setattr(blocking_engine, "_POLL_S", 3600.0)


@pytest.fixture(name="ctrl_c")
def _ctrl_c() -> Iterator[Any]:
    """Python's own handler, which a shell's background job does not have."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, former)


def test_all_operations(log: ziplog.Log) -> None:
    first = log.insert_after(b"first")
    second = log.insert_after(bytearray(b"second"), first, key="clé")
    assert second > first
    rids = log.insert_many([b"x", memoryview(b"y"), b""], after=second)
    assert rids == sorted(rids)
    record = log.read_record(second)
    assert (record.rid, record.payload, record.key) == (second, b"second", "clé".encode())
    assert record.timestamp.tzinfo is not None
    with log.subscribe(follow=False) as subscription:
        assert [r.payload for r in subscription] == [b"first", b"second", b"x", b"y", b""]
        assert list(subscription) == []
        assert subscription.fetch() == []
        assert subscription.caught_up
    assert log.check_tail() == rids[-1]
    assert log.cluster() == {"cluster": "fake"}
    stats = log.stats()
    assert stats["inserts"] == stats["fast_path"] + stats["slow_path"] == 5
    assert (stats["redirects"], stats["reads"]) == (0, 1)
    log.trim(second)
    with pytest.raises(ziplog.TrimmedError) as caught:
        log.subscribe()
    assert caught.value.first == second
    assert log.insert_many([]) == []


class _Counter:
    """A node that completes its call once it has received a number of messages."""

    counters = Counters()
    is_batch_open = False

    def __init__(self, count: int) -> None:
        self.requests: list[int] = []
        self._count = count

    def step_call(self, _number: int, _request: object, _now: int) -> list[Effect]:
        return []

    def step_ack(self, _src: bytes, _ack: wire.InsertAck, _now: int) -> list[Effect]:
        return []

    def step(self, event: Event, _now: int) -> list[Effect]:
        if isinstance(event, Received):
            assert isinstance(event.message, wire.Synced)
            self.requests.append(event.message.request)
            if len(self.requests) == self._count:
                return [Complete(1, "all")]
        return []

    def next_wakeup(self) -> int | None:
        return None

    def check(self) -> None:
        """Hold no invariant."""


def test_no_frame_of_a_large_burst_is_lost() -> None:
    count = 3 * blocking_engine._BATCH + 7
    server = Transport("127.0.0.1:0")
    core = _Counter(count)
    engine = BlockingEngine(core)
    try:
        assert server.endpoint is not None
        engine.engine.transport.connect(b"server", server.endpoint)
        engine.engine.transport.send(b"server", b"hello")
        while (first := server.receive()) is None:
            server.wait(None)
        for request in range(1, count + 1):
            server.send(first[0], wire.encode(wire.Synced(1, 0, 1, request, 0)))
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(engine.call, StatusRequest(NEVER))
            while not answer.done():  # Frames that the socket did not accept are sent here.
                server.wait(NS_PER_MS)
        assert answer.result() == "all"
        assert core.requests == list(range(1, count + 1))
    finally:
        engine.close()
        server.close()


def test_a_following_subscription(log: ziplog.Log) -> None:
    with log.subscribe(timeout=0.01) as subscription:
        assert subscription.position == RecordId(1, 0)
        with pytest.raises(ziplog.DeadlineError):
            next(subscription)
        rids = log.insert_many([b"%d" % i for i in range(5)])
        assert [r.rid for r in subscription.fetch(2, timeout=10)] == rids[:2]
        assert subscription.position == rids[2]
        assert not subscription.caught_up
        assert next(subscription).rid == rids[2]
        assert subscription.position == rids[3]
        assert [r.rid for r in subscription.fetch()] == rids[3:]
        assert subscription.position.gsn == rids[-1].gsn + 1
        assert (subscription.caught_up, subscription.blocked_on) == (True, None)
        assert subscription.fetch(timeout=0) == []
    assert subscription.position.gsn == rids[-1].gsn + 1, "the position is known after close"
    assert list(subscription) == []
    for call in (subscription.fetch, subscription.barrier):
        with pytest.raises(ziplog.ClosedError, match="this subscription is closed"):
            call()
    subscription.close()


def test_subscription_that_is_closed_before_its_end_does_not_seem_to_end(log: ziplog.Log) -> None:
    rids = log.insert_many([b"%d" % i for i in range(5)])
    with log.subscribe(follow=False) as subscription:
        assert [record.rid for record in subscription.fetch(2)] == rids[:2]
    with pytest.raises(ziplog.ClosedError):
        subscription.fetch()
    assert subscription.position == rids[2]


def test_futures_and_flush(log: ziplog.Log) -> None:
    futures = [log.insert_nowait(b"%d" % i) for i in range(3000)]
    log.flush()
    assert len({future.result(0) for future in futures}) == 3000
    log.insert_nowait(b"x", RecordId(5, 0))
    log.flush()


def test_flush_raises_the_first_failure_once(cluster: ServedCluster, log: ziplog.Log) -> None:
    cluster.silent.add(wire.Insert)
    future = log.insert_nowait(b"x", timeout=0.05)
    with pytest.raises(ziplog.OutcomeUnknownError):
        log.flush()
    with pytest.raises(ziplog.OutcomeUnknownError):
        future.result()
    log.flush()


def test_an_unknown_outcome_can_be_resolved(cluster: ServedCluster, log: ziplog.Log) -> None:
    cluster.silent.add(wire.Insert)
    with pytest.raises(ziplog.OutcomeUnknownError) as caught:
        log.insert_after(b"x", timeout=0.05)
    with pytest.raises(ziplog.OutcomeUnknownError) as again:
        caught.value.resolve(0.05)
    cluster.silent.clear()
    rid = again.value.resolve()
    assert log.read_record(rid).payload == b"x"
    assert caught.value.resolve() == rid
    assert [record.payload for record in log.subscribe(follow=False)] == [b"x"]
    log.close()
    with pytest.raises(ziplog.ClosedError):
        caught.value.resolve()


def test_insert_that_a_recovery_lost_resolves_to_none(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    cluster.silent.add(wire.Insert)
    with pytest.raises(ziplog.OutcomeUnknownError) as single:
        log.insert_after(b"x", timeout=0.05)
    with pytest.raises(ziplog.OutcomeUnknownError) as many:
        log.insert_many([b"y"], timeout=0.05)
    assert many.value.results == [None]
    cluster.views[0] = 2
    cluster.silent.clear()
    assert single.value.resolve() is None
    assert many.value.resolve() == many.value.results == [None]
    assert not list(log.subscribe(follow=False))


def test_unknown_outcome_of_many_resolves_to_a_list(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    cluster.silent.add(wire.Insert)
    with pytest.raises(ziplog.OutcomeUnknownError) as caught:
        log.insert_many([b"x"], timeout=0.05)
    future = log.insert_nowait(b"y", timeout=0.05)
    error = future.exception(10)
    assert isinstance(error, ziplog.OutcomeUnknownError)
    cluster.silent.clear()
    with ThreadPoolExecutor(1) as pool:
        rid = pool.submit(error.resolve).result(10)
        rids = caught.value.resolve()
    assert rids == caught.value.results
    assert {r.rid: r.payload for r in log.subscribe(follow=False)} == {rid: b"y", rids[0]: b"x"}


def test_inserts_resume_when_their_shard_is_available_again(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    log.insert_after(b"x")
    cluster.silent |= {wire.Insert, wire.Locate}
    cluster.states[0] = "recovering"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(log.insert_after, b"y")
        cluster.wait_for(wire.Locate, wire.Hello)
        cluster.views[0] = 2
        cluster.states[0] = "live"
        cluster.silent.clear()
        rid = future.result(10)
    assert log.read_record(rid).payload == b"y"
    assert [record.payload for record in log.subscribe(follow=False)] == [b"x", b"y"]


def test_sync(cluster: ServedCluster, log: ziplog.Log) -> None:
    assert log.sync() == RID_GENESIS
    rids = log.insert_many([b"x", b"y"])
    assert log.sync() == rids[-1]
    cluster.silent.add(wire.Sync)
    assert log.sync(timeout=0.05) == rids[-1], "nothing was inserted since"
    log.insert_after(b"z")
    with pytest.raises(ziplog.DeadlineError):
        log.sync(timeout=0.05)


def test_leaving_the_with_block_flushes(cluster: ServedCluster) -> None:
    with ziplog.connect(cluster.endpoint) as log:
        future = log.insert_nowait(b"x")
    assert future.result(0).gsn == 1
    with pytest.raises(ziplog.ClosedError):
        log.insert_after(b"x")


def test_each_record_of_many_may_have_its_own_key(log: ziplog.Log) -> None:
    asked: list[tuple[bytes, bytes | None]] = []

    def choose(payload: bytes, key: bytes | None, live: Any) -> int:
        asked.append((payload, key))
        return int(live[0])

    log.set_policy(choose)
    rids = log.insert_many([b"x", b"y", b"z"], keys=["k", None, bytearray(b"l")])
    assert asked == [(b"x", b"k")]
    assert [log.read_record(rid).key for rid in rids] == [b"k", None, b"l"]
    assert [record.key for record in log.subscribe(follow=False)] == [b"k", None, b"l"]


def test_many_threads_share_one_client(log: ziplog.Log) -> None:
    def work(number: int) -> list[RecordId]:
        rids = [log.insert_after(b"%d" % number)]
        rids += [log.insert_after(b"%d" % number, rids[-1]) for _ in range(100)]
        assert log.read_record(rids[-1]).payload == b"%d" % number
        rids.append(log.insert_nowait(b"%d" % number).result(10))
        return rids

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    rids = [rid for result in results for rid in result]
    assert len(set(rids)) == 8 * 102
    assert len(list(log.subscribe(follow=False))) == 8 * 102


def test_a_call_is_answered_while_another_thread_waits(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    with log.subscribe() as subscription, ThreadPoolExecutor(1) as pool:
        future = pool.submit(subscription.fetch)
        rid = log.insert_after(b"x")
        assert [record.rid for record in future.result(10)] == [rid]
        cluster.silent.add(wire.Insert)
        future = pool.submit(log.insert_after, b"x", timeout=0.2)  # type: ignore[arg-type]
        assert log.read_record(rid).payload == b"x"
        with pytest.raises(ziplog.OutcomeUnknownError):
            future.result(10)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_client_in_a_forked_child_raises_closed_error(log: ziplog.Log) -> None:
    log.insert_after(b"before")

    def act() -> str:
        refusals = []
        for call in (log.check_tail, partial(log.insert_nowait, b"child"), log.flush):
            with pytest.raises(ziplog.ClosedError) as refused:
                call()
            refusals.append(str(refused.value))
        log.close()
        return "\n".join(refusals)

    refusals = in_child(act).splitlines()
    assert len(refusals) == 3
    assert set(refusals) == {
        f"the client of process {os.getpid()}, in its child, is closed; connect again to continue"
    }
    assert log.read_record(log.insert_after(b"after")).payload == b"after"


def test_close_fails_pending_calls(cluster: ServedCluster, log: ziplog.Log) -> None:
    cluster.silent.add(wire.Insert)
    subscription = log.subscribe()
    insert = partial(log.insert_after, b"under way")
    calls: list[Any] = [subscription.fetch, insert, insert]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(call) for call in calls]
        nowait = log.insert_nowait(b"under way")
        cluster.wait_for_inserts(b"under way", 6)
        log.close()
        for future in [*futures, nowait]:
            with pytest.raises(ziplog.ClosedError):
                future.result(10)
    log.close()
    calls = [
        log.check_tail, log.cluster, log.flush, log.subscribe, log.__enter__,
        partial(log.insert_many, []), partial(log.append_many, []),
        partial(log.insert_rows, [], shard=0, writer=bytes(16), batch=0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ziplog.ClosedError):
            call()
    subscription.close()


@pytest.mark.parametrize("is_alone", [True, False])
def test_ctrl_c_leaves_the_client_usable(
    cluster: ServedCluster, log: ziplog.Log, ctrl_c: Any, is_alone: bool
) -> None:
    subscription = log.subscribe()
    with ThreadPoolExecutor(1) as pool:
        driving = None if is_alone else pool.submit(lambda: list(islice(subscription, 20)))
        for number in range(20):
            cluster.silent.add(wire.Insert)
            payload = b"interrupted %d;" % number

            def interrupt(payload: bytes = payload) -> None:
                cluster.wait_for_inserts(payload)
                os.kill(os.getpid(), signal.SIGINT)

            interrupter = threading.Thread(target=interrupt)
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                log.insert_after(payload)
            interrupter.join()
            assert signal.getsignal(signal.SIGINT) is ctrl_c
            cluster.silent.clear()
            log.insert_after(b"y")
            log._core.check()
            assert not log._core._inserts.waiting, "a finished call is still pending"
        if driving is not None:
            assert len(driving.result(10)) == 20
    assert not log._engine._tickets
    assert len(list(log.subscribe(follow=False))) >= 20


def test_ctrl_c_never_interrupts_a_step(
    cluster: ServedCluster, log: ziplog.Log, ctrl_c: Any
) -> None:
    def policy(_payload: bytes, _key: bytes | None, _live: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    log.set_policy(policy)
    with pytest.raises(KeyboardInterrupt):
        log.insert_after(b"in the middle")
    cluster.wait_for_inserts(b"in the middle")
    log.set_policy(ziplog.policy.random())
    log.insert_after(b"x")
    assert signal.getsignal(signal.SIGINT) is ctrl_c


def test_ctrl_c_at_the_very_end_of_a_call_is_not_lost(log: ziplog.Log, ctrl_c: Any) -> None:
    subscription = log.subscribe()
    SHIELD.noted[int(signal.SIGINT)] = None
    with pytest.raises(KeyboardInterrupt):
        _ = subscription.position
    assert subscription.position == RecordId(1, 0)
    assert signal.getsignal(signal.SIGINT) is ctrl_c


def test_call_resumes_after_a_ctrl_c_handler_returns(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    seen = []
    former = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        cluster.silent.add(wire.Insert)

        def interrupt() -> None:
            cluster.wait_for_inserts(b"x")
            os.kill(os.getpid(), signal.SIGINT)
            cluster.silent.clear()

        thread = threading.Thread(target=interrupt)
        thread.start()
        assert log.insert_after(b"x").gsn == 1
        thread.join()
    finally:
        signal.signal(signal.SIGINT, former)
    assert seen == [1]


# --- arguments ---


def test_bad_arguments(log: ziplog.Log) -> None:
    rid = log.insert_after(b"x")
    inserts: list[Any] = [log.insert_after, log.insert_nowait, lambda x: log.insert_many([x])]
    for call in inserts:
        for payload in ("text", 5, None, [b"x"]):
            with pytest.raises(TypeError, match="bytes-like"):
                call(payload)
        with pytest.raises(ziplog.RecordTooLargeError) as caught:
            call(bytes(1024 * 1024 + 1))
        assert (caught.value.size, caught.value.limit) == (1024 * 1024 + 1, 1024 * 1024)
    with pytest.raises(TypeError):
        log.insert_many("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        log.insert_many(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        log.insert_after(b"x", key=5)  # type: ignore[arg-type]
    with pytest.raises(ziplog.RecordTooLargeError):
        log.insert_after(b"x", key=bytes(5000))
    with pytest.raises(ziplog.RecordTooLargeError):
        log.insert_many([b"x", b"y"], keys=["k", bytes(5000)])
    with pytest.raises(ziplog.ConfigError, match="not both"):
        log.insert_many([b"x"], key=b"k", keys=[b"k"])
    with pytest.raises(ziplog.ConfigError, match="keys has length 1"):
        log.insert_many([b"x", b"y"], keys=[b"k"])
    for wrong in ("1@0", 5, (1, 0), None):
        with pytest.raises(TypeError):
            log.insert_after(b"x", wrong)  # type: ignore[arg-type]
    uses: list[Any] = [log.read_record, log.trim, lambda rid: log.insert_after(b"x", rid)]
    for at in uses:
        with pytest.raises(ziplog.ConfigError):
            at(RID_RECENT)
    for timeout in (-1, float("nan"), "5"):
        with pytest.raises(ziplog.ConfigError):
            log.insert_after(b"x", timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(ziplog.ConfigError):
        log.set_policy(5)  # type: ignore[arg-type]
    for policy in (5, 0, ""):
        with pytest.raises(ziplog.ConfigError, match=r"policy is .*; it must be a callable"):
            ziplog.connect(log.endpoints, policy=policy)  # type: ignore[arg-type]
    for pattern in (None, 5, b"*"):
        with pytest.raises(TypeError, match="pattern must be a str"):
            log.cursors(pattern)  # type: ignore[arg-type]
    with pytest.raises(ziplog.ConfigError):
        log.subscribe().fetch(0)
    with pytest.raises(ziplog.NoSuchRecordError):
        log.read_record(RID_GENESIS)
    assert log.stats()["inserts"] == 1
    assert log.read_record(rid).payload == b"x"
    assert log.insert_after(bytes(1024 * 1024)).gsn > rid.gsn


def test_zero_timeout_still_polls(log: ziplog.Log) -> None:
    subscription = log.subscribe()
    assert subscription.fetch(timeout=0) == []
    rid = log.insert_after(b"y", timeout=float("inf"))
    while not (records := subscription.fetch(timeout=0)):
        continue
    assert [record.rid for record in records] == [rid]


def test_reply_that_arrived_during_a_pause_counts_before_the_timers(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    with ziplog.connect(cluster.endpoint) as other, log.subscribe() as subscription:
        other.insert_many([bytes(1000)] * 300)
        assert subscription.fetch()
        cluster.wait_for(wire.Credit)
        # The caller does something else for 5 s, and does not step the client.
        engine = log._engine.engine
        engine._clock = lambda: now_ns() + 5 * NS_PER_S  # type: ignore[misc]
        other.insert_after(b"x")
        while subscription.fetch()[-1].payload != b"x":
            pass
    assert [type(each) for each in cluster.received].count(wire.Subscribe) == 1


def test_client_without_time_limits_connects_inserts_and_flushes(cluster: ServedCluster) -> None:
    with ziplog.connect(cluster.endpoint, timeout=float("inf")) as log:
        assert log.insert_after(b"x").gsn == 1
        cluster.silent = {wire.Insert}
        future = log.insert_nowait(b"y")
        cluster.wait_for_inserts(b"y")
        threading.Timer(0, cluster.silent.clear).start()
        log.flush()
        assert future.result(0).gsn > 1


def test_malformed_messages_are_counted_and_harmless(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    log.insert_after(b"x")
    cluster.garbage = b"\xc1garbage"
    log.insert_after(b"x")
    assert log.stats()["protocol_errors"] == 1


def test_a_message_that_cannot_be_encoded_fails_its_call_only(
    log: ziplog.Log, caplog: pytest.LogCaptureFixture
) -> None:
    first = log.insert_after(b"x")
    unencodable = RecordId(2**64, 0)
    request = InsertRequest(NEVER, [b"y"], unencodable, None, 0)
    with pytest.raises(ziplog.LocalProtocolError):
        log._engine.call(request)
    assert "dropped a message: Insert cannot be encoded: " in caplog.text
    assert log.read_record(first).payload == b"x"
    retries = caplog.text.count("dropped a message")
    engine = log._engine.engine
    engine._clock = lambda: now_ns() + 5 * NS_PER_S  # type: ignore[misc]
    assert log._engine.step_between_calls() is False
    assert caplog.text.count("dropped a message") > retries, "it is sent again"
    assert log.read_record(first).payload == b"x"


def test_shards_are_added_and_removed(cluster: ServedCluster, log: ziplog.Log) -> None:
    log.add_shard(3, {"a": "127.0.0.1:1", "b": "127.0.0.1:2"})
    log.remove_shard(3, timeout=5)
    log.finalize_shard(3)
    asked = [m for m in cluster.received if isinstance(m, wire.ChangeShard)]
    assert [(m.shard, m.change, [r.name for r in m.replicas]) for m in asked] == [
        (3, "add", ["a", "b"]), (3, "remove", []), (3, "finalize", []),
    ]  # fmt: skip
    cluster.refusal = "last-shard"
    with pytest.raises(ziplog.ConfigError, match="last shard"):
        log.remove_shard(0)
    cluster.silent.add(wire.ChangeShard)
    with pytest.raises(ziplog.DeadlineError, match=r"shard 0 of .* was not finalized"):
        log.finalize_shard(0, timeout=0.05)
    with pytest.raises(ziplog.ConfigError, match="replicas is"):
        log.add_shard(4, {})
