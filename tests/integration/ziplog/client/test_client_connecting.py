"""What `connect` accepts as a bootstrap and a time-out, on real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.unit.ziplog.client.fakes import CLUSTER
from tests.unit.ziplog.client.served import ServedCluster
from ziplog.runtime.transport import Transport
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


@pytest.mark.parametrize(
    "bootstrap",
    [
        "", "nowhere", "host:", ":7400", "h:0", "h:70000", "a:1,,b:2", [], ["x"], "http://h:1", [5],
        None, 7400, Path("127.0.0.1:7400"), b"127.0.0.1:7400",
    ],
)  # fmt: skip
def test_a_bad_bootstrap_is_refused_with_an_example(bootstrap: Any) -> None:
    with pytest.raises(ziplog.ConfigError, match=r"127\.0\.0\.1:7400"):
        ziplog.connect(bootstrap)


@pytest.mark.parametrize("form", ["{0}", "ziplog://{0}", "{0},{0}", "127.0.0.1:1, {0}", ["{0}"]])
def test_forms_of_a_bootstrap(cluster: ServedCluster, form: Any) -> None:
    if isinstance(form, str):
        bootstrap: Any = form.format(cluster.endpoint)
    else:
        bootstrap = [text.format(cluster.endpoint) for text in form]
    with ziplog.connect(bootstrap) as log:
        assert cluster.endpoint in repr(log)


@pytest.mark.parametrize("query", ["", "/?cluster={id}"])
def test_address_of_the_environment_is_the_default(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    own = cluster_id(CLUSTER)
    monkeypatch.setenv("ZIPLOG_BOOTSTRAP", f"ziplog://{cluster.endpoint}{query.format(id=own)}")

    async def endpoints() -> list[str]:
        async with ziplog.aio.connect() as log:
            return log.endpoints

    with ziplog.connect() as log:
        assert log.endpoints == asyncio.run(endpoints()) == [cluster.endpoint]
    with pytest.raises(ziplog.UnavailableError, match=r"127\.0\.0\.1:1\b"):
        ziplog.connect("127.0.0.1:1", timeout=0.2)


@pytest.mark.parametrize("is_set", [True, False])
def test_log_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch, is_set: bool) -> None:
    monkeypatch.setenv("ZIPLOG_BOOTSTRAP", "")
    if not is_set:
        monkeypatch.delenv("ZIPLOG_BOOTSTRAP")
    with pytest.raises(ziplog.ConfigError, match="give bootstrap, or set ZIPLOG_BOOTSTRAP, to 'h"):
        ziplog.connect()

    async def connect() -> None:
        await ziplog.aio.connect()

    with pytest.raises(ziplog.ConfigError, match="the log has no address"):
        asyncio.run(connect())


def test_connect_without_a_server_fails() -> None:
    transport = Transport("127.0.0.1:0")
    endpoint = transport.endpoint
    assert endpoint is not None
    transport.close()
    with pytest.raises(ziplog.UnavailableError, match=endpoint):
        ziplog.connect(endpoint, timeout=0.2)


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9])
def test_timeout_that_is_too_short_to_connect_is_named(
    cluster: ServedCluster, timeout: float
) -> None:
    for _ in range(3):
        with pytest.raises(ziplog.DeadlineError, match=r"time-out \(below 10 ms\) is too short to"):
            ziplog.connect(cluster.endpoint, timeout=timeout)
