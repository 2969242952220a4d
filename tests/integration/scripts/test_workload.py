"""A workload on a real cluster: its history is clean, and readable when a client was killed."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from random import Random
from typing import TYPE_CHECKING

import pytest
import workload as command
from hypothesis import given
from hypothesis import strategies as st

import ziplog
from tests.history import events
from tests.history.clients import OPERATIONS, LogPlan
from tests.history.observed import UNKNOWN, gather
from tests.history.payloads import FOREIGN, MIN_BYTES, number_of, payload
from tests.history.rules import check
from tests.history.workload import Workload, losses_of, read_all
from tests.unit.scripts import mutations_of_appends
from tests.unit.scripts.mutations import MUTATIONS, Lines
from tests.unit.scripts.simulated import write
from tests.waiting import wait_until
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

# The imported module registers its mutations.
assert mutations_of_appends

#: Needs what no calm history has.
NOT_IN_A_CALM_HISTORY = {"resolved_in_two_ways", "read_what_was_trimmed"}


@given(st.integers(0, 2**63), st.integers(MIN_BYTES, 3000), st.data())
def test_a_payload_shows_its_number_and_any_damage(
    number: int, size: int, data: st.DataObject
) -> None:
    contents = bytearray(payload(number, size))
    assert len(contents) == size
    assert number_of(contents) == number
    contents[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert number_of(contents) == FOREIGN
    assert number_of(contents[: MIN_BYTES - 1]) == FOREIGN


def test_a_mix_names_known_operations() -> None:
    assert command.mix("insert=3,read=1") == {"insert": 3, "read": 1}
    with pytest.raises(ValueError, match="'fly' is none of insert"):
        command.mix("fly=1")


def test_losses_are_taken_from_the_status() -> None:
    loss = {"shard": 1, "start": 5, "stop": 9, "epochs": [0, 0]}
    assert losses_of({"losses": [loss]}) == {(1, 5, 9)}
    assert losses_of({}) == set()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The history of all operations, two clients and two subscribers, one client killed."""
    folder = tmp_path_factory.mktemp("workload")
    with Cluster(folder / "data", failure_handlers=0) as cluster:
        # Generous: a shard may be unavailable for some seconds.
        plan = LogPlan(
            bootstrap=cluster.endpoint,
            directory=str(folder / "history"),
            mix=dict.fromkeys(OPERATIONS, 1),
            timeout_s=60.0,
            operations=300,
            appends=0.3,
        )
        with Workload(plan, 2, 3) as workload:
            killed = workload.clients.start()
            written = folder / "history" / f"client-{killed}{events.SUFFIX}"
            wait_until(
                lambda: written.exists() and written.stat().st_size > 10_000,
                "it works",
                deadline_s=100,
            )
            workload.clients.kill(killed)
            wait_until(
                lambda: not workload.clients.running(),
                "the others have done it all",
                deadline_s=100,
            )
        with plan.recorder("trial") as recorder:
            recorder.call(events.Fault(events.now(), "one client was killed"))
        assert read_all(plan) > 0
    return folder / "history"


@pytest.mark.timeout(300)
def test_a_recorded_history_is_clean(recorded: Path) -> None:
    observed = gather(events.files_of([recorded]))
    assert check(observed).violations == []
    lines = [e for path in observed.files for _, e in events.read(path)]
    kinds = Counter(type(event) for event in lines)
    for kind in (events.Delivered, events.Found, events.TailIs, events.Synced, events.Trimmed):
        assert kinds[kind] > 0
    assert kinds[events.Fault] == 1
    errors = {e.error for e in lines if isinstance(e, events.Failed)}
    assert errors <= {"NoSuchRecordError", "TrimmedError"}
    # Only the killed client does not know what became of its last call.
    states = observed.records.state
    unknown = {
        observed.where(observed.records.source[i]).split(":")[0]
        for i in range(len(states))
        if states[i] == UNKNOWN
    }
    assert unknown <= {f"client-3{events.SUFFIX}"}
    assert any(len(s.parts) > 1 for s in observed.subscriptions)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(MUTATIONS.keys() - NOT_IN_A_CALM_HISTORY))
def test_each_mutation_of_a_recorded_history_is_found(
    recorded: Path, tmp_path: Path, name: str
) -> None:
    mutate, rules = MUTATIONS[name]
    lines: Lines = {
        path.name.removesuffix(events.SUFFIX): [e for _, e in events.read(path)][1:]
        for path in events.files_of([recorded])
    }
    broken = deepcopy(lines)
    assert any(mutate(broken, Random(seed)) for seed in range(20))
    write(tmp_path / "history", broken)
    observed = gather(events.files_of([tmp_path / "history"]))
    assert {v.rule for v in check(observed).violations} & rules


def test_the_command_records_and_reads_at_the_end(
    tmp_path: Path, ziplog_cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "history"
    arguments = ["--bootstrap", ziplog_cluster.endpoint, "--history", str(history), "--chains"]
    options = ["--operations", "20", "--clients", "1", "--subscribers", "1", "--rate", "200"]
    assert command.main([*arguments, *options]) == 0
    assert "records in the log" in capfd.readouterr().out
    observed = gather(events.files_of([history]))
    assert len(observed.records) > 0
    # Others insert into that log too: what this history does not know is a phantom, and no more.
    assert {v.rule for v in check(observed).violations} <= {"phantom"}


def test_a_log_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ziplog.UnavailableError("no server answers")

    monkeypatch.setattr(ziplog, "connect", unreachable)
    arguments = ["--bootstrap", "127.0.0.1:1", "--history", str(tmp_path / "h")]
    options = ["--seconds", "0", "--clients", "0", "--subscribers", "0"]
    assert command.main([*arguments, *options]) == 1
    assert "cannot be read at the end: no server answers" in capsys.readouterr().err
