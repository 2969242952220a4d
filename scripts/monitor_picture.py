"""Plot panels of the dashboard for a minute of load in which a server is killed.

    python scripts/monitor_picture.py FILE

Needs Prometheus (/usr/bin/prometheus) and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib import parse, request

from metrics.picture import axes

import ziplog
from ziplog.local import Cluster
from ziplog.monitor.server import Monitor, Snapshots

_DASHBOARD: Final = Path(__file__).parents[1] / "deploy/grafana/ziplog.json"
_PANELS: Final = (1, 3, 17, 11, 12, 19)  # By the ids in the dashboard.
_PROMETHEUS: Final = "127.0.0.1:9464"
_COMMAND: Final = "/usr/bin/prometheus --config.file=prometheus.yml --storage.tsdb.path=data"
_SETTINGS: Final = """global: {scrape_interval: 1s}
scrape_configs: [{job_name: ziplog, static_configs: [{targets: ['%s']}]}]"""
_SECONDS: Final = 60


def load(cluster: Cluster) -> None:
    """Insert at a steady pace, and follow the log, for half of the time."""
    stop = time.time() + _SECONDS / 2
    with cluster.connect(timeout=_SECONDS) as log, log.subscribe(ziplog.RID_RECENT) as subscription:
        while time.time() < stop:
            log.insert_nowait(b"x" * 100)
            subscription.fetch(100, timeout=0.004)


def query(expression: str, start: float) -> Any:
    """Return the series of a query, a value every 2 s."""
    wanted = {"query": expression, "start": start, "end": start + _SECONDS, "step": 2}
    url = f"http://{_PROMETHEUS}/api/v1/query_range?{parse.urlencode(wanted)}"
    with request.urlopen(url, timeout=10) as reply:
        return json.load(reply)["data"]["result"]


def draw(path: Path, start: float) -> None:
    """Query and plot the panels."""
    panels = {panel["id"]: panel for panel in json.loads(_DASHBOARD.read_text())["panels"]}
    with axes(path, 2, 3, (13, 6), sharex=True) as found:
        for panel, axis in zip(map(panels.__getitem__, _PANELS), found.flat, strict=True):
            axis.set_title(f"{panel['title']} [{panel['fieldConfig']['defaults']['unit']}]", size=8)
            axis.axvline(_SECONDS / 2, color="red", lw=0.6, ls=":")
            for target in panel["targets"]:
                form = target["legendFormat"].replace("{{", "{").replace("}}", "}")
                for series in query(target["expr"].replace("$__rate_interval", "10s"), start):
                    points = [(at - start, float(value)) for at, value in series["values"]]
                    label = form.format(**series["metric"])
                    axis.plot(*zip(*points, strict=True), lw=1, label=label)
            axis.legend(fontsize=6, loc="upper left")


def main() -> None:
    """Run the cluster, its load and Prometheus, and draw what Prometheus has recorded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", metavar="FILE", type=Path, help="the picture, SVG or PNG")
    picture = parser.parse_args().picture
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(Cluster(directory / "cluster"))
        snapshots = Snapshots(stack.enter_context(cluster.connect()))
        monitor = stack.enter_context(Monitor("127.0.0.1", 0, snapshots))
        snapshots.start()
        stack.callback(snapshots.stop)
        threading.Thread(target=monitor.serve_forever, daemon=True).start()
        (directory / "prometheus.yml").write_text(_SETTINGS % monitor.endpoint)
        command = [*_COMMAND.split(), f"--web.listen-address={_PROMETHEUS}"]
        stack.callback(stack.enter_context(subprocess.Popen(command, cwd=directory)).terminate)
        started = time.time()
        load(cluster)
        cluster.kill("shard-0-0")
        load(cluster)
        draw(picture, started)
        monitor.shutdown()


if __name__ == "__main__":
    main()
