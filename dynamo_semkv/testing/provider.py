"""An evidence provider that follows a script: answers, raises, waits, or never comes back until released."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.evidence.provider import LookupQuery

Step = Sequence[SemanticTrtMatch] | Exception | Callable[[LookupQuery], Sequence[SemanticTrtMatch]]


class ScriptedProvider:
    """Each lookup takes the next step; the last one is repeated. `hang` is a step that blocks until `release()`."""

    def __init__(self, *steps: Step, name: str = "scripted") -> None:
        self._steps: list[Step] = list(steps) or [()]
        self._name = name
        self._released = threading.Event()
        self.queries: list[LookupQuery] = []
        self.threads: list[str] = []
        """Name of the thread that each lookup ran in."""
        self.entered = threading.Event()
        """Set when a lookup has begun."""

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        self.queries.append(query)
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        step = self._steps[min(len(self.queries), len(self._steps)) - 1]
        if isinstance(step, Exception):
            raise step
        return step(query) if callable(step) else step

    def hang(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        """Blocks as a provider does that lost its peer; a step for a script. Release it at the end of the test."""
        self._released.wait()
        return ()

    def then(self, *steps: Step) -> ScriptedProvider:
        """Appends steps, for a script that needs the provider itself: `p.then(p.hang, ())` after a first step given."""
        self._steps.extend(steps)
        return self

    def release(self) -> None:
        self._released.set()
