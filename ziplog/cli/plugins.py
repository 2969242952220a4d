"""Verbs that other packages add to the command line, through entry points, loaded on first use."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Mapping


class PluginGroup(TyperGroup):
    """Our verbs and those of other packages."""

    #: The group of entry points that adds verbs.
    entry_points: ClassVar[str]

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        return [*super().list_commands(ctx), *sorted(self._plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb: one of ours, or else another package's."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        plugin = self._plugins().get(cmd_name)
        return None if plugin is None else typer.main.get_command(plugin.load())

    def _plugins(self) -> Mapping[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.entry_points)}
