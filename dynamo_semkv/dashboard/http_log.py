"""What the HTTP server of the page logs. A request that is no HTTP (a URL of kilobytes, a TLS handshake, noise) is the sender's fault:
it is answered 400 by the parser, and told in one line without a traceback, which anybody could fill the log with."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.msg, record.args = "dashboard: a request that is no HTTP was refused (%s)", (type(error).__name__,)
            record.exc_info = record.exc_text = None
        return True


logger = logging.getLogger("dynamo_semkv.dashboard.http")
logger.addFilter(_OneLine())

__all__ = ["logger"]
