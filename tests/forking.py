"""Code of a test in a forked child of its process."""

from __future__ import annotations

import os
import signal
import traceback
from typing import TYPE_CHECKING, Final, NoReturn

from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

#: Time after which the kernel ends a child, in seconds.
_LIMIT_S: Final = 5


def in_child(act: Callable[[], object]) -> str:
    """Return the result of `act` in a forked child, as text; fail if it hangs there, or raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run(act, writing)
    os.close(writing)
    statuses: list[int] = []

    def has_ended() -> bool:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            statuses.append(status)
        return bool(ended)

    wait_until(has_ended, "the forked child ended")
    with os.fdopen(reading) as stream:
        text = stream.read()
    code = os.waitstatus_to_exitcode(statuses[0])
    assert code != -signal.SIGALRM, f"the forked child hung for {_LIMIT_S} s"
    assert code == 0, f"the forked child ended with {code}: {text}"
    return text


def _run(act: Callable[[], object], writing: int) -> NoReturn:
    """Run `act` and end the process: other code of the test would run twice."""
    code = 1
    try:
        # Without a handler, which could not run in a call that hangs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LIMIT_S)
        os.write(writing, str(act()).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - the parent reports it
        os.write(writing, traceback.format_exc()[-10_000:].encode())
    finally:
        os._exit(code)
