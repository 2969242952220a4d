"""Run a node inside its region: `node.py ROUTER_PID MODULE --config FILE --node NAME ...`.

Takes the place of `python -m MODULE` (the `launcher` of `ziplog.local.Cluster`). The node's address
in the cluster file says which region that is.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wan import namespaces
from ziplog.config import load


def main() -> None:
    """Enter the region, and run the module that the arguments name."""
    parser = argparse.ArgumentParser(description="Run a node inside its region.")
    parser.add_argument("router", type=int)
    parser.add_argument("module", choices=("shard", "mms", "failure_handler"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node", required=True)
    options, _ = parser.parse_known_args()
    host = load(options.config).node(options.node).host
    namespaces.enter(options.router, namespaces.region_of(host))
    sys.argv = sys.argv[2:]
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
