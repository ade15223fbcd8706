"""The threads of a pipeline: each works through an inbox, and ends with whom it works for."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
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
