"""What the page's HTTP server logs. A request that is not HTTP (a URL of kilobytes, a TLS handshake, noise) is the
sender's fault: the parser answers 400, and the log gets a throttled line without a traceback, since anybody could fill
the log."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger("dynamo_semkv.dashboard.http")
_throttled = Throttled(logger)


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        kind = type(error).__name__
        _throttled.info("dashboard: a request that is no HTTP was refused: %s", kind, key=kind)
        return False


logger.addFilter(_OneLine())
