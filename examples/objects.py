"""An object store on the log: each shard's objects follow from that shard's records alone.

    python examples/objects.py

All updates of an object go to one shard, chosen by its key, so a replica reads that shard only and
waits for no other. Updates are appends: an update that returned comes before every later one. A
replica answers `get` from its memory, which may be old; `read` asks the shard for a barrier first
and is linearizable. A conditional update is a record like any other: every replica decides it alike
when it reaches the record. (C. Ding, *Building a Scalable Shared Log*, section 3.4: vScalog.)

The example keeps the shards that it starts with. A shard that is added later would get some keys
of the others, and their objects would have to move. So would those of a removed shard.
"""

from __future__ import annotations

import tempfile
from typing import Any, Final

import msgspec

import ziplog
from ziplog import RID_GENESIS, Record, RecordId, policy
from ziplog.local import Cluster

_FETCH: Final = 1000
_SHORT_S: Final = 0.005


class Update(msgspec.Struct):
    """The payload of a record; its key is the object's."""

    value: Any
    #: The update takes effect if the object has this value; None: the object does not exist.
    expected: Any = None
    is_conditional: bool = False


class Replica:
    """The objects of one shard. For one thread."""

    def __init__(self, log: ziplog.Log, shard: int) -> None:
        self.objects: Final[dict[bytes, Any]] = {}
        self._subscription: Final = log.subscribe(RID_GENESIS, shards=[shard])
        self._decode: Final = msgspec.json.Decoder(Update).decode

    def follow(self, timeout: float) -> None:
        """Apply the next updates; wait for one for `timeout` seconds at most."""
        for record in self._subscription.fetch(_FETCH, timeout=timeout):
            self._apply(record)

    def catch_up(self) -> None:
        """Apply every update that completed before this call."""
        barrier = self._subscription.barrier()
        while self._subscription.position.gsn < barrier.gsn:
            self.follow(_SHORT_S)  # the position also moves without a record

    def decide(self, rid: RecordId) -> bool:
        """Apply all updates up to `rid`, which is new; return whether it took effect."""
        while True:
            for record in self._subscription.fetch(1, timeout=1.0):
                has_effect = self._apply(record)
                if record.rid == rid:
                    return has_effect

    def _apply(self, record: Record) -> bool:
        assert record.key is not None, "every update has the key of its object"
        update = self._decode(record.payload)
        if update.is_conditional and self.objects.get(record.key) != update.expected:
            return False
        self.objects[record.key] = update.value
        return True

    def close(self) -> None:
        """Stop following the shard."""
        self._subscription.close()


class ObjectStore:
    """A client with a replica of each shard. For one thread; any number of stores share a log."""

    def __init__(self, bootstrap: str, *, timeout: float = 30.0) -> None:
        """Connect. `bootstrap`: "host:port" of the membership service; `timeout`: in seconds."""
        self._choose: Final = policy.by_key_hash()
        self._log: Final = ziplog.connect(bootstrap, timeout=timeout)
        found = self._log.cluster()["shards"]
        for shard in found:
            if shard["state"] in {"leaving", "finalized"}:
                self._log.close()
                raise ziplog.UnavailableError(f"shard {shard['id']} was removed: move its objects")
        shards = [shard["id"] for shard in found]
        self.replicas: Final = {shard: Replica(self._log, shard) for shard in shards}

    def _shard(self, key: bytes) -> int:
        """Return an object's shard, also while it recovers: as a client's policy, it would move."""
        return self._choose(b"", key, sorted(self.replicas))

    def _append(self, key: bytes, update: Update) -> RecordId:
        return self._log.append(msgspec.json.encode(update), key=key, shard=self._shard(key))

    def put(self, key: bytes, value: Any) -> None:
        """Set an object's value; JSON."""
        self._append(key, Update(value))

    def test_and_put(self, key: bytes, expected: Any, value: Any) -> bool:
        """Set an object's value if it is `expected` (None: there is none); return whether it was.

        An update without effect stays in the log, where all replicas pass it.
        """
        rid = self._append(key, Update(value, expected, is_conditional=True))
        return self.replicas[rid.shard].decide(rid)

    def get(self, key: bytes) -> Any:
        """Return the value in memory at once; it may be old. None: there is no such object."""
        return self.replicas[self._shard(key)].objects.get(key)

    def read(self, key: bytes) -> Any:
        """Return the newest value: every update that completed before this call counts."""
        replica = self.replicas[self._shard(key)]
        replica.catch_up()
        return replica.objects.get(key)

    def close(self) -> None:
        """Close the client."""
        for replica in self.replicas.values():
            replica.close()
        self._log.close()


def main() -> None:
    """Show two stores on one log."""
    with tempfile.TemporaryDirectory() as directory, Cluster(directory, shards=2) as cluster:
        one, other = ObjectStore(cluster.endpoint), ObjectStore(cluster.endpoint)
        one.put(b"motto", "order at one round trip")
        print("in the other store's memory:", other.get(b"motto"))
        print("read by the other store:    ", other.read(b"motto"))
        print("first claim of the name:    ", one.test_and_put(b"name", None, "one"))
        print("second claim of the name:   ", other.test_and_put(b"name", None, "other"))
        print("the name:                   ", one.read(b"name"))
        one.close()
        other.close()


if __name__ == "__main__":
    main()
