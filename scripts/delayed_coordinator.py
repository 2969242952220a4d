"""Run a coordinator for which inserts take no less than so long: `delayed_coordinator.py US ...`.

Takes the place of `python -m logdb`, with the same arguments after the first one; what it holds is
in scripts/logdb_bench/delayed_inserts.py.
"""

from __future__ import annotations

import sys

from logdb_bench import delayed_inserts

from logdb.__main__ import main

if __name__ == "__main__":
    delayed_inserts.install(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
