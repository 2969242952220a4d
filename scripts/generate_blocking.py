"""Generate the blocking clients from the asyncio ones.

`python scripts/generate_blocking.py` writes them; with `--check` it writes nothing, names each file
that differs from its source, and returns 1. A source is rewritten word by word. What differs in
more than words is written by hand, in the modules that a source imports (`async_base`, the
engines), under the names of both sides.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parents[1]
#: The source of each generated file.
SOURCES: Final = {
    "logdb/client/blocking.py": "logdb/client/asynchronous.py",
    "logdb/client/blocking_rows.py": "logdb/client/async_rows.py",
    "logdb/client/blocking_transaction.py": "logdb/client/async_transaction.py",
    "ziplog/client/blocking.py": "ziplog/client/asynchronous.py",
    "ziplog/client/blocking_administration.py": "ziplog/client/async_administration.py",
    "ziplog/client/blocking_cursors.py": "ziplog/client/async_cursors.py",
    "ziplog/client/blocking_iterators.py": "ziplog/client/async_iterators.py",
    "ziplog/client/blocking_speculation.py": "ziplog/client/async_speculation.py",
}
#: Regular expressions and their replacements, applied in this order, also to docstrings.
REPLACEMENTS: Final = (
    # A blocking object is open once it exists.
    (r"^ *await self\n", ""),
    (r"\bawait self\._entered\(\)", "self"),
    (r"\bawait ", ""),
    (r"\b([Aa])n (`?)async (with|context)\b", r"\1 \2\3"),
    (r"\basync (def|with|for|iterator|context)\b", r"\1"),
    (r"\b__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsync(Administration|Connection|Cursor|DatabaseEngine|Iterator|Log|Rows|Scan)\b", r"\1"),
    (r"\bAsync(Speculation|Stream|Subscription|Transactions)\b", r"\1"),
    (r"\bAsyncioEngine\b", "BlockingEngine"),
    (r"\bimport asyncio\n", "from concurrent.futures import Future\n"),
    (r"\basyncio\.Future\b", "Future"),
    (r"\basyncio_engine\b", "blocking_engine"),
    (
        r"\basync_(administration|base|cursors|iterators|rows|speculation|transaction)\b",
        r"blocking_\1",
    ),
    (r"\bPendingOpen\[(\w+)\]", r"\1"),
    (r"\baclose\b", "close"),
    (r"\b(logdb|ziplog)\.aio\b", r"\1"),
)
_HEADER: Final = "# Generated from {} by scripts/generate_blocking.py; do not edit.\n"


def generate(source: str, name: str) -> str:
    """Return the blocking client of a source, the text of the file `name`."""
    text = source
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    text = _ruff(_HEADER.format(name) + text, "check", "--select=F401,I", "--fix", "--quiet")
    return _ruff(text, "format", "--quiet")


def _ruff(text: str, *command: str) -> str:
    arguments = ["ruff", *command, "--stdin-filename", str(ROOT / "ziplog/client/blocking.py"), "-"]
    done = subprocess.run(
        [sys.executable, "-m", *arguments], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"ruff rejects the generated code:\n{done.stdout}{done.stderr}")
    return done.stdout


def differing(root: Path = ROOT) -> list[tuple[str, str]]:
    """Return each file that differs from its source, with the text that the source gives."""
    texts = {
        target: generate((root / source).read_text(encoding="utf-8"), source)
        for target, source in SOURCES.items()
    }
    return [
        (target, text)
        for target, text in texts.items()
        if not (root / target).exists() or (root / target).read_text(encoding="utf-8") != text
    ]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the generated files; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the blocking clients.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file differs")
    is_check = parser.parse_args(arguments).check
    found = differing(root)
    for target, text in found:
        if is_check:
            print(f"{target} differs from {SOURCES[target]}: run `make format`", file=sys.stderr)
        else:
            (root / target).write_text(text, encoding="utf-8")
    return int(is_check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
