"""The prose of the project: parts have names, sentences are short (CONTRIBUTING.md, Style).

Counted are docstrings, comments, the texts of messages and the names of tests, per package, and
each document. Rule: a count only falls; `CEILINGS` holds what is above the goal today.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
AREAS: Final = (
    "ziplog/client", "ziplog", "shard", "mms", "failure_handler", "logdb", "logplayer",
    "spark_reader", "examples", "scripts", "tests",
)  # fmt: skip
#: Words for people, of which no part of a distributed log is one.
PEOPLE: Final = re.compile(
    r"\b(who|whom|whose|whoever|(no|some|any|every)(body|one))\b(?!-)", re.IGNORECASE
)
TELL: Final = re.compile(r"\b(tells?|told|telling)\b", re.IGNORECASE)
#: A string, which may contain "#", or a comment. `tokenize` takes seconds for all files.
STRING_OR_COMMENT: Final = re.compile(
    r"""(?s)(?P<quote>'{3}|"{3})(\\.|.)*?(?P=quote)"""
    r"""|(?P<mark>['"])(\\.|[^\\\n])*?(?P=mark)"""
    r"""|(?P<comment>\#[^\n]*)"""
)
#: Occurrences in 1,000 words that are allowed of each of the two.
GOAL: Final = 1.0
#: Words of a sentence; a longer one counts as long.
LONG: Final = 35
#: The share of long sentences that is allowed.
LONG_SHARE: Final = 0.02
#: What is above the goals: (people, tell) in 1,000 words.
CEILINGS: Final[dict[str, tuple[float, float]]] = {}


def texts_of(path: Path) -> Iterator[str]:
    """Yield the prose of a Python file."""
    source = path.read_text(encoding="utf-8")
    for match in STRING_OR_COMMENT.finditer(source):
        if match["comment"]:
            yield match["comment"].lstrip("#: ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.count(" ") >= 3:
                yield node.value
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")


def prose(text: str) -> str:
    """Return a text without code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "X", text)


def sentences(text: str) -> list[int]:
    """Return how many words each sentence of a text has; tables and lists end sentences."""
    parts = re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[*|#-]|\|", text)
    return [count for part in parts if (count := len(re.findall(r"[\w'-]+", part)))]


def rates(texts: list[str]) -> tuple[float, float, float]:
    """Return people and tell in 1,000 words, and the share of long sentences."""
    words = sum(len(re.findall(r"[A-Za-z'-]+", text)) for text in texts)
    lengths = [length for text in texts for length in sentences(text)]
    if not words:
        return 0.0, 0.0, 0.0
    people, tell = (
        1000 * sum(len(pattern.findall(text)) for text in texts) / words
        for pattern in (PEOPLE, TELL)
    )
    return people, tell, sum(length > LONG for length in lengths) / len(lengths)


def files_of(area: str) -> list[Path]:
    inner = [other for other in AREAS if other.startswith(f"{area}/")]
    return [
        path
        for path in sorted((ROOT / area).rglob("*.py"))
        if not any(path.is_relative_to(ROOT / other) for other in inner)
        and path != Path(__file__).resolve()
    ]


def test_parts_have_names_and_sentences_are_short() -> None:
    found = {
        area: rates([prose(text) for path in files_of(area) for text in texts_of(path)])
        for area in AREAS
    }
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found |= {
        str(path.relative_to(ROOT)): rates([prose(path.read_text(encoding="utf-8"))])
        for path in documents
    }
    offenders = {}
    for name, (people, tell, long) in found.items():
        most_people, most_tell = CEILINGS.get(name, (GOAL, GOAL))
        if people > most_people or tell > most_tell or long > LONG_SHARE:
            offenders[name] = f"people {people:.2f}, tell {tell:.2f}, long {long:.3f}"
    assert not offenders


def test_a_ceiling_falls_when_the_prose_gets_better() -> None:
    for name, ceiling in CEILINGS.items():
        assert max(ceiling) > GOAL, name
