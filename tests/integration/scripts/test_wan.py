"""A network of regions in namespaces of the kernel: delays, cuts, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from wan import floor, namespaces, probe
from wan.network import Network

if TYPE_CHECKING:
    from collections.abc import Iterator

_REASON: Final = namespaces.why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)
SCRIPT: Final = Path(__file__).resolve().parents[3] / "scripts" / "wan_trial.py"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(("A", "B")) as made:
        made.set_round_trips({("A", "B"): 30})
        yield made


def run(network: Network, region: str, *arguments: str) -> Any:
    command = network.command(region, sys.executable, probe.__file__ or "", *arguments)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def test_datagrams_and_streams_take_at_least_the_round_trip(network: Network) -> None:
    found = floor.measure(network, {("A", "B"): 30}, network.regions, count=5, mib=1)
    pair = found["A", "B"]
    assert pair.p50_ms >= 30
    assert pair.received == 1
    assert pair.mb_per_s <= 1024 * 1024 / 1e6 / 0.06  # a handshake, and the last byte's answer


def test_a_cut_one_way_loses_datagrams_and_heals(network: Network) -> None:
    with floor.servers(network):
        network.cut("B", "A")
        try:
            before = network.report()["paths"][1][0]["lost"]
            assert run(network, "A", "ping", network.address("B"), "1") == []
            assert network.report()["paths"][1][0]["lost"] > before
        finally:
            network.cut("B", "A", is_cut=False)
        assert len(run(network, "A", "ping", network.address("B"), "1")) == 1


def test_the_floor_is_printed() -> None:
    command = [sys.executable, str(SCRIPT), "floor", "--rtt", "A-B=10", "--count=3", "--mib=1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[1].split()[:2] == ["A-B", "10.0"]
