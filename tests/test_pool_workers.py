"""Threads beside the caller: work that none is free for ends in time, and nothing of them is left behind."""

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

import kvferry
from interrupt_support import interrupted
from kvferry.pool.workers import Future, Workers
from pool_support import until

pytestmark = pytest.mark.quick


def test_work_that_no_thread_is_free_for_ends_when_its_time_is_over() -> None:
    workers, free = Workers("test", 2), threading.Event()
    now = time.monotonic()
    long = [workers.submit(lambda: free.wait(20), now + 60, lambda: False) for _ in range(2)]
    later = workers.submit(lambda: "done", now + 60, lambda: "late")
    first = workers.submit(lambda: "done", now + 0.3, lambda: "late")
    assert first.wait(10_000) == "late"
    assert time.monotonic() - now >= 0.3 and not later.done()
    free.set()
    assert [one.wait(10_000) for one in long] == [True, True] and later.wait(10_000) == "done"
    workers.close()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("test")])


def test_work_for_closed_workers_is_late() -> None:
    workers = Workers("test", 2)
    workers.close()
    assert workers.submit(lambda: "done", time.monotonic() + 60, lambda: "late").wait(0) == "late"


def test_much_work_is_all_done_by_few_threads() -> None:
    workers, done = Workers("test", 3), []
    futures = [workers.submit(lambda n=n: done.append(n), time.monotonic() + 60, lambda: None) for n in range(1000)]
    for future in futures:
        future.wait(10_000)
    assert sorted(done) == list(range(1000))
    workers.close()


def test_work_is_done_where_it_is_submitted_while_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers("test", 2)
    now = time.monotonic()
    monkeypatch.setattr(threading.Thread, "start", start)
    done = [workers.submit(threading.get_ident, now + 60, lambda: 0) for _ in range(5)]
    assert [one.wait(0) for one in done] == [threading.get_ident()] * 5
    monkeypatch.undo()
    assert workers.submit(threading.get_ident, now + 60, lambda: 0).wait(10_000) != threading.get_ident()

    free = threading.Event()
    busy = workers.submit(lambda: free.wait(20), now + 60, lambda: False)
    monkeypatch.setattr(threading.Thread, "start", start)
    later = workers.submit(lambda: "done", now + 60, lambda: "late")  # by the one thread that there is
    assert not later.done()
    free.set()
    assert busy.wait(10_000) and later.wait(10_000) == "done"
    workers.close()


def test_a_signal_handler_may_submit_while_its_thread_submits() -> None:
    workers, inner = Workers("test", 2), []

    class Queue:
        """As if the signal came just then."""

        def put(self, job: object) -> None:
            if len(inner) < 1:
                inner.append(workers.submit(lambda: "done", time.monotonic() + 60, lambda: "late"))
            queue.put(job)

        def __getattr__(self, name: str) -> object:
            return getattr(queue, name)

    queue = workers._queue
    workers._queue = Queue()  # type: ignore[assignment]
    outer = workers.submit(lambda: "outer", time.monotonic() + 60, lambda: "late")
    assert inner[0].wait(0) == "done" and outer.wait(10_000) == "outer"
    workers.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_thread_whose_start_a_signal_handler_interrupts_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    class Enough(Exception):
        pass

    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start = getattr(threading, name)

    def interrupted(bootstrap: Any, *arguments: Any, **more: Any) -> None:
        if begun:
            start(bootstrap, *arguments, **more)
            until(lambda: bootstrap.__self__ in threading.enumerate() and bootstrap.__self__ not in threading._limbo)
        raise Enough

    workers, now = Workers("test", 1), time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(threading, name, interrupted)
        with pytest.raises(Enough):
            workers.submit(lambda: "done", now + 60, lambda: "late")
    assert workers.submit(threading.get_ident, now + 60, lambda: 0).wait(10_000) not in (0, threading.get_ident())
    until(lambda: len([thread for thread in threading.enumerate() if thread.name == "test"]) == 1)
    workers.close()


def test_a_wait_that_a_signal_handler_leaves_holds_up_nobody() -> None:
    def wait(future: "Future[str]") -> None:
        with suppress(kvferry.DeadlineExceeded):
            future.wait(1)

    moments = 0
    for future in interrupted(lambda: Future[str](), wait):
        moments += 1
        came: list[str] = []
        other = threading.Thread(target=lambda: came.append(future.wait()), daemon=True)  # noqa: B023
        worker = threading.Thread(target=lambda: future.run(lambda: "done"), daemon=True)  # noqa: B023
        for thread in (other, worker):
            thread.start()
        for thread in (worker, other):
            thread.join(10)
        assert came == ["done"] and future.wait(0) == "done", moments
    assert moments > 5


def test_a_future_that_is_polled_by_short_waits_does_not_grow() -> None:
    future: Future[str] = Future()
    for _ in range(50):
        with pytest.raises(kvferry.DeadlineExceeded):
            future.wait(0)
    assert not future._callbacks
    future.run(lambda: "done")
    assert future.wait() == "done"
