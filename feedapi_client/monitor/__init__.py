"""Watch a consumer: probes, Prometheus metrics, its status as JSON, and a page (extra ``monitor``).

Serve it beside the consumer::

    async with serve(consumer, port=9464), consumer:
        await consumer.run(handle)

or mount it in an ASGI application that runs in the same event loop::

    app.mount("/feed", Monitor(consumer))

====================  ============================================================================
``GET /``             a page that draws the partitions and what they do, live
``GET /healthz``      200 while the consumer is live, else 503: for a liveness probe
``GET /readyz``       200 while events are consumed, else 503: for a readiness probe
``GET /metrics``      the metrics of `feedapi_client.telemetry`, for Prometheus
``GET /status``       everything that the page shows, as JSON
====================  ============================================================================

Nothing can be changed through it, and no secret and no event's payload is shown. It has no access
control of its own: `serve` listens on the loopback interface unless told otherwise.
"""

from __future__ import annotations

try:
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "feedapi_client.monitor needs an extra: pip install 'feedapi-client[monitor]'"
    ) from error

from feedapi_client.monitor.monitor_app import Monitor
from feedapi_client.monitor.serving import MonitorServer, serve

__all__ = ["Monitor", "MonitorServer", "serve"]
