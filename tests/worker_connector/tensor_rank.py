"""One tensor-parallel rank as a process of its own: a pool, the worker class that an engine constructs, and commands
over pipes.

Metadata comes pickled, as the engine's broadcast brings it. Run as `python -m tests.worker_connector.tensor_rank`;
ended by whoever started it, or by the end of its input.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from typing import Any, BinaryIO

import torch

from tests.worker_connector.harness import settings
from worker_connector.assembly import assemble_rank_with
from worker_connector.engine_api.engine import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from worker_connector.rank.rank import Rank
from worker_connector.worker import SemkvConnectorWorker

_LENGTH = struct.Struct(">I")


def send(pipe: BinaryIO, message: object) -> None:
    data = pickle.dumps(message)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the other process has ended")
    return pickle.loads(pipe.read(*_LENGTH.unpack(head)))


def layout_of(pool: torch.Tensor, tokens_per_block: int) -> KvCacheLayout:
    size = pool.stride(0) * pool.element_size()
    region = KvCacheRegion(pool.data_ptr(), size, size, len(pool), (KvCacheBufferRef(0, "key"),))
    return KvCacheLayout(tokens_per_block, (KvCacheLayerGroupLayout(0, (0,), None, (region,)),), torch.int32)


class RankProcess:
    """What runs inside."""

    def __init__(self) -> None:
        self.worker: SemkvConnectorWorker | None = None
        self.pool = torch.zeros(0)

    @property
    def rank(self) -> Rank:
        assert self.worker is not None
        return self.worker.rank

    def new(
        self, args: Any, number: int, pages: int, words: int, options: dict[str, Any], by_layout: bool = True
    ) -> None:
        self.stop()
        it = settings(**options)

        class Worker(SemkvConnectorWorker):
            def _assemble(self, llm_args: Any) -> Rank:
                return assemble_rank_with(llm_args, it, inline=True, restarts_failed=True, env={"RANK": str(number)})

        self.worker = Worker(args)
        self.pool = torch.full((pages, words), -1, dtype=torch.int32)
        self.worker.register_kv_cache_layout(layout_of(self.pool, args.kv_cache_config.tokens_per_block))

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()
            self.worker = None

    def start_load(self, pickled: bytes) -> None:
        assert self.worker is not None
        self.worker.bind_connector_meta(pickle.loads(pickled))
        self.worker.start_load_kv(None)

    def wait_for_save(self) -> None:
        assert self.worker is not None
        self.worker.wait_for_save(None)

    def get_finished(self) -> tuple[list[int], list[int]]:
        assert self.worker is not None
        return self.worker.get_finished([], [])

    def write(self, values: list[tuple[int, int, int]]) -> None:
        for page, offset, value in values:
            self.pool[page, offset] = value

    def pages(self) -> list[list[int]]:
        found: list[list[int]] = self.pool.tolist()
        return found

    def register_again(self) -> None:
        assert self.worker is not None
        self.worker.register_kv_cache_layout(layout_of(self.pool, 4))

    def disk_works(self) -> None:
        disk = self.rank.disk_thread
        if disk is not None:
            disk.run_pending()

    def damage(self, slot: int) -> None:
        slab = self.rank.slab
        assert slab is not None
        slab.rows[slot, 0] ^= 1

    def scrub(self) -> None:
        slab, scrubber = self.rank.slab, self.rank.scrubber
        assert slab is not None
        assert scrubber is not None
        scrubber.urgent(slab.sealed_slots(), loaded=False)
        while scrubber._urgent:
            scrubber.step()

    def fail_copies(self) -> None:
        def failing(*args: Any) -> None:
            raise RuntimeError("injected")

        self.rank._stream.to_pages = failing  # type: ignore[method-assign]

    def hold_results(self, hold: bool) -> None:
        """The leader cannot be reached for a while; results wait."""
        remote = self.rank._link.remote
        assert remote is not None
        with remote._wake:
            if hold:
                self._path = remote._endpoint
                remote._endpoint = remote._endpoint._replace(path="/nowhere/ranks")
                remote._hang_up()
            else:
                remote._endpoint = self._path

    def shrink_buffer(self, capacity: int) -> None:
        remote = self.rank._link.remote
        assert remote is not None
        remote._capacity = capacity

    def counts(self) -> dict[str, int]:
        remote = self.rank._link.remote
        return {**self.rank.counts, **(remote.counts if remote is not None else {})}


class RankHandle:
    """The same, from outside."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker_connector.tensor_rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, command: str) -> Any:
        def call(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            send(self.process.stdin, (command, arguments))
            kind, value = receive(self.process.stdout)
            if kind == "error":
                raise RankError(value)
            return value

        return call

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class RankError(RuntimeError):
    """Raised in the rank's process."""


def main() -> None:
    torch.set_num_threads(1)
    rank, source, target = RankProcess(), sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            command, arguments = receive(source)
        except EOFError:
            break
        try:
            answer = ("ok", getattr(rank, command)(*arguments))
        except Exception as error:  # noqa: BLE001 - it is raised in the other process
            answer = ("error", f"{type(error).__name__}: {error}")
        send(target, answer)
    rank.stop()


if __name__ == "__main__":
    main()
