"""Logs as JSON lines on standard output: one shape for our own events and those of libraries."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

import structlog


def configure_logs(component: str, *, stream: TextIO | None = None, **context: str) -> None:
    """Routes structlog and the standard library's logging to standard output; `context` goes into every line.

    A process whose standard output is for another purpose names another stream.
    """

    def add_context(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        event["component"] = component
        event["pid"] = os.getpid()
        event.update(context)
        return event

    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_context,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # uvicorn reports each start and stop on the level of our own events; ours say it already.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
