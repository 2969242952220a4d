"""Run a coordinator for which inserts take no less than so long: `held_coordinator.py US ...`.

Takes the place of `python -m logdb`, with the same arguments after the first one; what it holds is
in scripts/database/held.py.
"""

from __future__ import annotations

import sys

from database import held

from logdb.__main__ import main

if __name__ == "__main__":
    held.install(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
