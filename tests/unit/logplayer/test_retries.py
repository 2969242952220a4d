"""Pauses between attempts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logplayer import targets
from logplayer.contract import Retry
from logplayer.retries import MAX_AFTER_S, MAX_TEXT, Attempts, pause_ns, text_of
from tests.properties import examples
from ziplog.core.units import NS_PER_MS, NS_PER_S


@examples(200)
@given(st.text(max_size=10), st.integers(1, 200), st.integers(1, 1000), st.integers(0, 60_000))
def test_a_pause_doubles_up_to_the_last_one_less_a_fifth(
    name: str, attempt: int, first: int, more: int
) -> None:
    last = first + more
    whole = min(first * 2 ** (attempt - 1), last) * NS_PER_MS
    pause = pause_ns(name, attempt, first, last)
    assert whole * 4 // 5 <= pause <= whole
    assert pause == pause_ns(name, attempt, first, last)


def test_pauses_of_tasks_differ() -> None:
    pauses = {pause_ns(f"orders/db/{n}", 3, 100, 30_000) for n in range(20)}
    assert len(pauses) > 15


def test_a_target_chooses_its_pause_up_to_an_hour() -> None:
    assert pause_ns("a", 9, 100, 30_000, 2.5) == int(2.5 * NS_PER_S)
    for soon in (0.0, -1.0, float("-inf"), 0.099):
        assert pause_ns("a", 9, 100, 30_000, soon) == 100 * NS_PER_MS, "no busy loop"
    assert pause_ns("a", 9, 100, 30_000, 1e9) == MAX_AFTER_S * NS_PER_S


def test_an_open_that_fails_after_a_delivery_does_not_hide_it() -> None:
    """As of a database that each attempt crashes: it takes no connections for a while."""
    spec = targets.function("f", print, retry_s=60)
    attempts, now, ends = Attempts("a/f/0", spec), 0, []
    while not ends and now < 600 * NS_PER_S:
        for step in ("deliver", "open"):
            if not attempts.fail(step, Retry("the server closed the connection"), now):
                ends.append(now)
            now += NS_PER_S
        attempts.on_opened()
    assert ends[:1] == [60 * NS_PER_S]


def test_opens_alone_are_forgotten_after_a_success() -> None:
    attempts = Attempts("a/f/0", targets.function("f", print, retry_s=60))
    for second in range(0, 600, 50):
        assert attempts.fail("open", Retry("no connection"), second * NS_PER_S)
        attempts.on_opened()


def test_an_error_is_one_line() -> None:
    assert text_of(Retry("a\n  b")) == "Retry: a b"
    assert text_of(OSError()) == "OSError"


def test_an_error_is_text_that_can_be_written() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert text_of(Retry("a\0b\ud800")) == "Retry: a\\x00b\\ud800"
    assert text_of(UnprintableError()) == "UnprintableError: its text cannot be shown"
    assert len(text_of(Retry("x" * 3_000_000))) == MAX_TEXT + len("Retry: ")
