"""Run a coordinator with delayed inserts (US: microseconds): `delayed_coordinator.py US ...`.

It replaces `python -m logdb`, with the same arguments after the first one. See
scripts/logdb_bench/delayed_inserts.py.
"""

from __future__ import annotations

import sys

from logdb_bench import delayed_inserts

from logdb.__main__ import main

if __name__ == "__main__":
    delayed_inserts.install(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
