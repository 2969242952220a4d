"""The commands `ziplog player`."""

from __future__ import annotations

from logplayer.cli.commands import app

__all__ = ["app"]
