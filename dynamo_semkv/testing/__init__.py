"""Fakes for tests against this package, its own and yours: a manual clock, a tape of donor events, a scripted evidence
provider.

`clock.py`: ManualClock. `tape.py`: EventTape. `provider.py`: ScriptedProvider.
"""

from dynamo_semkv.testing.clock import ManualClock
from dynamo_semkv.testing.provider import ScriptedProvider
from dynamo_semkv.testing.tape import EventTape

__all__ = ["EventTape", "ManualClock", "ScriptedProvider"]
