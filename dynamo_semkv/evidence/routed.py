"""RoutedPrompts: which routed prompt a donor was made of. Donor events carry no tokens, and a language model needs
text.

A router has the tokens of the prompts that it routed itself. A donor's sketch carries keys of its block chain, and a
key stands for every token before it: a donor whose last keys are those of a routed prompt *is* that prompt, as far as
the key reaches. A key must reach over two thirds of both, so prompts that begin alike are not taken for one another.

Limits: prompts that another router routed, or this one before it was restarted, are not known, nor are those that fell
out of `max_bytes`. Donors made of them have no text here, whatever their events say.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dynamo_semkv.contracts.keys import BlockKey, TokenArray
from dynamo_semkv.contracts.sketch import checkpoint_ordinals
from dynamo_semkv.evidence.donor import CatalogDonor

REACH = 2 / 3

_Key = tuple[str, BlockKey]
"""Hex namespace digest (the key already depends on it; here so that no collision can join two tenants), block key."""


@dataclass(frozen=True)
class _Prompt:
    tokens: TokenArray
    keys: tuple[_Key, ...] = field(repr=False)


class RoutedPrompts:
    """Not thread-safe. Bounded by the tokens that it keeps; the prompts that were routed longest ago go first."""

    def __init__(self, max_bytes: int, max_donors: int) -> None:
        self._max_bytes = max_bytes
        self._max_donors = max_donors
        self._prompts: OrderedDict[_Key, _Prompt] = OrderedDict()
        """By the key of the whole prompt."""
        self._by_key: dict[_Key, _Prompt] = {}
        self._bytes = 0
        self._waiting: OrderedDict[str, CatalogDonor] = OrderedDict()
        self._waiting_at: dict[_Key, str] = {}
        self.counts: Counter[str] = Counter()
        """`routed`, `repeated`, `too_short`, `crowded_out`, `joined`, `no_keys`, `waiting`, `waiting_crowded_out`."""

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are kept."""
        return self._bytes

    def routed(self, digest_hex: str, chain: Sequence[BlockKey], tokens: TokenArray) -> CatalogDonor | None:
        """Keeps a routed prompt. Returns the donor that waited for it, whose text `tokens` is; None: none did."""
        if not chain or tokens.nbytes > self._max_bytes:
            self.counts["too_short" if not chain else "crowded_out"] += 1
            return None
        keys = tuple(
            (digest_hex, chain[ordinal])
            for ordinal in checkpoint_ordinals(len(chain))
            if ordinal + 1 >= REACH * len(chain)
        )
        if keys[-1] in self._prompts:
            self.counts["repeated"] += 1
            self._prompts.move_to_end(keys[-1])
        else:
            self.counts["routed"] += 1
            self._keep(_Prompt(tokens, keys))
        for key in reversed(keys):
            donor_id = self._waiting_at.get(key)
            if donor_id is not None:
                self.counts["joined"] += 1
                donor = self._waiting[donor_id]
                self.removed(donor_id)
                return donor
        return None

    def added(self, donor: CatalogDonor) -> TokenArray | None:
        """The prompt that the donor was made of, or None: then it waits for that prompt to be routed again."""
        self.removed(donor.donor_id)
        keys = list(_keys(donor))
        if not keys:
            self.counts["no_keys"] += 1
            return None
        for key in keys:
            prompt = self._by_key.get(key)
            if prompt is not None:
                self.counts["joined"] += 1
                return prompt.tokens
        self.counts["waiting"] += 1
        while len(self._waiting) >= self._max_donors:
            self.removed(next(iter(self._waiting)))
            self.counts["waiting_crowded_out"] += 1
        self._waiting[donor.donor_id] = donor
        for key in keys:
            self._waiting_at[key] = donor.donor_id
        return None

    def removed(self, donor_id: str) -> None:
        """Stops waiting for the donor's prompt; nothing happens if it did not wait."""
        donor = self._waiting.pop(donor_id, None)
        if donor is not None:
            for key in _keys(donor):
                if self._waiting_at.get(key) == donor_id:
                    del self._waiting_at[key]

    def _keep(self, prompt: _Prompt) -> None:
        self._prompts[prompt.keys[-1]] = prompt
        self._bytes += prompt.tokens.nbytes
        for key in prompt.keys:
            self._by_key[key] = prompt
        while self._bytes > self._max_bytes:
            _, oldest = self._prompts.popitem(last=False)
            self._bytes -= oldest.tokens.nbytes
            self.counts["crowded_out"] += 1
            for key in oldest.keys:
                if self._by_key.get(key) is oldest:
                    del self._by_key[key]


def _keys(donor: CatalogDonor) -> Iterator[_Key]:
    """The longest-reaching first."""
    checkpoints = donor.sketch.checkpoints if donor.sketch is not None else []
    for ordinal, key in reversed(checkpoints):
        if ordinal + 1 < REACH * (checkpoints[-1][0] + 1):
            return
        yield donor.namespace_digest_hex, key
