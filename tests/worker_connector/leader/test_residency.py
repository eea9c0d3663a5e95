"""A residency sink gets the blocks that the slab holds, whenever it is attached and whatever happens to them."""

from __future__ import annotations

from tests.worker_connector.harness import MIB, settings
from tests.worker_connector.scripted import ScriptedEngine


class Recorder:
    """A ResidencySink that keeps what a consumer would believe."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.salted: set[bytes] = set()

    def stored(self, parent: bytes | None, blocks: list[tuple[bytes, bytes]], *, salted: bool) -> None:
        assert parent is None or parent in self.blocks
        for key, tokens in blocks:
            assert key not in self.blocks
            self.blocks[key] = tokens
            if salted:
                self.salted.add(key)

    def removed(self, blocks: list[bytes]) -> None:
        for key in blocks:
            del self.blocks[key]

    def cleared(self) -> None:
        self.blocks.clear()


def believed_and_true(engine: ScriptedEngine, recorder: Recorder) -> tuple[set[bytes], set[bytes]]:
    ledger = engine.leader._life.ledger  # type: ignore[union-attr]
    assert ledger is not None
    return set(recorder.blocks), {bytes(entry.key) for entry in ledger.entries() if entry.resident}


def test_residency_follows_the_slab_also_when_attached_late() -> None:
    engine = ScriptedEngine(settings(MIB, min_offer_tokens=1))
    engine.serve(list(range(41)))
    engine.serve(list(range(41)), cache_salt="tenant")
    recorder = Recorder()
    engine.leader.attach_residency(recorder)  # type: ignore[arg-type]
    assert len(recorder.blocks) == 20
    assert len(recorder.salted) == 10
    for n in range(1, 40):
        engine.serve(list(range(1000 * n, 1000 * n + 41)))
    believed, true = believed_and_true(engine, recorder)
    assert believed == true
    assert len(believed) == engine.leader.snapshot()["ledger"]["slots"]
    engine.leader.reset_cache()
    assert believed_and_true(engine, recorder) == (set(), set())


def test_sink_that_fails_costs_nobody_else() -> None:
    class Failing(Recorder):
        def stored(self, parent: bytes | None, blocks: list[tuple[bytes, bytes]], *, salted: bool) -> None:
            raise RuntimeError("the sink's fault")

    engine = ScriptedEngine(settings(MIB, min_offer_tokens=1, min_donor_tokens=4))
    engine.leader.attach_residency(Failing())  # type: ignore[arg-type]
    tokens = list(range(41))
    engine.serve(tokens)
    assert engine.leader.snapshot()["donors"] == 1
    assert engine.prefill(engine.request(tokens)) == 40
    assert engine.leader.snapshot()["event_publisher"]["residency_errors"] == 1


def test_sglang_24568_blocks_of_a_scope_are_flagged() -> None:
    """sglang#24568, ai-dynamo/dynamo#8197: an event without its scope offers a tenant's blocks to everybody."""
    for scope in ({"cache_salt": "a"}, {"lora_task_id": 1}, {"multimodal_hashes": [[1]]}):
        engine = ScriptedEngine(settings(MIB))
        recorder = Recorder()
        engine.leader.attach_residency(recorder)  # type: ignore[arg-type]
        engine.serve(list(range(41)), **scope)
        assert len(recorder.salted) == len(recorder.blocks) == 10
