"""Build hook: the README as the description of the package, with links that work on an index page.

An index page has no other files, so a link to one becomes its text, or, if `project.urls` has a
`Source`, a link to the file there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A Markdown link whose target is a file of the project, or a heading of it.
_RELATIVE: Final = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def description(text: str, source: str) -> str:
    """Return the text of a README without links to files.

    Args:
        text: the README.
        source: the address of the project's files; "": unknown.

    """
    if not source:
        return _RELATIVE.sub(r"\1", text)
    return _RELATIVE.sub(rf"[\1]({source.rstrip('/')}/blob/main/\2)", text)


class CustomMetadataHook(MetadataHookInterface):
    """Sets the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        found = description(text, metadata.get("urls", {}).get("Source", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": found}
