"""The threads of a pipeline, which work through inboxes; and those of Gloo, which must not spin."""

from __future__ import annotations

import os
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Inbox: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


def work_on(inbox: Inbox, owner: object) -> None:
    """Start a thread that does the tasks of ``inbox`` in order, as long as ``owner`` lives."""
    thread = threading.Thread(target=_work, args=(inbox,), daemon=True)
    thread.start()
    weakref.finalize(owner, _dismiss, inbox, thread)


def _work(inbox: Inbox) -> None:
    # It holds the owner only while there is a task.
    while (task := inbox.get()) is not None:
        task()
        del task


def _dismiss(inbox: Inbox, thread: threading.Thread) -> None:
    inbox.put(None)
    if thread is not threading.current_thread():
        # At the interpreter's exit a thread that still runs could be ended inside C++ code. One
        # that waits for a dead rank is left behind.
        thread.join(timeout=3.0)


_TASKS = Path("/proc/self/task")
_LOOP = "gloo_tcp_loop"  # what Gloo calls its threads


@contextmanager
def yielding_loops() -> Iterator[None]:
    """The threads by which Gloo receives for groups made inside do not preempt others.

    Such a thread is woken by a message and tries the lock of its connection until it gets it. Where
    it has just preempted the thread that holds the lock, in the middle of a call of ours, it spins
    for as long as the scheduler lets it: milliseconds, in which nothing moves. Under SCHED_BATCH it
    waits until a processor is free, or the next tick, instead. On Linux only; other policies than
    the usual one are somebody's choice and stay.
    """
    if sys.platform != "linux":
        yield
        return
    before = _loops()
    yield
    for thread in _loops() - before:
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except ProcessLookupError:
            continue  # another's, which ended meanwhile
        except OSError as error:
            warnings.warn(
                f"the scheduling policy of Gloo's threads cannot be set ({error}); small messages "
                "may take some milliseconds longer. Allow sched_setscheduler in the container",
                stacklevel=2,
            )
            return


def _loops() -> set[int]:
    """Numbers of the threads by which Gloo receives in this process."""
    found = set()
    for task in _TASKS.iterdir():
        try:
            if (task / "comm").read_text().strip() == _LOOP:
                found.add(int(task.name))
        except OSError:
            continue  # it ended meanwhile
    return found
