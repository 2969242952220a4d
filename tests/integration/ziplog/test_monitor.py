"""The monitor's HTTP server beside a real cluster."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import logdb
from logplayer import Player, targets
from tests.logged_events import captured_events
from tests.waiting import wait_until
from ziplog import RID_RECENT
from ziplog.local import Cluster
from ziplog.monitor.server import Monitor, Snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEPLOY = Path(__file__).parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "ziplog.json"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), shards=1) as running:
        yield running


def serve(
    stack: ExitStack,
    cluster: Cluster,
    token: str = "",
    coordinators: Sequence[str] = (),
    is_asked: Callable[[str], bool] | None = None,
) -> Monitor:
    log = stack.enter_context(cluster.connect())
    snapshots = Snapshots(log, coordinators, is_asked)
    server = stack.enter_context(Monitor("127.0.0.1", 0, snapshots, token))
    snapshots.start()
    stack.callback(snapshots.stop)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    stack.callback(server.shutdown)
    wait_until(lambda: snapshots.document is not None, "there is a snapshot")
    return server


@pytest.fixture(scope="module")
def monitor(cluster: Cluster) -> Iterator[Monitor]:
    with ExitStack() as stack:
        yield serve(stack, cluster)


def get(
    monitor: Monitor, path: str, method: str = "GET", token: str = "", accept: str = "*/*"
) -> tuple[int, str, bytes]:
    headers = {"Accept": accept}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(
        f"http://{monitor.endpoint}{path}", method=method, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def series(monitor: Monitor) -> dict[str, float]:
    """Return all samples, by name and labels."""
    lines = get(monitor, "/metrics")[2].decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line[0] != "#")
    return {name: float(value) for name, _, value in samples}


def sample(monitor: Monitor, name: str) -> float:
    return series(monitor).get(name, -1)


def test_the_paths_of_a_healthy_cluster(monitor: Monitor) -> None:
    code, kind, _ = get(monitor, "/metrics")
    assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    for name in ("shard-0-0", "shard-0-1", "mms-0", "fh-0"):
        wait_until(lambda name=name: sample(monitor, f'ziplog_up{{node="{name}"}}') == 1, name)
    status = json.loads(get(monitor, "/status")[2])
    assert status["cluster"] == "local"
    assert all(node["started"] > 1e9 for node in status["mms"])
    assert 0 <= status["age_ms"] < 5000
    for path in ("/readyz", "/readyz?node=shard-0-1", "/readyz?node=fh-0"):
        # A leader appears in the status document a moment after its election.
        wait_until(lambda path=path: get(monitor, path)[0] == 200, path)
        assert get(monitor, path) == (200, "application/json", b'{"status":"ok"}')
    for path, check in (
        ("/healthz", "the monitor replies"),
        ("/healthz?node=mms-0", "mms-0 replies"),
    ):
        code, _, body = get(monitor, path)
        checks = [{"check": check, "status": "ok"}]
        assert (code, json.loads(body)) == (200, {"status": "ok", "checks": checks})
    code, _, body = get(monitor, "/readyz?node=x")
    assert (code, json.loads(body)["reason"]) == (503, "there is no node x")
    assert get(monitor, "/")[0] == 404


@pytest.mark.parametrize("name", ["ziplog_raft_leader", "ziplog_build_info"])
def test_an_alert_on_all_nodes_of_a_cluster_holds_for_monitors_of_one_machine(name: str) -> None:
    """Each has an `instance` of its own, and the leader is on one machine."""
    rules = re.split("- alert:", ALERTS.read_text())
    [rule] = [found for found in rules if name in found]
    assert f"({name} * on (job, instance) group_left (cluster_id) ziplog_cluster_info)" in rule
    assert "by (instance" not in rule
    assert "by (cluster_id" in rule


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_metrics_pass_prometheus_own_check(monitor: Monitor) -> None:
    wait_until(lambda: sample(monitor, 'ziplog_up{node="shard-0-0"}') == 1, "a node replied")
    text = get(monitor, "/metrics")[2]
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, b"")


def test_openmetrics_on_request(monitor: Monitor) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    _, kind, body = get(monitor, "/metrics", accept=accept)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"\n# EOF\n")
    assert b"# TYPE ziplog_records counter\n" in body


def test_inserts_reads_and_deliveries_are_counted(cluster: Cluster, monitor: Monitor) -> None:
    placed = 'ziplog_records_total{node="shard-0-0",shard="0",role="primary"}'
    wait_until(lambda: sample(monitor, placed) >= 0, "the primary replied")
    before = series(monitor)
    with cluster.connect() as log:
        rids = log.insert_many([b"x"] * 100)
        log.read_record(rids[0])
        assert len(list(log.subscribe(rids[0], follow=False))) == 100
    wait_until(lambda: sample(monitor, placed) >= before[placed] + 100, "they are counted")
    after = series(monitor)

    def grown(name: str) -> float:
        of = [one for one in after if one.startswith(name)]
        return sum(after[one] - before.get(one, 0) for one in of)

    assert grown("ziplog_delivered_records_total{") == 100
    assert grown("ziplog_reads_total{") >= 1
    assert grown('ziplog_records_total{node="shard-0-1"') == 100
    assert grown('ziplog_flush_duration_seconds_count{node="shard-0-0"') >= 1
    assert grown('ziplog_raft_commit_duration_seconds_count{node="mms-0"') >= 1
    assert after['ziplog_raft_leader{node="mms-0",group="mms"}'] == 1
    for node in ("mms-0", "fh-0", "shard-0-0", "shard-0-1"):
        assert 0 < len([one for one in after if f'node="{node}"' in one]) <= 250
        assert after[f'process_resident_memory_bytes{{node="{node}"}}'] > 1e7
        assert after[f'ziplog_loop_busy_seconds_total{{node="{node}"}}'] > 0
        assert after[f'ziplog_handshakes_total{{node="{node}",result="ok"}}'] >= 1
        for direction in ("received", "sent"):
            labels = f'{{node="{node}",direction="{direction}"}}'
            assert grown(f"ziplog_frames_total{labels}") >= 1
            assert grown(f"ziplog_frame_bytes_total{labels}") >= 12


def test_a_node_that_does_not_reply_has_no_series(cluster: Cluster, monitor: Monitor) -> None:
    # A hung storage server would be killed.
    up = 'ziplog_up{node="fh-0"}'
    wait_until(lambda: sample(monitor, up) == 1, "it replies")
    cluster.pause("fh-0")
    try:
        wait_until(lambda: sample(monitor, up) == 0, "it does not reply")
        found = {one.split("{")[0] for one in series(monitor) if 'node="fh-0"' in one}
        assert found == {"ziplog_up", "ziplog_node_state"}
        wait_until(lambda: get(monitor, "/healthz?node=fh-0")[0] == 503, "it is dead")
        assert get(monitor, "/healthz?node=shard-0-0")[0] == 200
    finally:
        cluster.resume("fh-0")
    wait_until(lambda: sample(monitor, up) == 1, "it replies again")


def test_events_and_epochs_of_a_cluster(cluster: Cluster) -> None:
    with cluster.connect() as log:
        wait_until(lambda: len(log.events()) >= 3, "events are recorded")
        events = log.events()
        assert [event["number"] for event in events] == list(range(1, len(events) + 1))
        assert next(e["kind"] for e in events if e["shard"] == 0) == "view"
        assert log.events(after=2) == events[2:]
        rid = log.insert_after(b"x")
        epoch = log.read_record(rid).epoch
        (found,) = log.epochs(epoch, epoch + 1)
        assert found["start"] <= rid.gsn < found["stop"]
        assert [shard["shard"] for shard in found["shards"]] == [0]


def test_lag_and_owners_of_cursors(cluster: Cluster) -> None:
    """A cursor that was behind before the monitor started, and the task of a player."""

    def of(metric: str, cursor: str) -> float | None:
        parts = cursor.split("/") if "/" in cursor else ["", "", ""]
        labels = dict(zip(("player", "target", "partition"), parts, strict=True))
        text = ",".join(f'{key}="{value}"' for key, value in ({"cursor": cursor} | labels).items())
        return series(monitor).get(f"ziplog_cursor_{metric}{{{text}}}")

    def members() -> float | None:
        return series(monitor).get('ziplog_player_members{player="orders"}')

    with ExitStack() as stack:
        log = stack.enter_context(cluster.connect())
        rid = log.insert_after(b"x")
        log.create_cursor("late", rid)
        inserted_at = log.read_record(rid).timestamp_us / 1e6
        wait_until(lambda: time.time() > inserted_at + 3, "the record has an age")
        monitor = serve(stack, cluster)
        wait_until(lambda: (of("lag_seconds", "late") or 0) > 3, "the record was read")
        assert of("owned", "late") == 0
        log.seek_cursor("late", RID_RECENT)
        wait_until(lambda: of("lag_seconds", "late") == 0, "it is at the end")

        target = targets.function("shop", lambda _record: None)
        with Player(cluster.endpoint, "orders", [target], start=RID_RECENT, commit_ms=10) as player:
            player.wait_until(log.insert_after(b"y"), timeout=60)
            wait_until(lambda: of("owned", "orders/shop/0") == 1, "the task is owned")
            assert members() == 1
            wait_until(lambda: of("lag_seconds", "orders/shop/0") == 0, "the task has all")
            records = 'ziplog_player_records_total{player="orders",target="shop",partition="0"} 1'
            assert records in player.metrics().splitlines()
        log.insert_after(b"z")
        wait_until(lambda: (of("lag_seconds", "orders/shop/0") or 0) > 0, "a record waits")
        assert (of("owned", "orders/shop/0"), members()) == (0, 0)
        for info in log.cursors():
            log.delete_cursor(info.name)
        wait_until(lambda: series(monitor).get("ziplog_cursors") == 0, "they are gone")


def test_coordinators_are_asked_too(cluster: Cluster) -> None:
    with ExitStack() as stack:
        coordinator = stack.enter_context(logdb.Coordinator(cluster.endpoint))
        monitor = serve(stack, cluster, coordinators=[coordinator.endpoint])
        node = f'{{node="{coordinator.endpoint}"}}'
        with logdb.connect(coordinator.endpoint) as db:
            db.put("k", 1)
        wait_until(lambda: sample(monitor, f"logdb_commits_total{node}") == 1, "it committed")
        assert sample(monitor, f"logdb_keys{node}") == 1
        assert sample(monitor, f"logdb_ready{node}") == 1
        assert sample(monitor, f"logdb_lag_seconds{node}") >= 0
        for path in ("/readyz", "/healthz"):
            assert get(monitor, f"{path}?node={coordinator.endpoint}")[0] == 200

        def is_timed() -> bool:
            with logdb.connect(coordinator.endpoint) as db:
                db.put("k", 2)
            return sample(monitor, f"logdb_commit_duration_seconds_count{node}") >= 1

        wait_until(is_timed, "a commit is timed")


def test_the_dashboard_and_the_alerts_use_metrics_that_are_exported(monitor: Monitor) -> None:
    exported = set(re.findall(r"# TYPE (\w+)", get(monitor, "/metrics")[2].decode()))
    for file in (ALERTS, DASHBOARD):
        used = set(re.findall(r"(?:ziplog|logdb|process)_\w+", file.read_text()))
        used = {name.removesuffix("_bucket") for name in used}
        assert used
        assert used <= exported
    assert len(json.loads(DASHBOARD.read_text())["panels"]) == 33


def test_the_dashboard_has_rates_at_every_scrape_interval() -> None:
    """Prometheus scrapes once a minute by default; a shorter range holds one sample, no rate."""
    ranges = re.findall(r"\[([^]\"]*)\]", "".join(expressions()))
    assert set(ranges) == {"$__rate_interval"}


def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_alerts_pass_prometheus_own_check() -> None:
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True)


def test_only_the_chosen_nodes_are_asked(cluster: Cluster) -> None:
    chosen = cluster.config.node("shard-0-1").endpoint
    with ExitStack() as stack:
        monitor = serve(stack, cluster, is_asked=lambda endpoint: endpoint == chosen)
        up = 'ziplog_up{node="shard-0-1"}'
        wait_until(lambda: sample(monitor, up) == 1, "the node has replied")
        asked = {name for name in series(monitor) if name.startswith("ziplog_up")}
        assert asked == {up}


def test_only_get_and_head_are_served(monitor: Monitor) -> None:
    assert get(monitor, "/metrics", "HEAD")[2] == b""
    for method in ("POST", "DELETE", "BREW"):
        assert get(monitor, "/metrics", method)[0] == 405


def test_a_token_is_demanded(cluster: Cluster) -> None:
    with ExitStack() as stack:
        monitor = serve(stack, cluster, "secret")
        assert get(monitor, "/metrics")[0] == 401
        assert get(monitor, "/metrics", token="wrong")[0] == 401
        assert get(monitor, "/metrics", token="secret")[0] == 200


def test_long_heads_and_many_connections_are_refused(monitor: Monitor) -> None:
    host, port = monitor.endpoint.split(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n")
        peer.settimeout(20)
        received = peer.recv(100)
        assert received.startswith(b"HTTP/1.0 431")
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        for peer in idle:
            peer.settimeout(20)
        # Those above the limit are closed at once, the others after their time.
        assert [peer.recv(1) for peer in idle] == [b""] * 40
    wait_until(lambda: get(monitor, "/healthz")[0] == 200, "it serves again")


def test_a_request_without_a_valid_target_is_refused(monitor: Monitor) -> None:
    host, _, port = monitor.endpoint.partition(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(b"GET http://[x HTTP/1.0\r\n\r\n")
        assert peer.recv(1000).startswith(b"HTTP/1.0 400 ")


def test_an_error_in_a_request_is_logged_and_ends_that_request_only(
    monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("a field that this release expects")

    with captured_events() as events, monkeypatch.context() as patch:
        patch.setattr(monitor.snapshots, "status", broken)
        with pytest.raises(http.client.RemoteDisconnected):
            get(monitor, "/status")
        wait_until(lambda: bool(events), "the error is logged")
    assert events == [{"event": "a request to the monitor failed", "log_level": "error"}]
    assert get(monitor, "/status")[0] == 200


def test_a_cluster_that_stops_is_not_ready(cluster: Cluster) -> None:
    with ExitStack() as stack:
        monitor = serve(stack, cluster)
        cluster.pause("mms-0")
        try:
            wait_until(lambda: get(monitor, "/readyz")[0] == 503, "it is not ready")
            assert b"ziplog_cluster_up 0\n" in get(monitor, "/metrics")[2]
            assert get(monitor, "/status")[0] == 503
            assert get(monitor, "/healthz")[0] == 200
            assert get(monitor, "/healthz?node=shard-0-0")[0] == 200
        finally:
            cluster.resume("mms-0")
        wait_until(lambda: get(monitor, "/readyz")[0] == 200, "it is ready")
