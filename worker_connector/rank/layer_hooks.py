"""LayerHooks: may a pass wait for its loads layer by layer?

`start_load_kv` is the last call that surely comes before a forward pass. Whether the hooks of its layers will come
cannot be known there: a graph replay skips them, in context passes too where pieces of the model are captured
(ai-dynamo/dynamo#3297). So the engine's stream waits there for all loads, unless

* the operator says that no graph covers a pass with a new request (`connector.trust_layer_hooks`), and
* a pass with loads was seen in which the hook of every layer came, in order.

Every pass is held to it: one whose hooks did not all come has read pages too early. It fails before any of its tokens
leaves the engine, and from then on loads are waited for in front of the pass again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker_connector.memory.copy_stream import Ticket


class LayerHooks:
    """Of one rank's pool. Called on the engine's thread."""

    def __init__(self, layers: tuple[int, ...], *, trusted: bool) -> None:
        """`layers`: ids, ascending; empty where the pool does not say which bytes are whose."""
        self._layers = layers
        self._trusted = trusted and bool(layers)
        self._proven = False
        self.tickets: dict[int, Ticket] = {}
        """By layer: copies that were handed over and that no pass has waited for yet."""
        self._came: list[int] | None = None
        self.watching = False
        """The pass has loads: whether its hooks come matters."""

    @property
    def reliable(self) -> bool:
        """Whether loads may be left to the hooks: they are trusted by the settings, and a pass has shown that the
        engine calls them."""
        return self._trusted and self._proven

    def pass_begins(self) -> None:
        """A new pass; whether with loads, `loads_begin` says."""
        self._came = None
        self.watching = False

    def loads_begin(self, tickets: Mapping[int, Ticket] | None) -> None:
        """The pass has loads. `tickets`: by layer, for copies that only the hooks wait for; None: they were waited for
        already."""
        self.tickets = dict(tickets or {})
        self._came = []
        self.watching = True

    def before_layer(self, layer: int, engine_stream: Any, *, recording: bool = False) -> None:
        """The hook. `recording`: the stream is recorded into a graph, and what is said now is not said in its
        replays."""
        if self._came is None or recording:
            return
        self._came.append(layer)
        ticket = self.tickets.pop(layer, None)
        if ticket is not None:
            ticket.hold(engine_stream)

    def waited_elsewhere(self) -> None:
        """The engine's stream was made to wait for everything: the pass that should have did not come, or its loads
        were asked for twice."""
        self.tickets.clear()

    def pass_done(self) -> bool:
        """After a forward pass. False: it has read pages of some layer before they were loaded."""
        if self._came is None:
            return True
        came, self._came = self._came, None
        self.watching = False
        missed, self.tickets = bool(self.tickets), {}
        complete = tuple(came) == self._layers
        self._proven = complete if self._trusted else False
        if missed:
            self._trusted = False
        return not missed
