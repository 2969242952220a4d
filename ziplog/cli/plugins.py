"""A group of verbs that are loaded on first use: a verb starts without the others' modules.

Other packages add verbs through entry points.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Mapping


class Verb(NamedTuple):
    """Where a verb is defined."""

    module: str
    #: A function, or a `typer.Typer` of more verbs.
    name: str
    #: An option that it does not know may be an argument: a number with a sign.
    takes_signs: bool = False


class PluginGroup(TyperGroup):
    """Our verbs and those of other packages."""

    #: Ours, in the order of the help text, beside those that are registered.
    verbs: ClassVar[Mapping[str, Verb]] = {}
    #: The group of entry points that adds verbs.
    entry_points: ClassVar[str]

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        return [*self.verbs, *super().list_commands(ctx), *sorted(self._plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb: one of ours, or else another package's."""
        if cmd_name in self.verbs:
            return _load(cmd_name, self.verbs[cmd_name])
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        plugin = self._plugins().get(cmd_name)
        return None if plugin is None else typer.main.get_command(plugin.load())

    def _plugins(self) -> Mapping[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.entry_points)}


def _load(name: str, verb: Verb) -> Any:
    found = getattr(import_module(verb.module), verb.name)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, context_settings={"ignore_unknown_options": verb.takes_signs})(found)
    return typer.main.get_command(app)
