"""`ziplog region lost` and `ziplog region back`, and what `ziplog status` shows of them."""

from __future__ import annotations

import pytest

from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, run
from ziplog.errors import UnavailableError


@pytest.mark.parametrize(
    ("command", "call", "text", "document"),
    [
        ("lost", "lose region", "region eu is given up", '{"region":"eu","lost":true}'),
        ("back", "restore region", "region eu is not given up", '{"region":"eu","lost":false}'),
    ],
)
def test_a_region_is_given_up_or_counts_again(
    log: FakeLog, command: str, call: str, text: str, document: str
) -> None:
    result = run("region", command, "eu")
    assert result.exit_code == 0
    assert log.calls[1:] == [(call, "eu")]
    assert result.stdout == ""
    assert text in result.stderr
    assert run("region", command, "eu", "--json").stdout == f"{document}\n"


def test_a_refusal_is_shown(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise UnavailableError(f"the cluster does not give up region {name}: shard-0-1 may run")

    monkeypatch.setattr(log, "lose_region", refuse)
    result = run("region", "lost", "eu")
    assert result.exit_code == 1
    assert "shard-0-1 may run" in result.stderr


def test_the_status_shows_lost_regions_if_there_are_any(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lost, shown in (
        (["eu"], "given up: region eu; `ziplog region back` ends that"),
        (["ap", "eu"], "given up: regions ap, eu;"),
    ):
        monkeypatch.setattr(log, "cluster", lambda lost=lost: STATUS | {"lost_regions": lost})
        assert shown in " ".join(run("status").stdout.split())
    for document in (STATUS, STATUS | {"lost_regions": []}):
        monkeypatch.setattr(log, "cluster", lambda document=document: document)
        assert "given up" not in run("status").stdout
