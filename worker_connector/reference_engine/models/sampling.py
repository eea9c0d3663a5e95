"""Choosing the next token from logits: greedy, or seeded temperature / top-k / top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. A temperature of 0 is greedy, whatever the other values are."""

    temperature: float = 0.0
    #: Keep the smallest set of tokens whose probability reaches this.
    top_p: float = 1.0
    #: Keep this many tokens; 0 keeps all.
    top_k: int = 0
    #: None draws a seed, so two requests differ.
    seed: int | None = None
    #: Put the logits behind every generated token into `RequestStats.generation_logits`.
    return_generation_logits: bool = False

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")


class Sampler:
    """One request's sampler; with a seed its choices depend on seed and logits only."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id from logits `[vocab_size]`."""
        params, logits = self._params, logits.cpu()
        if params.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
        ranked, order = probabilities.sort(descending=True, stable=True)
        if params.top_k:
            ranked[params.top_k :] = 0.0
        if params.top_p < 1:
            # A token is kept while the mass before it is below top_p, so the best one always is.
            ranked[ranked.cumsum(-1) - ranked >= params.top_p] = 0.0
        return int(order[torch.multinomial(ranked, 1, generator=self._generator)])
