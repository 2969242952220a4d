"""Run a node with a layer of faults: `faulty_node.py MODULE --config FILE --node NAME ...`.

Takes the place of `python -m MODULE` (the `launcher` of `ziplog.local.Cluster`). What goes wrong
is in the node's file under `faults/` beside the cluster file; scripts/faults.py writes it.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from fault_injection import layer
from fault_injection.control import FaultSource

from ziplog.config import load


def main() -> None:
    """Run the module that the arguments name."""
    parser = argparse.ArgumentParser(description="Run a node with a layer of faults.")
    parser.add_argument("module", choices=("shard", "mms", "failure_handler"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node", required=True)
    options, _ = parser.parse_known_args()
    raft_nodes = {
        node.raft_endpoint: node.name
        for node in load(options.config).nodes
        if node.raft_port is not None
    }
    source = FaultSource(options.config.absolute().parent, options.node)
    layer.install(source, options.node, raft_nodes)
    sys.argv = sys.argv[1:]
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
