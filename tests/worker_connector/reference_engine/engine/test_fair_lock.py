"""The lock is handed over in order of arrival."""

from __future__ import annotations

import threading

from tests.worker_connector.reference_engine.running import PATIENCE_S, until
from worker_connector.reference_engine.engine.fair_lock import FairLock


def test_waiters_get_it_in_order_and_one_at_a_time() -> None:
    lock = FairLock()
    order: list[int] = []
    inside = threading.Semaphore(1)

    def enter(name: int) -> None:
        with lock:
            assert inside.acquire(blocking=False)
            order.append(name)
            inside.release()

    threads = [threading.Thread(target=enter, args=(name,)) for name in range(5)]
    with lock:
        for waiting, thread in enumerate(threads, start=1):
            thread.start()
            until(lambda count=waiting: len(lock._queue) == count, "the thread waits")  # type: ignore[misc]
    for thread in threads:
        thread.join(PATIENCE_S)
    with lock:
        order.append(99)
    assert order == [0, 1, 2, 3, 4, 99]
