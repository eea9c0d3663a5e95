"""A running router's file: which of its values take effect at once, and when it has changed.

    merge(running, wanted) -> Merged                        pure
    ConfigWatch(loaded, env)  .poll(force=False) -> Reload | None   .status() -> dict

A reload never does harm by half: the whole file is read and checked as at the start, and either all values that may
change take effect together or none does. What else differs stays as it is until the process is started again, and is
named.

A file that is being written is not read: it must look the same (mtime, inode, size) at two polls in a row. `force`
(SIGHUP) does not wait.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_semkv.config.load import Loaded, build, config_hash, load_config
from dynamo_semkv.config.schema import Config, plain, require_request_local_kv
from dynamo_semkv.contracts.errors import ContractError, each

logger = logging.getLogger(__name__)

RELOADABLE = (
    "placement",
    "scoring",
    "hints.enabled",
    "evidence.deadline_ms",
    "evidence.exact_deadline_ms",
    "evidence.skip_when_exact_covers",
    "evidence.max_matches",
    "evidence.min_overlap_tokens",
)
"""Fields and whole sections: policy that is read anew for each request, and holds no connection, thread, index or
file."""


class Merged(NamedTuple):
    """A changed file beside what is running."""

    config: Config
    """`running`, with the reloadable values of `wanted`."""
    changed: tuple[str, ...]
    """Paths of the values that took effect."""
    restart: tuple[str, ...]
    """Paths of the values that differ and did not."""


class Reload(NamedTuple):
    """Something to say about the file. With an error everything stays as it was."""

    loaded: Loaded
    """What is in force now."""
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    error: str | None = None


class _Look(NamedTuple):
    """What a file looks like from outside. Through a symbolic link, as Kubernetes mounts a ConfigMap: its target."""

    mtime_ns: int
    inode: int
    size: int


def reloadable(path: str) -> bool:
    """Whether a changed value of this field takes effect without a restart."""
    return any(path == field or path.startswith(f"{field}.") for field in RELOADABLE)


def merge(running: Config, wanted: Config) -> Merged:
    """Paths are in the order of the schema."""
    now, then = plain(running), dict(_leaves(plain(wanted)))
    tree, changed, restart = _copied(now), [], []
    for path, value in _leaves(now):
        if then[path] == value:
            continue
        if reloadable(path):
            changed.append(path)
            _put(tree, path.split("."), then[path])
        else:
            restart.append(path)
    return Merged(build(tree), tuple(changed), tuple(restart))


class ConfigWatch:
    """Of `loaded.path`, if it has one. `poll` does file I/O and is for one thread at a time; `status` is for any."""

    def __init__(
        self, loaded: Loaded, env: Mapping[str, str] | None = None, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._loaded = loaded
        self._env = dict(env if env is not None else os.environ)
        self._wall = wall
        self._seen: _Look | None = None
        """At the last poll. None: there was no file, or no poll yet."""
        self._polled = False
        self._read: _Look | None = None
        """When it was last read after it had settled."""
        self._restart: tuple[str, ...] = ()
        self._error: str | None = None
        self._reloaded_at: float | None = None
        self._reloads = 0

    @property
    def path(self) -> str | None:
        """The file that is watched; None where there is none."""
        return self._loaded.path

    def status(self) -> dict[str, Any]:
        """JSON-able. `reloaded_at` in Unix seconds; None: what was read at the start is in force."""
        return {
            "hash": self._loaded.hash,
            "watched": self.path is not None,
            "reloads": self._reloads,
            "reloaded_at": self._reloaded_at,
            "last_reload_error": self._error,
            "restart_needed": list(self._restart),
        }

    def poll(self, force: bool = False) -> Reload | None:
        """None: nothing new. Each error is told once, until the file changes or is forced. Raises nothing of the file's
        making."""
        if self.path is None:
            return None
        look = _look(self.path)
        if not force and not self._settled(look):
            return None
        # Of a file that may still be written, the look is not kept: the next polls read it once more.
        self._read = None if force else look
        found = self._found(self.path)
        if isinstance(found, str):
            if found == self._error and not force:
                return None
            self._error = found
            return Reload(self._loaded, restart=self._restart, error=found)
        wanted, merged = found
        news = force or bool(merged.changed) or merged.restart != self._restart or self._error is not None
        self._error, self._restart = None, merged.restart
        if merged.changed:
            self._loaded = wanted._replace(config=merged.config, hash=config_hash(merged.config))
            self._reloads += 1
            self._reloaded_at = self._wall()
        return Reload(self._loaded, merged.changed, merged.restart) if news else None

    def _found(self, path: str) -> tuple[Loaded, Merged] | str:
        """What the file says, or why it is refused."""
        try:
            wanted = self._wanted(path)
            return wanted, merge(self._loaded.config, wanted.config)
        except (ContractError, OSError) as error:
            return "; ".join(str(one) for one in (each(error) if isinstance(error, ContractError) else (error,)))
        except Exception as error:  # a file that finds a fault of ours is refused like any other; told and logged
            logger.exception("the changed configuration could not be read")
            return f"config: {type(error).__name__}: {error}"

    def _settled(self, look: _Look | None) -> bool:
        """Whether there is something to read: it looks as at the last poll, and not as when it was read. A file that is
        gone is an error to tell, once it has been gone for two polls."""
        same, self._seen = self._polled and look == self._seen, look
        self._polled = True
        return same and (look is None or look != self._read)

    def _wanted(self, path: str) -> Loaded:
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode) and found.st_size == 0:
            # More likely a writer that was cut off than the wish for every default.
            raise ContractError("config", "an empty file", "at least {} to go back to the defaults")
        wanted = load_config(path, self._env)
        require_request_local_kv(wanted.config, advertised=False)
        return wanted


def _look(path: str) -> _Look | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return _Look(found.st_mtime_ns, found.st_ino, found.st_size)


def _leaves(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


__all__ = ["RELOADABLE", "ConfigWatch", "Merged", "Reload", "merge", "reloadable"]
