"""Workers that are releases apart: their requests are served as if we were not there, and who looks is told why."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_semkv.bus.subscription import Message
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import encode_announcement
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.outcome.intake import Intake
from tests.fuzz.test_bus_inputs import Nobody
from tests.outcome.build import Listener
from tests.router.fakes import FakeRouter, announcement, donor_on_a1


@pytest.mark.parametrize(("version", "spoken"), [("1.0", True), ("1.7", True), ("2.0", False), ("0.9", False)])
async def test_a_worker_of_another_major_is_served_without_advice(
    version: str, spoken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeRouter(announce=False, lookup=donor_on_a1())
    intake = Intake(
        Nobody(), Listener().tracker, apply_donor_event=lambda event, at: None, announce=fake.directory.announce
    )
    for stable in ("w-a", "w-b"):
        for rank in (0, 1):
            said = msgspec.structs.replace(announcement(stable, rank), version=version)
            subject = subjects.announcements(StableReplica(stable, rank))
            intake.on_announcement(Message(subject, encode_announcement(said), None, 1, 0.0))
    assert await fake.run()
    assert fake.opened.decision_reason == ("placed" if spoken else "namespace_unknown")
    assert fake.ended.end == "complete"
    assert intake.counts["announcements.unsupported_version"] == (0 if spoken else 4)
    assert (f"got '{version}', allowed: 1.x" in caplog.text) is not spoken
    assert not fake.fallbacks.counts
