"""Random schedules over three workers that serve, pull from each other, lie, run out of room and are reset. Every
forward pass checks every byte that it reads, so a block of another prompt, tenant or life of a cache that entered
anywhere is found.

The transport is a call: what enters does not depend on TCP, and this is all that another transport has to do.
"""

from __future__ import annotations

import random
from typing import Any

from dynamo_semkv.contracts.hints import FetchHint
from tests.worker_connector.pulling import desk, fetch_settings
from tests.worker_connector.scripted import Request, ScriptedEngine
from worker_connector.fetch.export import SlabExport
from worker_connector.fetch.transport import Answer, FetchFailed, Rows, Sent, Wanted, Why

SALTS = (None, None, None, "a", "b")
PROMPTS = [[seed] * 6 + [100 + seed * 7 + n for n in range(26)] for seed in range(1, 3)]
"""Of eight blocks."""


class Direct:
    """Ports are numbers of workers, from 1 on. Calls `meanwhile` between two blocks, and hands answers to `lie`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def connect(self, host: str, port: int, deadline: float) -> Source:
        if self._schedule.dice.random() < 0.05:
            raise FetchFailed(Why.UNREACHABLE)
        return Source(self._schedule, port - 1)

    def close(self) -> None: ...


class Source:
    def __init__(self, schedule: Schedule, number: int) -> None:
        self._schedule = schedule
        self._number = number

    def read(self, wanted: Wanted, into: Rows, deadline: float) -> Answer:
        export: SlabExport = desk(self._schedule.engines[self._number]).export
        if export.foreign(wanted) is not None:
            raise FetchFailed(Why.FOREIGN)
        life = export.life()
        blocks: list[Sent] = []
        for index, key in enumerate(wanted.keys):
            self._schedule.meanwhile()
            block = export.read(wanted, key, into[index : index + 1])
            if block is None:
                break
            if self._schedule.dice.random() < 0.03:
                raise FetchFailed(Why.LOST)
            blocks.append(self._schedule.lie(block, into[index]))
        if export.life() != life:
            raise FetchFailed(Why.RESET)
        return Answer(life, tuple(blocks))

    def close(self) -> None: ...


class Schedule:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.engines = [ScriptedEngine(fetch_settings(), slots=self.dice.choice([6, 14, 60])) for _ in range(3)]
        for engine in self.engines:
            fetcher = desk(engine).fetcher
            fetcher._transport = Direct(self)
            fetcher._clock = lambda: 0.0  # the schedule decides, and nothing else
            fetcher._peers._resting = _Never()  # type: ignore[assignment]
        self.running: list[tuple[ScriptedEngine, Request]] = []
        self.pulled = 0
        self.weights = "w0"
        self.busy = False

    def prompt(self) -> list[int]:
        base = self.dice.choice(PROMPTS)
        cut = self.dice.choice([self.dice.randint(1, len(base)), len(base)])
        return base[:cut] + [self.dice.randint(200, 201) for _ in range(self.dice.choice([1, 1, 6]))]

    def step(self) -> None:
        engine = self.dice.choice(self.engines)
        what = self.dice.choices(
            ("serve", "begin", "go on", "pull", "hint", "reset", "named", "weights"), (6, 4, 6, 12, 3, 0.3, 1, 0.1)
        )[0]
        if what == "serve":
            engine.serve(self.prompt(), cache_salt=self.dice.choice(SALTS))
        elif what == "begin":
            request = engine.request(self.prompt(), cache_salt=self.dice.choice(SALTS))
            offered = engine.ask(request)
            if self.dice.random() < 0.3:
                self.pull(engine)  # between the offer and its load
            engine.allocate(request, 0, offered, min(offered + 4, request.prompt_len))
            engine.iterate((request, min(4, request.prompt_len - request.context_current_position)))
            self.running.append((engine, request))
        elif what == "go on" and self.running:
            self.go_on(self.dice.randrange(len(self.running)))
        elif what == "pull":
            self.pull(engine)
        elif what == "hint":
            self.serve_with_hint(engine)
        elif what == "reset":
            engine.leader.reset_cache()
        elif what == "named":
            if not engine.leader.comparable:  # it pulls and serves again
                engine.leader.weights_changed(self.weights)
        elif what == "weights":
            self.weights = f"w{self.dice.randint(0, 1)}"
            for one in self.engines:  # of a fleet; a worker behind the others has another namespace
                one.leader.weights_changed(self.weights)

    def go_on(self, index: int) -> None:
        engine, request = self.running[index]
        left = request.prompt_len - request.context_current_position
        if left > 0:
            engine.iterate((request, min(left, self.dice.choice([4, 5, 9]))))
            return
        del self.running[index]
        request.tokens.append(1)
        engine.finish(request)

    def pull(self, engine: ScriptedEngine) -> None:
        future = desk(engine).fetch(self.prompt(), self.hint(engine), salt=self.dice.choice(SALTS))
        if future is not None and not self.busy:
            self.busy = True
            desk(engine).fetcher.run_pending()
            self.busy = False
            self.pulled += future.result(0) if future.done() else 0

    def serve_with_hint(self, engine: ScriptedEngine) -> None:
        hint = self.hint(engine)
        payload = {"source_control_endpoint": hint.source_control_endpoint, "block_hashes": hint.block_hashes}
        action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        engine.serve(self.prompt(), cache_salt=self.dice.choice(SALTS), kv_hints=envelope)

    def hint(self, engine: ScriptedEngine) -> FetchHint:
        others = [number for number, other in enumerate(self.engines) if other is not engine]
        host = self.dice.choice(["127.0.0.1"] * 19 + ["10.0.0.1"])
        return FetchHint(
            source_control_endpoint=f"tcp://{host}:{1 + self.dice.choice(others)}",
            block_hashes=[0] * self.dice.choice([0, 3, 9, 9, 9]),
        )

    def meanwhile(self) -> None:
        """While a pull is under way, other threads' work goes on."""
        if self.dice.random() < 0.1:
            engine = self.dice.choice(self.engines)
            chosen = self.dice.random()
            if chosen < 0.3:
                engine.leader.reset_cache()
            elif chosen < 0.6:
                engine.serve(self.prompt(), cache_salt=self.dice.choice(SALTS))
            elif self.running:
                self.go_on(self.dice.randrange(len(self.running)))

    def lie(self, block: Sent, row: Any) -> Sent:
        chosen = self.dice.random()
        if chosen < 0.05:
            row[self.dice.randrange(8)] ^= 1 << self.dice.randrange(8)
        elif chosen < 0.1:
            return Sent(bytes(len(block.tokens)), block.seal)
        return block

    def end(self) -> None:
        while self.running:
            self.go_on(0)
        for engine in self.engines:
            while desk(engine).fetcher.run_pending():
                pass
            engine.idle()
            life, _, _ = engine.leader.cache()
            assert life is not None
            assert life.ledger is not None
            engine.check_balance_of(life.ledger.slots)
            assert not desk(engine).fetcher.counts["error"]
            assert not desk(engine).fetcher._open


class _Never(dict[Any, Any]):
    """Nobody rests: the schedule has no clock."""

    def __setitem__(self, key: Any, value: Any) -> None: ...


def test_no_wrong_byte_is_ever_read() -> None:
    entered = 0
    results: dict[str, int] = {}
    for seed in range(40):
        schedule = Schedule(seed)
        for _ in range(60):
            schedule.step()
        schedule.end()
        for engine in schedule.engines:
            entered += desk(engine).fetcher.blocks
            for name, count in desk(engine).fetcher.counts.items():
                results[name] = results.get(name, 0) + count
    assert entered > 100
    # The schedules are worth something only if they come by all of these.
    assert {"complete", "short", "wrong_bytes", "wrong_tokens", "no_slot", "own_reset"} <= results.keys()
    assert {"reset", "lost", "unreachable", "address_not_allowed", "nothing_missing"} <= results.keys()
