"""Trials that tried nothing, or whose workload died, are not called successful."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import chaos
import faults
import player_faults
import pytest
import region_faults
import workload as command
from fault_injection.trial import Outages, Verdict, untried

from tests.history.clients import LogPlan
from tests.history.probe import Probe
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class CalmTrial:
    """A trial of a cluster without nodes that can be hurt."""

    def __init__(self, acknowledged: int) -> None:
        self.shape = SimpleNamespace(seed=1)
        self.nodes: Any = SimpleNamespace(
            names=("shard-0-0",),
            config=SimpleNamespace(shards=[]),
            group_of=lambda name: (name,),
            heal_all=lambda: None,
            heal=lambda _: None,
            kill=lambda _: None,
        )
        self.health = SimpleNamespace(unhealthy=dict)
        self.outages = Outages()
        self._acknowledged = acknowledged

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, _: str) -> None:
        pass

    def look(self) -> None:
        pass

    def disturbances(self, *_: object) -> Iterator[Callable[[], None]]:
        return iter(())

    def settle(self) -> float:
        return 0.0

    def judge(self) -> Verdict:
        return Verdict({"acknowledged": self._acknowledged}, [])


def judged(trial: Any, seconds: float) -> list[str]:
    return chaos.run_chaos(trial, seconds, lambda _: None, kinds=("kill",))


def test_chaos_without_a_fault_is_not_as_promised() -> None:
    assert judged(CalmTrial(10), 0.0) == untried(0, 10)


def test_chaos_that_cannot_inject_is_not_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fault_injection.schedule._PAUSE_S", (0.0, 0.01))

    def dead(_: str) -> None:
        raise UnavailableError("it does not run")

    trial = CalmTrial(10)
    trial.nodes.kill = dead
    assert judged(trial, 0.1) == untried(0, 10)
    assert judged(CalmTrial(10), 0.1) == []


def test_chaos_without_an_operation_is_not_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fault_injection.schedule._PAUSE_S", (0.0, 0.01))
    assert judged(CalmTrial(0), 0.1) == untried(1, 0)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (chaos.main, ["--minutes", "0"]),
        (chaos.main, ["--minutes", "nan"]),
        (chaos.main, ["--clients", "0"]),
        (chaos.main, ["--appends", "30"]),
        (faults.main, ["lose", "shard-0-0", "--percent", "101"]),
        (faults.main, ["slow", "shard-0-0", "--send-ms", "-5"]),
        (faults.main, ["random", "--seconds", "inf"]),
        (command.main, ["--bootstrap", "a:1", "--history", "h", "--mix", "insert=0"]),
        (command.main, ["--bootstrap", "a:1", "--history", "h", "--mix", "insert=-1,read=2"]),
        (command.main, ["--bootstrap", "a:1", "--history", "h", "--clients", "-1"]),
    ],
)
def test_nonsense_is_bad_usage(main: Callable[[list[str]], int], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("script", [player_faults, region_faults])
def test_a_trial_of_no_minutes_is_bad_usage(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--minutes", "0"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2


def test_the_command_reports_clients_that_ended_by_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(self: Any) -> None:
        self.crashed = ["client 1 (exit code 1)"]

    monkeypatch.setattr("tests.history.workload.Workload.stop", crash)
    arguments = ["--bootstrap", "127.0.0.1:1", "--history", str(tmp_path / "h"), "--no-final"]
    options = ["--seconds", "0", "--clients", "0", "--subscribers", "0"]
    assert command.main([*arguments, *options]) == 1
    assert "ended by an error: client 1 (exit code 1)" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_accepts_no_inserts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LogPlan(bootstrap="127.0.0.1:1", directory=str(tmp_path), mix={})
    with Probe(plan) as probe:
        monkeypatch.setattr(probe, "status", lambda: None)
        assert probe.refusing() == probe.unhealthy() == {"the membership service": "silent"}
