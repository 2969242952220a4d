"""`ziplog player check` of targets that are classes of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.ziplog.cli.fakes import run

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog

pytestmark = pytest.mark.timeout(240)

MODULE = """\
class Good:
    stores_position = False
    def open(self, task): pass
    def deliver(self, batch): pass
    def close(self): pass
    def check(self): raise AssertionError("it is not the player's to call")

class Refused(Good):
    def __init__(self): raise ConnectionRefusedError("no server there")

def connect(): raise ValueError("no such database")
"""


def test_errors_of_a_class_name_the_target_and_its_methods_are_not_called(
    log: ziplog.Log, tmp_path: Path
) -> None:
    (tmp_path / "classes_of_test.py").write_text(MODULE)
    file = tmp_path / "player.toml"
    head = f'[player]\nname = "classes"\nbootstrap = "{",".join(log.endpoints)}"\n'
    for target, code, text in (
        ('kind = "function"\nfunction = "classes_of_test:Good"', 0, "is valid"),
        (
            'kind = "function"\nfunction = "classes_of_test:Refused"', 1,
            "error: target shop: ConnectionRefusedError: no server there",
        ),
        (
            'kind = "dbapi"\nparamstyle = "qmark"\nconnect = "classes_of_test:connect"', 1,
            "error: target shop: ValueError: no such database",
        ),
    ):  # fmt: skip
        file.write_text(f'{head}[[target]]\nname = "shop"\n{target}\n')
        checked = run("player", "check", str(file))
        assert checked.exit_code == code, checked.stderr
        assert text in checked.stderr
