"""Spans and durations of a client's inserts for OpenTelemetry; needs `ziplog[otel]`.

`instrument` replaces the inserting methods of one client, so all other clients run without a
further instruction. Names follow OpenTelemetry's conventions for messaging systems. A record has
no headers yet, so a span of a reader does not continue the span of the insert. See
docs/monitoring.md.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ziplog.core.histogram import BOUNDS_US
from ziplog.core.units import NS_PER_S
from ziplog.errors import ConfigError
from ziplog.runtime.clock import now_ns
from ziplog.version import version

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ziplog.otel needs opentelemetry-api, not installed: pip install 'ziplog[otel]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from ziplog.client.asynchronous import AsyncLog
    from ziplog.client.blocking import Log
    from ziplog.types import Record, RecordId

    Attributes = dict[str, str | int]

__all__ = ["instrument", "process"]

_SYSTEM: Final = "messaging.system"
_NAME: Final = "messaging.operation.name"
_TYPE: Final = "messaging.operation.type"
_LOG: Final = "messaging.destination.name"
_SHARD: Final = "messaging.destination.partition.id"
_RID: Final = "messaging.message.id"
_COUNT: Final = "messaging.batch.message_count"
_ERROR: Final = "error.type"
#: Methods that return one rid, and methods that return a list.
_ONE: Final = ("insert_after",)
_MANY: Final = ("insert_many", "insert_rows")
_MARK: Final = "_is_instrumented"


def instrument(
    log: Log | AsyncLog,
    name: str = "ziplog",
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Give each insert of a client a span "insert", and count its duration.

    A span covers a call: one record or all records of `insert_many` or `insert_rows`. That of
    `insert_nowait` ends with its future. It has the record's rid and shard if the call succeeds.

    Args:
        log: the client.
        name: the log's name in spans (`messaging.destination.name`).
        tracer_provider: None: the global one.
        meter_provider: None: the global one.

    Raises:
        ConfigError: the client is instrumented.

    """
    if hasattr(log, _MARK):
        raise ConfigError("log", name, "a client that is not instrumented")
    spans = _Inserts(
        trace.get_tracer("ziplog", version(), tracer_provider),
        metrics.get_meter("ziplog", version(), meter_provider).create_histogram(
            "messaging.client.operation.duration",
            unit="s",
            description="Duration of inserts.",
            explicit_bucket_boundaries_advisory=[us / 1e6 for us in BOUNDS_US],
        ),
        name,
    )
    wrap = spans.coroutine if inspect.iscoroutinefunction(log.insert_after) else spans.function
    for method in (*_ONE, *_MANY):
        setattr(log, method, wrap(getattr(log, method)))
    log.insert_nowait = spans.starter(log.insert_nowait)  # type: ignore[method-assign]
    setattr(log, _MARK, True)


@contextmanager
def process(
    record: Record, name: str = "ziplog", *, tracer_provider: TracerProvider | None = None
) -> Iterator[Span]:
    """Run the body of a `with` statement in a span "process" of a record.

    Args:
        record: what a subscription returned.
        name: the log's name in spans.
        tracer_provider: None: the global one.

    """
    tracer = trace.get_tracer("ziplog", version(), tracer_provider)
    attributes = _attributes(name, "process", "process") | _of_rids([record.rid])
    with tracer.start_as_current_span(
        "process", kind=SpanKind.CONSUMER, attributes=attributes
    ) as span:
        yield span


class _Inserts:
    """The spans and durations of one client's inserts."""

    def __init__(self, tracer: Tracer, durations: Histogram, name: str) -> None:
        self._tracer: Final = tracer
        self._durations: Final = durations
        self._attributes: Final = _attributes(name, "insert", "send")

    def function(self, insert: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a blocking client with a span."""

        def spanned(*args: Any, **options: Any) -> Any:
            with self._current() as found:
                result = insert(*args, **options)
                found.extend([result] if insert.__name__ in _ONE else result)
                return result

        return spanned

    def coroutine(self, insert: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of an asyncio client with a span."""

        async def spanned(*args: Any, **options: Any) -> Any:
            with self._current() as found:
                result = await insert(*args, **options)
                found.extend([result] if insert.__name__ in _ONE else result)
                return result

        return spanned

    def starter(self, insert: Callable[..., Any]) -> Callable[..., Any]:
        """Return `insert_nowait` with a span that ends with its future."""

        def spanned(*args: Any, **options: Any) -> Any:
            span = self._tracer.start_span(
                "insert", kind=SpanKind.PRODUCER, attributes=self._attributes
            )
            start = now_ns()

            def end(future: Any) -> None:
                if future.cancelled():
                    self._end(span, start, (), "cancelled")
                    return
                error = future.exception()
                if error is None:
                    self._end(span, start, [future.result()])
                else:
                    self._fail(span, start, error)

            try:
                future = insert(*args, **options)
            except BaseException as error:
                self._fail(span, start, error)
                raise
            future.add_done_callback(end)
            return future

        return spanned

    @contextmanager
    def _current(self) -> Iterator[list[RecordId]]:
        """Run an insert in a span; the body adds the rids."""
        rids: list[RecordId] = []
        start = now_ns()
        with self._tracer.start_as_current_span(
            "insert",
            kind=SpanKind.PRODUCER,
            attributes=self._attributes,
            end_on_exit=False,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield rids
            except BaseException as error:
                self._fail(span, start, error)
                raise
            self._end(span, start, rids)

    def _fail(self, span: Span, start: int, error: BaseException) -> None:
        span.record_exception(error)
        self._end(span, start, (), type(error).__name__)

    def _end(self, span: Span, start: int, rids: Sequence[RecordId], error: str = "") -> None:
        labels = self._attributes
        if error:
            labels = labels | {_ERROR: error}
            span.set_attribute(_ERROR, error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.set_attributes(_of_rids(rids))
        span.end()
        self._durations.record((now_ns() - start) / NS_PER_S, labels)


def _attributes(name: str, operation: str, kind: str) -> Attributes:
    return {_SYSTEM: "ziplog", _LOG: name, _NAME: operation, _TYPE: kind}


def _of_rids(rids: Sequence[RecordId]) -> Attributes:
    """Return the attributes of a call's records; all are in one shard."""
    if not rids:
        return {}
    found: Attributes = {_SHARD: str(rids[0].shard)}
    return found | ({_RID: str(rids[0])} if len(rids) == 1 else {_COUNT: len(rids)})
