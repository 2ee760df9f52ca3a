"""What ``/metrics`` says, in Prometheus's text form."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import Response

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)


class Metrics:
    """Of one server."""

    def __init__(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "mpk_requests", "HTTP requests that were answered", ["route", "status"], registry=self._registry
        )
        self.prompt_tokens = Counter("mpk_prompt_tokens", "tokens of prompts", registry=self._registry)
        self.generated_tokens = Counter("mpk_generated_tokens", "tokens that were made", registry=self._registry)
        self.step_seconds = Histogram(
            "mpk_step_seconds",
            "from the end of a step, or from its begin where none ran before, to its end",
            registry=self._registry,
            buckets=STEP_SECONDS,
        )
        for name, what, count in (
            ("mpk_requests_running", "sequences that have pages of the cache", num_running),
            ("mpk_requests_waiting", "sequences that wait for room in a step", num_waiting),
        ):
            Gauge(name, what, registry=self._registry).set_function(count)

    def response(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
