"""What is only there if it was asked for: `pip install 'ziplog[spark]'`."""

from __future__ import annotations

from importlib.util import find_spec

from ziplog.errors import UnavailableError


def require(what: str, *packages: str) -> None:
    """Return if these packages are installed.

    Args:
        what: what needs them, as people call it.
        packages: their import names.

    Raises:
        UnavailableError: one is not; says how to install it.

    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"{what} needs {' and '.join(missing)}, not installed here: pip install 'ziplog[spark]'"
        )
