"""The object store of examples/objects.py is linearizable, and its replicas agree."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from objects import ObjectStore

import ziplog
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = (b"a", b"b", b"c")
CLIENTS = 3
CALLS = 40


class Call(NamedTuple):
    """A call of a store, and its result."""

    called: int
    returned: int
    name: str
    key: bytes
    arguments: tuple[Any, ...]
    result: Any


def applied(call: Call, value: Any) -> tuple[bool, Any]:
    """Return whether a call's result is right for an object's value, and the value after it."""
    match call.name:
        case "put":
            return True, call.arguments[0]
        case "read":
            return call.result == value, value
    expected, new = call.arguments
    return call.result == (value == expected), new if value == expected else value


def is_linearizable(calls: list[Call]) -> bool:
    """Whether some order of one object's calls explains their results (Wing and Gong)."""
    calls = sorted(calls)
    seen: set[tuple[frozenset[int], Any]] = set()
    stack: list[tuple[frozenset[int], Any]] = [(frozenset(range(len(calls))), None)]
    while stack:
        left, value = stack.pop()
        if not left:
            return True
        if (left, value) in seen:
            continue
        seen.add((left, value))
        first_return = min(calls[index].returned for index in left)
        for index in left:
            if calls[index].called <= first_return:
                is_right, after = applied(calls[index], value)
                if is_right:
                    stack.append((left - {index}, after))
    return False


def test_order_of_calls_matters() -> None:
    put = Call(1, 2, "put", b"a", (7,), None)
    assert is_linearizable([put, Call(3, 4, "read", b"a", (), 7)])
    assert not is_linearizable([put, Call(3, 4, "read", b"a", (), None)])
    assert is_linearizable([put, Call(1, 4, "read", b"a", (), None)])
    assert not is_linearizable([put, Call(3, 4, "test_and_put", b"a", (None, 8), True)])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("objects"), shards=2) as cluster:
        yield cluster


def work(store: ObjectStore, number: int, done: list[Call]) -> None:
    """Make random calls, and record them."""
    draw = random.Random(number)
    for index in range(CALLS):
        key, value = draw.choice(KEYS), f"{number}.{index}"
        name = draw.choice(("put", "read", "test_and_put"))
        arguments: tuple[Any, ...] = {
            "put": (value,), "read": (), "test_and_put": (store.get(key), value),
        }[name]  # fmt: skip
        called = time.monotonic_ns()
        result = getattr(store, name)(key, *arguments)
        done.append(Call(called, time.monotonic_ns(), name, key, arguments, result))


def test_stores_are_linearizable_and_agree_while_a_server_dies(cluster: Cluster) -> None:
    stores = [ObjectStore(cluster.endpoint) for _ in range(CLIENTS)]
    done: list[list[Call]] = [[] for _ in stores]
    threads = [
        threading.Thread(target=work, args=(store, number, done[number]))
        for number, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    while not any(len(calls) > CALLS // 4 for calls in done):
        threads[0].join(0.01)
    cluster.kill("shard-0-0")
    for thread in threads:
        thread.join()
    calls = [call for one in done for call in one]
    assert len(calls) == CLIENTS * CALLS
    for key in KEYS:
        assert is_linearizable([call for call in calls if call.key == key])
    final = [{key: store.read(key) for key in KEYS} for store in stores]
    assert final[0] == final[1] == final[2]
    assert any(call.result is True for call in calls), "no conditional update took effect"
    assert any(call.result is False for call in calls), "all conditional updates took effect"
    for store in stores:
        store.close()


def test_object_stays_at_its_shard_while_the_shard_recovers(cluster: Cluster) -> None:
    store, other = ObjectStore(cluster.endpoint), ObjectStore(cluster.endpoint)
    keys = [b"%d" % number for number in range(20)]
    for turn in range(3):
        cluster.kill(f"shard-{turn % 2}-0")
        for key in keys:
            store.put(key, turn)
        assert [other.read(key) for key in keys] == [turn] * len(keys)
    store.close()
    other.close()


def test_old_value_is_read_at_once_and_the_newest_after_a_barrier(cluster: Cluster) -> None:
    one, other = ObjectStore(cluster.endpoint), ObjectStore(cluster.endpoint)
    one.put(b"key", {"is": "new"})
    assert other.get(b"key") is None
    assert other.read(b"key") == other.get(b"key") == {"is": "new"}
    assert not one.test_and_put(b"key", None, "taken")
    assert one.test_and_put(b"key", {"is": "new"}, "changed")
    assert other.read(b"key") == "changed"
    one.close()
    other.close()


def test_a_store_is_refused_at_a_log_with_a_removed_shard(cluster: Cluster) -> None:
    """A put of an object of that shard would wait for ever."""
    cluster.finalize_shard(1)
    with pytest.raises(ziplog.UnavailableError, match="shard 1 was removed"):
        ObjectStore(cluster.endpoint)
