"""The files of the page, read once from the package: no path of a request ever touches the disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_STATIC = Path(__file__).with_name("static")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page as it is sent; `etag`: 16 hex digits of its SHA-256, without quotes."""

    body: bytes
    content_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """Path below `/` -> file. `index.html` is `""`. Licences and other types stay in the package."""
    found: dict[str, PageFile] = {}
    for path in sorted(_STATIC.rglob("*")):
        content_type = _TYPES.get(path.suffix)
        if path.is_file() and content_type is not None:
            body = path.read_bytes()
            name = path.relative_to(_STATIC).as_posix()
            found[name] = PageFile(body, content_type, hashlib.sha256(body).hexdigest()[:16])
    found[""] = found.pop("index.html")
    return found
