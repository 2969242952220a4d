"""The monitor's HTTP server moves while the process runs."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, cast

import pytest

from tests.integration.ports import consecutive_ports
from tests.logged_events import captured_events
from tests.unit.ziplog.cli.fakes import cluster_file
from ziplog.config import load
from ziplog.config_tables import MonitorConfig
from ziplog.errors import UnavailableError
from ziplog.monitor.service import MonitorService
from ziplog.runtime.settings_reload import SettingsReload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ziplog.monitor.server import Snapshots


@contextmanager
def running() -> Iterator[MonitorService]:
    service = MonitorService(cast("Snapshots", None))
    try:
        yield service
    finally:
        service.stop()


def is_served(port: int, code: int) -> bool:
    """Whether a monitor replies with a code at a port of this machine."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
    except urllib.error.HTTPError as error:
        with closing(error):
            return error.code == code
    return False


def test_a_monitor_moves_to_another_address_with_the_same_port(tmp_path: Path) -> None:
    port = consecutive_ports(1)
    (tmp_path / "token").write_text("secret\n")
    with running() as service:
        for host in ("127.0.0.1", "0.0.0.0", "127.0.0.1"):
            service.serve(MonitorConfig(host, port, "token"), tmp_path)
            assert service.endpoint == f"{host}:{port}"
            assert is_served(port, 401)


def test_a_refused_move_changes_nothing(tmp_path: Path) -> None:
    port = consecutive_ports(1)
    (tmp_path / "token").write_text("secret\n")
    with running() as service:
        service.serve(MonitorConfig("127.0.0.1", port), tmp_path)
        with pytest.raises(UnavailableError, match=f"cannot listen at 192.0.2.1:{port}"):
            service.serve(MonitorConfig("192.0.2.1", port, "token"), tmp_path)
        assert service.endpoint == f"127.0.0.1:{port}"
        assert is_served(port, 404)


def test_a_refused_move_is_logged_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_new: object) -> None:
        raise UnavailableError("cannot listen at 192.0.2.1:7480")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = cluster_file(tmp_path, 3)
    reload = SettingsReload(path, load(path), "monitor")
    with captured_events() as events:
        reload.start(refuse)
        reload.stop()
    refusals = [event for event in events if event["event"] == "settings not changed"]
    assert [event["reason"] for event in refusals] == ["cannot listen at 192.0.2.1:7480"]
