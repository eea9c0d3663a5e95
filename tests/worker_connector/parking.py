"""A scripted engine that parks requests for asynchronous loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import OPTIONS, Request, ScriptedEngine

TOKENS = list(range(41))


class Parking(ScriptedEngine):
    """Copies of parked loads happen when the test says so (`go`), in steps of one block."""

    def __init__(self, **options: Any) -> None:
        it = settings(MIB, **{**OPTIONS, "async_load_min_tokens": 8, "async_load_deadline_seconds": 2.0})
        super().__init__(it, **options)
        self.jobs: list[Callable[[], None]] = []
        self.seconds = 0.0
        self.loads._run = self.jobs.append
        self.loads._clock = lambda: self.seconds
        self.loads._step = 1

    @property
    def loads(self) -> Any:
        return self.rank._loads

    def go(self) -> None:
        jobs, self.jobs[:] = list(self.jobs), []
        for job in jobs:
            job()

    @property
    def leases(self) -> int:
        return int(self.leader.snapshot()["leases"])


def warm(**options: Any) -> Parking:
    engine = Parking(**options)
    engine.serve(TOKENS)
    return engine


def finish(engine: ScriptedEngine, request: Request) -> None:
    request.tokens.append(1)
    engine.finish(request)
