"""The exception tree, and the attributes of each exception."""

from __future__ import annotations

import copy
import inspect
from multiprocessing.reduction import ForkingPickler

import pytest

import ziplog
from logdb import errors as logdb_errors
from ziplog import errors
from ziplog.errors import (
    ClosedError,
    ClusterMismatchError,
    ConfigError,
    CursorHeldError,
    CursorLostError,
    DeadlineError,
    LocalProtocolError,
    NoSuchRecordError,
    OutcomeUnknownError,
    ProtocolError,
    RecordTooLargeError,
    TrimHeldError,
    TrimmedError,
    UnavailableError,
    VersionError,
    ZiplogError,
)
from ziplog.types import RecordId

RID = RecordId(7, 2)


@pytest.mark.parametrize(
    ("error", "kinds", "retriable", "said"),
    [
        (ConfigError("port", 0, "1 to 65535", "a.toml"), (ValueError,), False, "a.toml: port"),
        (ConfigError("p", 0, "1", "a.toml", message="no"), (ValueError,), False, "a.toml: no"),
        (ClosedError(), (), False, "this client is closed; connect again"),
        (ClosedError("this door", "open it"), (), False, "this door is closed; open it"),
        (UnavailableError("no leader"), (), True, "no leader"),
        (DeadlineError("late"), (UnavailableError, TimeoutError), True, "late"),
        (OutcomeUnknownError("?", shard=1, seq=2), (TimeoutError,), False, "?"),
        (RecordTooLargeError(9, 5), (ValueError,), False, "9 bytes"),
        (NoSuchRecordError(RID, "a no-op"), (LookupError,), False, "7@2: a no-op"),
        (TrimmedError(RID), (LookupError,), False, "7@2"),
        (ProtocolError("bad"), (), False, "bad"),
        (LocalProtocolError("ours"), (ProtocolError,), False, "ours"),
    ],
)
def test_the_tree(error: ZiplogError, kinds: tuple[type, ...], retriable: bool, said: str) -> None:
    assert isinstance(error, ZiplogError)
    assert all(isinstance(error, kind) for kind in kinds)
    assert error.retriable is retriable
    assert said in str(error)
    assert error.results == []
    assert getattr(ziplog, type(error).__name__) is type(error)


def test_an_unknown_outcome_is_not_unavailability() -> None:
    assert not issubclass(OutcomeUnknownError, UnavailableError)


def test_attributes_of_errors() -> None:
    config = ConfigError("port", 0, "1 to 65535", "a.toml")
    assert (config.name, config.value, config.allowed, config.where) == (
        "port", 0, "1 to 65535", "a.toml",
    )  # fmt: skip
    assert str(config) == "a.toml: port is 0; it must be 1 to 65535"
    sentence = ConfigError("port", 0, "1 to 65535", message="port 0 is reserved")
    assert (sentence.name, sentence.value, sentence.allowed) == ("port", 0, "1 to 65535")
    assert str(sentence) == sentence.message == "port 0 is reserved"
    large = RecordTooLargeError(9, 5, "key", 3)
    assert (large.size, large.limit, large.what, large.index) == (9, 5, "key", 3)
    assert str(large).startswith("key")
    assert TrimmedError(RID).first == RID
    assert NoSuchRecordError(RID, "").rid == RID
    unknown = OutcomeUnknownError("?", shard=1, seq=2)
    assert (unknown.shard, unknown.seq) == (1, 2)


def test_only_the_client_that_raised_it_can_resolve_an_unknown_outcome() -> None:
    unknown = OutcomeUnknownError("?", shard=1, seq=2)
    with pytest.raises(ClosedError):
        unknown.resolve()
    unknown.resolver = lambda timeout: (RID, timeout)
    assert unknown.resolve(3.0) == (RID, 3.0)
    assert unknown.resolve() == (RID, None)


def test_results_are_not_shared() -> None:
    first, second = ClosedError(), ClosedError()
    first.results.append(RID)
    assert second.results == []


@pytest.mark.parametrize(
    "error",
    [
        ZiplogError("any"),
        ConfigError("port", 0, "1 to 65535", "a.toml"),
        ConfigError("p", 0, "1", "a.toml", message="no"),
        ClosedError("this door", "open it"),
        ClusterMismatchError("a", "b", "host:1"),
        CursorHeldError("orders", "host:7"),
        CursorLostError("orders", 3, "it was deleted"),
        DeadlineError("late"),
        LocalProtocolError("ours"),
        NoSuchRecordError(RID, "a no-op"),
        OutcomeUnknownError("?", shard=1, seq=2),
        ProtocolError("bad"),
        RecordTooLargeError(9, 5, "key", 3),
        TrimHeldError("orders", RID, "host:7"),
        TrimmedError(RID),
        UnavailableError("no leader"),
        VersionError("old"),
        logdb_errors.NoCheckpointError(RID),
        logdb_errors.SnapshotExpired("60 s without a read"),
        logdb_errors.TooManyReadsError(9, 5),
        logdb_errors.TransactionAborted([b"a"], ""),
        logdb_errors.TransactionClosed("committed"),
        logdb_errors.UnsupportedValueError({1}, "it is a set"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pass_from_process_to_process(error: ZiplogError) -> None:
    error.results = [RID, None]
    for same in (copy.copy(error), ForkingPickler.loads(ForkingPickler.dumps(error))):
        assert type(same) is type(error)
        assert str(same) == str(error)
        assert vars(same) == vars(error)
        assert same.results is not error.results


def test_copy_of_an_unknown_outcome_cannot_be_resolved() -> None:
    unknown = OutcomeUnknownError("?", shard=1, seq=2, doubt=lambda: None)
    unknown.resolver = lambda timeout: (RID, timeout)
    same = ForkingPickler.loads(ForkingPickler.dumps(unknown))
    assert (str(same), same.shard, same.seq) == ("?", 1, 2)
    with pytest.raises(ClosedError):
        same.resolve()


def test_the_docstring_shows_the_whole_tree() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    for one in classes:
        if issubclass(one, ZiplogError):
            assert one.__name__ in (errors.__doc__ or "")
