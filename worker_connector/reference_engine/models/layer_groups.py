"""Layer groups: layers that share an attention window, and with it a pool and a space of page slots.

Window and sinks decide which positions attention reads, and so which blocks of a sequence need a page once a *history*
of so many tokens is computed. Positions count from 0; the next token computed is at position `history`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same attention window; their pages are allocated together."""

    #: Counts from 0 without gaps, in order of the groups' first layers.
    group_id: int
    layers: tuple[int, ...]
    #: Position p sees the `window` positions up to and with itself; None: all.
    window: int | None = None
    #: The first positions of a sequence, which a window always sees.
    sink_tokens: int = 0

    def stale_blocks(self, history: int, tokens_per_block: int) -> range:
        """Ordinals of the blocks that no position from `history` on reads: those between the sinks and the window."""
        if self.window is None:
            return range(0)
        first = -(-self.sink_tokens // tokens_per_block)
        return range(first, max(first, (history + 1 - self.window) // tokens_per_block))

    def first_visible(self, position: int) -> int:
        """The first position behind the sinks that `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


def layer_groups(
    num_layers: int, windows: Sequence[int] = (), sink_tokens: int = 0, max_seq_len: int | None = None
) -> tuple[LayerGroup, ...]:
    """Groups of a model whose layer i has the window `windows[i % len(windows)]`, as TensorRT-LLM repeats them; none,
    or one that a sequence cannot outgrow, is full attention."""
    of_layer: list[int | None] = []
    for layer in range(num_layers):
        window = windows[layer % len(windows)] if windows else None
        of_layer.append(None if window is None or (max_seq_len is not None and window >= max_seq_len) else window)
    return tuple(
        LayerGroup(
            group_id,
            tuple(layer for layer, other in enumerate(of_layer) if other == window),
            window,
            0 if window is None else sink_tokens,
        )
        for group_id, window in enumerate(dict.fromkeys(of_layer))
    )
