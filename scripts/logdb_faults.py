"""Inject random faults under transactions: `chaos.py --workload logdb`, with the same options.

python scripts/logdb_faults.py --seed 1 --minutes 5 [--mix bank|keys|all] [--durability disk]
"""

from __future__ import annotations

import sys

from chaos import main

if __name__ == "__main__":
    sys.exit(main(["--workload", "logdb", *sys.argv[1:]]))
