"""Where whoever changes the engine's weights or empties its cache says so.

TensorRT-LLM tells a connector neither. A weight update runs in the process of each rank
(`tensorrt_llm.llmapi.rlhf_utils.WorkerExtension`, `update_weights`), beside the connector and between two iterations,
so that is where to call `weights_changed`:

    class Extension(WorkerExtension):
        def update_weights(self, ipc_handles=None):
            super().update_weights(ipc_handles)
            if ipc_handles is None:  # the last call of an update
                weights_changed("step-42")
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)


MAX_REVISION = 256


class Owner(Protocol):
    """A leader."""

    def reset_cache(self) -> None:
        """Drops everything that is cached, in every tier."""

    def weights_changed(self, revision: str) -> None:
        """The engine's weights are another revision: what is cached belongs to no request any more."""


_lock = threading.Lock()
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def owns_cache(owner: Owner) -> None:
    """As long as it lives."""
    with _lock:
        _owners.add(owner)


def reset_cache() -> int:
    """Everything that connectors of this process have saved is worth nothing, and so are their donors. Returns how many
    heard it: 0 in the processes of other ranks, where there is nothing to forget. Thread-safe; does not wait for a
    forward pass, but for the disk, where there is a tier on it. What a connector raises (OSError: its disk did not take
    it) comes when all have heard it."""
    return _each(lambda owner: owner.reset_cache())


def weights_changed(revision: str) -> int:
    """As `reset_cache`, for other weights. `revision` names them, the same on all replicas that serve them: KV of
    before and after is told apart by it, also on disk and after a restart. ContractError, and nothing is done, for one
    that is no name."""
    name = checked_revision(revision)
    heard = _each(lambda owner: owner.weights_changed(name))
    _log.info("semkv connector: weights are %r now; %d caches were emptied", name, heard)
    return heard


def checked_revision(revision: str) -> str:
    """Without blanks around it."""
    allowed = f"1 to {MAX_REVISION} printable characters that name the new weights"
    if not isinstance(revision, str):
        raise ContractError("revision", revision, allowed)
    name = revision.strip()
    if len(name) > MAX_REVISION:
        raise ContractError("revision", f"{name[:32]}... ({len(name)} characters)", allowed)
    if not name or not name.isprintable():
        raise ContractError("revision", revision, allowed)
    return name


def _each(tell: Callable[[Owner], None]) -> int:
    """Tells every owner, also when one of them fails; its error comes afterwards."""
    with _lock:
        owners = list(_owners)
    failed: Exception | None = None
    for owner in owners:
        try:
            tell(owner)
        except Exception as error:  # noqa: BLE001 - the others' KV is as wrong as this one's; the first error is raised below
            _throttled.exception("semkv connector: a cache was not reset wholly")
            failed = failed or error
    if failed is not None:
        raise failed
    return len(owners)
