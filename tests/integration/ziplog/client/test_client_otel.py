"""The spans and durations of clients of a real cluster, as OpenTelemetry's SDK gets them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import ziplog
from tests.waiting import wait_until
from ziplog import otel
from ziplog.core.histogram import BOUNDS_US
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Sdk:
    """OpenTelemetry's SDK, which keeps what it gets."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])

    def instrument(self, log: Any) -> None:
        otel.instrument(log, "orders", tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self) -> list[ReadableSpan]:
        """Return the spans since the last call."""
        found = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return found

    def has_spans(self) -> bool:
        return bool(self._exporter.get_finished_spans())

    def span(self) -> ReadableSpan:
        (found,) = self.spans()
        return found

    def durations(self) -> Iterator[Any]:
        data: Any = self._reader.get_metrics_data()
        (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
        assert (metric.name, metric.unit) == ("messaging.client.operation.duration", "s")
        yield from metric.data.data_points


def test_spans_and_durations_of_a_blocking_client(tmp_path: Path) -> None:
    sdk = Sdk()
    with (
        Cluster(tmp_path, shards=1) as cluster,
        cluster.connect() as log,
        cluster.connect() as bare,
    ):
        sdk.instrument(log)
        with pytest.raises(ziplog.ConfigError):
            sdk.instrument(log)
        rid = log.insert_after(b"x")
        span = sdk.span()
        assert (span.name, span.kind) == ("insert", SpanKind.PRODUCER)
        assert dict(span.attributes or {}) == {
            "messaging.system": "ziplog",
            "messaging.destination.name": "orders",
            "messaging.destination.partition.id": "0",
            "messaging.operation.name": "insert",
            "messaging.operation.type": "send",
            "messaging.message.id": str(rid),
        }
        log.insert_many([b"x"] * 3)
        assert (sdk.span().attributes or {})["messaging.batch.message_count"] == 3
        assert log.insert_many([]) == []
        assert "messaging.message.id" not in (sdk.span().attributes or {})
        log.insert_nowait(b"y").result()
        # The future's callbacks run after its waiters.
        wait_until(sdk.has_spans, "the span ended")
        assert (sdk.span().attributes or {})["messaging.destination.partition.id"] == "0"
        with pytest.raises(ziplog.RecordTooLargeError):
            log.insert_after(b"x" * (1 << 21))
        span = sdk.span()
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "RecordTooLargeError"
        assert [event.name for event in span.events] == ["exception"]

        points = list(sdk.durations())
        assert sorted(point.count for point in points) == [1, 4]
        assert points[0].explicit_bounds == pytest.approx([us / 1e6 for us in BOUNDS_US])

        bare.insert_after(b"z")
        assert sdk.spans() == []
        with log.subscribe(rid, follow=False) as records:
            record = next(iter(records))
        with otel.process(record, "orders", tracer_provider=sdk.tracers):
            log.insert_after(b"derived")
        inner, outer = sdk.spans()
        assert (outer.name, outer.kind) == ("process", SpanKind.CONSUMER)
        assert (outer.attributes or {})["messaging.message.id"] == str(rid)
        assert inner.parent is not None
        assert outer.context is not None
        assert inner.parent.span_id == outer.context.span_id


def test_spans_of_an_asyncio_client(tmp_path: Path) -> None:
    sdk = Sdk()

    async def insert() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            sdk.instrument(log)
            await asyncio.gather(*(log.insert_after(b"y") for _ in range(5)))
            assert len(sdk.spans()) == 5
            await log.insert_nowait(b"z")
            await log.flush()
            future = log.insert_nowait(b"z")
            future.cancel()
            await asyncio.sleep(0)  # a loop runs callbacks in its next turn

    with Cluster(tmp_path, shards=1) as cluster:
        asyncio.run(insert())
    assert [(span.attributes or {}).get("error.type") for span in sdk.spans()] == [
        None,
        "cancelled",
    ]
