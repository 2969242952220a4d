"""What documents and code refer to exists: links, files, sections, decisions."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final

from tests.named_tests import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES: Final = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
FOLDERS: Final = (
    "ziplog", "shard", "mms", "failure_handler", "logdb", "logplayer", "spark_reader",
    "pyspark_ziplog", "examples", "scripts", "tests",
)  # fmt: skip
SOURCES: Final = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
NUMBER: Final = r"\d+(?:\.\d+)*"
LINK: Final = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
#: A file of the repository, also with the name of a test.
FILE: Final = re.compile(rf"`((?:{'|'.join(FOLDERS)}|deploy|docs)/[\w/.-]+)(?:::\w+)?`")
SECTION: Final = re.compile(rf"(\w+\.md)\W{{1,6}}sections?\s+({NUMBER}(?:(?:, | and ){NUMBER})*)")
DECISION: Final = re.compile(r"\bD(\d+)\b")
ADR: Final = re.compile(r"\bADRs? (\d+)")


@cache
def text_of(path: Path) -> str:
    """Return a file's text; of a page, without blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return text
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings(page)]
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in shown}


def named(path: Path, found: str) -> str:
    return f"{path.relative_to(ROOT)}: {found}"


def broken_links(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(text_of(page)):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield named(page, f"{target}#{anchor}")


def test_links_lead_to_files_and_headings() -> None:
    assert [link for page in PAGES for link in broken_links(page)] == []


def test_files_that_pages_name_exist() -> None:
    found = ((page, name) for page in PAGES for name in FILE.findall(text_of(page)))
    assert [named(page, name) for page, name in found if not list(ROOT.glob(name))] == []


def test_sections_that_pages_and_code_name_exist() -> None:
    missing = []
    for path in (*PAGES, *SOURCES):
        for name, numbers in SECTION.findall(text_of(path)):
            known = {
                heading.split(" ")[0].rstrip(".") for heading in headings(ROOT / "docs" / name)
            }
            missing += [
                named(path, f"{name} {number}")
                for number in re.findall(NUMBER, numbers)
                if number not in known
            ]
    assert missing == []


def test_decisions_that_pages_and_code_name_exist() -> None:
    decided = set(
        re.findall(r"^### D(\d+):", text_of(ROOT / "docs" / "decisions.md"), re.MULTILINE)
    )
    recorded = {int(path.name[:4]) for path in (ROOT / "docs" / "adr").glob("0*.md")}
    for page in PAGES:
        assert set(DECISION.findall(text_of(page))) <= decided, page
    for path in (*PAGES, *SOURCES):
        assert {int(number) for number in ADR.findall(text_of(path))} <= recorded, path
