"""A fingerprint of the weights that an engine runs on, as far as its namespace does not name them: two workers compare
it before one takes KV from the other.

A namespace names the model as `llm_args` does. One directory name may hold other weights on another machine, or the
next ones while a fleet is rolled over, and engines may change a model as they load it. So: names and sizes of the files
in the directory, about a thousand samples of the large ones, the small ones whole. Weights of which less than a
hundredth was trained anew may pass for the old ones: they want a name of their own (`revision`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".engine", ".json")
_WHOLE = 64 * 1024
_SAMPLES = 1_024
_SAMPLES_OF_FILE = 16
_SAMPLE = 1024
_LOADING = ("load_format", "checkpoint_format", "model_kwargs")
"""Fields of `llm_args` that make other weights, or another use of them, of the same files."""


def weights_print(llm_args: Any) -> str:
    """Hex. Reads about 1 MiB, more of more than 64 files. OSError where the directory cannot be read."""
    made = hashlib.sha256()
    for name in _LOADING:
        value = getattr(llm_args, name, None)
        _add(made, name, json.dumps(getattr(value, "value", value), sort_keys=True, default=str).encode())
    model = getattr(llm_args, "model", None)
    directory = Path(model) if isinstance(model, (str, Path)) and str(model) else None
    if directory is not None and directory.is_dir():
        files = [path for path in sorted(directory.iterdir()) if path.suffix in SUFFIXES and path.is_file()]
        for path in files:
            size = path.stat().st_size
            with path.open("rb") as file:
                _add(made, f"{path.name}\0{size}", _sample(file, size, max(_SAMPLES // len(files), _SAMPLES_OF_FILE)))
    return made.hexdigest()


def _add(made: hashlib._Hash, name: str, content: bytes) -> None:
    made.update(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() + hashlib.sha256(content).digest())


def _sample(file: BinaryIO, size: int, samples: int) -> bytes:
    if size <= _WHOLE:
        return file.read()
    parts = []
    for number in range(samples):  # the first one holds the names and shapes of the tensors
        file.seek((size - _SAMPLE) * number // (samples - 1))
        parts.append(file.read(_SAMPLE))
    return b"".join(parts)
