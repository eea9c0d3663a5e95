"""Reload: reads the watched file, hands a changed configuration to the running router, and logs it once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo_semkv.config.load import Loaded
from dynamo_semkv.config.watch import ConfigWatch, Reload
from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)


class Reloader:
    """Takes over a changed configuration file. One event loop. `apply` may not wait: between two of its steps no
    request may see half of each configuration."""

    def __init__(self, watch: ConfigWatch, apply: Callable[[Loaded], None]) -> None:
        self._watch = watch
        self._apply = apply
        self._requested = asyncio.Event()

    def request(self) -> None:
        """For SIGHUP: reads at once and does not wait for the file to settle."""
        self._requested.set()

    async def run(self, seconds: float) -> None:
        """Reads the file every `seconds` and on request, for ever. It reads in a thread, so a file system that hangs
        stops nothing else."""
        while True:
            try:
                await asyncio.wait_for(self._requested.wait(), seconds)
            except (asyncio.TimeoutError, TimeoutError):
                pass
            forced = self._requested.is_set()
            self._requested.clear()
            try:
                await self.check(forced)
            except Exception:  # noqa: BLE001 - a check that fails may not end all later ones; counted and logged
                _throttled.exception("the configuration file was not read")

    async def check(self, forced: bool = False) -> None:
        """Reads the file once and applies what changed. `forced`: do not wait for the file to settle."""
        if forced and self._watch.path is None:
            logger.warning("asked to reload, but there is no configuration file")
            return
        found = await asyncio.to_thread(self._watch.poll, forced)
        if found is not None:
            self._log_and_apply(found)

    def _log_and_apply(self, found: Reload) -> None:
        loaded = found.loaded
        if found.error is not None:
            logger.error("%s is not taken over, configuration %s stays: %s", self._watch.path, loaded.hash, found.error)
            return
        if found.changed:
            self._apply(loaded)
            logger.info("configuration %s is in force; changed: %s", loaded.hash, ", ".join(found.changed))
        else:
            logger.info("configuration %s stays: nothing changed that can change while running", loaded.hash)
        if found.restart:
            logger.warning("takes effect only after a restart: %s", ", ".join(found.restart))
