"""Longer runs, and one again.

python -m tests.worker_connector.schedules run [--number N] [--seed S]
python -m tests.worker_connector.schedules replay HEX
"""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import sys
import time
import traceback
from collections import Counter
from functools import partial

from tests.worker_connector.schedules.schedule import random_tape, run_schedule, shorter


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.worker_connector.schedules")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="random schedules; on a failure, the shortest one found that fails")
    run.add_argument("--number", type=int, default=20_000)
    run.add_argument("--seed", type=int, default=None, help="of the first schedule; random if left out, and printed")
    replay = verbs.add_parser("replay", help="one schedule again, with its traceback")
    replay.add_argument(
        "--shorten", action="store_true", help="first look for a shorter one that fails in the same way"
    )
    replay.add_argument("tape", type=bytes.fromhex)
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.verb == "replay":
        return _replay(options.tape, shorten=options.shorten)
    return _run(options.number, secrets.randbelow(2**31) if options.seed is None else options.seed)


def _run(number: int, seed: int) -> int:
    print(f"{number} schedules, seed {seed}", flush=True)
    seen: Counter[str] = Counter()
    started = said = time.monotonic()
    for index in range(number):
        data = random_tape(random.Random(seed + index))
        try:
            seen.update(run_schedule(data))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shortened and shown
            print(f"schedule {index} (seed {seed + index}) failed: {type(error).__name__}: {error}", flush=True)
            return _replay(data, shorten=True)
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"{index + 1} schedules in {said - started:.0f} s", flush=True)
    print(f"{number} schedules in {time.monotonic() - started:.0f} s, no failure: {dict(seen)}")
    return 0


def _replay(data: bytes, *, shorten: bool) -> int:
    try:
        print(dict(run_schedule(data)))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
        if not shorten:
            traceback.print_exc()
            return 1
        data = shorter(data, partial(_fails, type(error)))
        print(f"python -m tests.worker_connector.schedules replay {data.hex()}", flush=True)
        return _replay(data, shorten=False)
    return 0


def _fails(kind: type[Exception], data: bytes) -> bool:
    try:
        run_schedule(data)
    except kind:
        return True
    except Exception:  # noqa: BLE001 - another failure is another schedule's
        return False
    return False


if __name__ == "__main__":
    sys.exit(main())
