"""`freeze_gc`: modules are excluded from garbage collection, later objects are not."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from spark_reader.worker_state import freeze_gc

class Ring:
    def __init__(self):
        self.itself = self

freeze_gc()
frozen = gc.get_freeze_count()
assert frozen > 1000, frozen
ring = Ring()
gone = weakref.ref(ring)
del ring
freeze_gc()
assert gc.get_freeze_count() == frozen
gc.collect()
assert gone() is None
"""


def test_existing_objects_are_frozen_once_and_later_garbage_is_collected() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
