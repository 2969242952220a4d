"""Optional dependencies: packages that an extra of `ziplog` adds."""

from __future__ import annotations

from importlib.util import find_spec

from ziplog.errors import UnavailableError


def require(what: str, extra: str, *packages: str) -> None:
    """Check that packages are installed.

    Args:
        what: the feature that needs them, for the error message.
        extra: the extra that installs them: `pip install 'ziplog[EXTRA]'`.
        packages: their import names.

    Raises:
        UnavailableError: one is missing; the message says how to install it.

    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"{what} needs {' and '.join(missing)}, not installed: pip install 'ziplog[{extra}]'"
        )
