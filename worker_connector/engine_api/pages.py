"""Which page slots a request owns: block ordinals, layer groups, blocks without a page.

TensorRT-LLM reports page slots as deltas, in three forms by version: one flat list, a list of lists indexed by layer
group id, or a dict keyed by it (KV Cache Connector doc, "Running under VSWA"). Entry i of a group describes tokens `[i
* tokens_per_block, (i + 1) * tokens_per_block)` of the sequence; -1 stands for a block that has no page there, in
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

NO_PAGE = -1


class PageTable:
    """Page slots of one allocation of one request, one list per layer group, grown by deltas only.

    A delta that does not fit the registered layer groups breaks the table: `at` then knows no page of any later block,
    so a misread report costs reuse and never touches another request's memory.
    """

    __slots__ = ("_closed", "_groups", "_slots", "broken")

    def __init__(self, group_ids: Sequence[int]) -> None:
        self._groups = tuple(group_ids)
        self._slots: tuple[list[int], ...] = tuple([] for _ in group_ids)
        self.broken = False
        self._closed = False

    def extend(
        self, flat: Iterable[int], grouped: Sequence[Sequence[int]] | Mapping[int, Sequence[int]] | None
    ) -> None:
        """Appends one report's `new_block_ids` and `new_block_ids_by_layer_group`. The grouped form wins where it says
        anything; with one group both carry the same slots."""
        if self.broken or self._closed:
            return
        flat = flat if isinstance(flat, list) else list(flat)
        if not names_pages(flat, grouped):
            return  # most decodes
        deltas = _by_group(grouped)
        if not deltas:
            if len(self._groups) == 1:
                self._append(0, flat)
            elif flat:
                self.broken = True
            return
        if any(slots and group not in self._groups for group, slots in deltas.items()):
            self.broken = True
            return
        for index, group in enumerate(self._groups):
            self._append(index, deltas.get(group, []))

    def doubt(self, first: int) -> None:
        """Forgets the pages of the blocks from ordinal `first` on, which may not be those that were reported, and takes
        no further reports."""
        for slots in self._slots:
            del slots[first:]
        self._closed = True

    def fresh(self, before: int) -> list[tuple[int, int]]:
        """(index of the layer group, page slot) of every page of the blocks from ordinal `before` on."""
        if self.broken:
            return []
        return [(index, slot) for index, slots in enumerate(self._slots) for slot in slots[before:] if slot != NO_PAGE]

    def lose(self, index: int, slot: int) -> bool:
        """The page belongs to another request now: its block has none here any more. False if it was none of these."""
        slots = self._slots[index]
        if slot not in slots:
            return False
        slots[slots.index(slot)] = NO_PAGE
        return True

    def _append(self, index: int, slots: list[int]) -> None:
        self._slots[index].extend(slots if min(slots, default=0) >= 0 else [max(slot, NO_PAGE) for slot in slots])

    def at(self, ordinal: int) -> tuple[int, ...] | None:
        """Page slot of one block in every group, in the order of the group ids; `NO_PAGE` where a group has none. None
        while some group has not reported that block, and always for a broken table."""
        found = self.span(ordinal, ordinal + 1)
        return found[0] if found else None

    def span(self, start: int, stop: int) -> list[tuple[int, ...]]:
        """`at` of the blocks [start, stop), as far as every group has reported them."""
        if self.broken:
            return []
        return list(zip(*(slots[start:stop] for slots in self._slots), strict=False))

    def __len__(self) -> int:
        """Blocks that every group has reported."""
        return 0 if self.broken else min(map(len, self._slots), default=0)


def block_size_fault(
    reported: int, tokens: int, pass_end: int, tokens_per_block: int, *, whole_prompt: bool
) -> str | None:
    """What is wrong with the number of blocks in a request's first report, or None.

    `reported`: blocks that the report names; 0 is never wrong. `tokens`: tokens of the request. `pass_end`: first
    position behind the coming forward pass. `whole_prompt`: the engine allocates a whole prompt at once, as
    TensorRT-LLM's first KV cache manager does (`add_sequence`), so the number is known exactly; other managers allocate
    as far as the pass goes. A page that holds another number of tokens than was configured would be read under wrong
    tokens (NVIDIA/TensorRT-LLM#13320).
    """
    least = -(-min(pass_end, tokens) // tokens_per_block)
    exact = -(-tokens // tokens_per_block)
    if not reported or (reported == exact if whole_prompt else reported >= least):
        return None
    needed = exact if whole_prompt else least
    return (
        f"{tokens} tokens were given {reported} blocks; with {tokens_per_block} tokens in a block they take "
        f"{'exactly' if whole_prompt else 'at least'} {needed}, so the engine's blocks have another size"
    )


def names_pages(flat: Sequence[int], grouped: Sequence[Sequence[int]] | Mapping[int, Sequence[int]] | None) -> bool:
    """True if a report names any page; those of most decoded tokens name none."""
    if len(flat) or not grouped:
        return len(flat) > 0
    return any(grouped.values() if isinstance(grouped, Mapping) else grouped)


def _by_group(grouped: Sequence[Sequence[int]] | Mapping[int, Sequence[int]] | None) -> dict[int, list[int]]:
    """Group id -> slots; empty when no group says anything."""
    if not grouped:
        return {}
    if isinstance(grouped, list):  # first: to ask whether something is a Mapping runs the ABC's own code
        return {group: list(slots) for group, slots in enumerate(grouped)} if any(grouped) else {}
    pairs = grouped.items() if isinstance(grouped, Mapping) else enumerate(grouped)
    found = {int(group): list(slots) for group, slots in pairs}
    return found if any(found.values()) else {}


def page_slots(
    group_ids: Sequence[int],
    flat: Iterable[int],
    grouped: Sequence[Sequence[int]] | Mapping[int, Sequence[int]] | None,
) -> list[tuple[int, int]]:
    """(index of the layer group, page slot) of every page that one report names, in whichever form."""
    deltas = _by_group(grouped)
    if not deltas:
        deltas = {group_ids[0]: list(flat)} if len(group_ids) == 1 else {}
    index_of = {group: index for index, group in enumerate(group_ids)}
    return [
        (index_of[group], slot) for group, slots in deltas.items() if group in index_of for slot in slots if slot >= 0
    ]
