"""The bench's model directory with a small vocabulary.

One token per word ``w0 .. w{n-1}``, so a test that sends ``n`` words knows the prompt's token count, and a completion
shows which token ids came back.
"""

from __future__ import annotations

from pathlib import Path

from dynamo_semkv.bench.router import model_dir

WORDS = 2000


def prompt(start: int, count: int) -> str:
    """``count`` words from ``w{start}`` on; ``count`` tokens."""
    return model_dir.text(i % WORDS for i in range(start, start + count))


def write_model_dir(path: Path) -> Path:
    return model_dir.write_model_dir(path, WORDS, context=65_536)
