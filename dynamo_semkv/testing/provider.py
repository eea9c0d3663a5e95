"""An evidence provider that follows a script: answers, raises, waits, or never comes back until released."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.evidence.provider import LookupQuery

Step = Sequence[SemanticTrtMatch] | Exception | Callable[[LookupQuery], Sequence[SemanticTrtMatch]]


class ScriptedProvider:
    """An `EvidenceProvider` for tests: each lookup takes the next step of the script, and the last step is repeated.
    `hang` is a step that blocks until `release()`."""

    def __init__(self, *steps: Step, name: str = "scripted") -> None:
        self._steps: list[Step] = list(steps) or [()]
        self._name = name
        self._released = threading.Event()
        self.queries: list[LookupQuery] = []
        self.threads: list[str] = []
        """Names of the threads that the lookups ran in, in order."""
        self.entered = threading.Event()
        """Set as soon as a lookup has begun."""

    @property
    def name(self) -> str:
        """As given at construction."""
        return self._name

    def lookup(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        """Records the query and does what the next step says: returns it, raises it, or calls it with the query."""
        self.queries.append(query)
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        step = self._steps[min(len(self.queries), len(self._steps)) - 1]
        if isinstance(step, Exception):
            raise step
        return step(query) if callable(step) else step

    def hang(self, query: LookupQuery) -> Sequence[SemanticTrtMatch]:
        """A step for a script that blocks, like a provider that lost its peer. Release it at the end of the test."""
        self._released.wait()
        return ()

    def then(self, *steps: Step) -> ScriptedProvider:
        """Appends steps, for a script that needs the provider itself: `p.then(p.hang, ())` after a first step given at
        construction."""
        self._steps.extend(steps)
        return self

    def release(self) -> None:
        """Lets every step that hangs return nothing, now and from now on."""
        self._released.set()
