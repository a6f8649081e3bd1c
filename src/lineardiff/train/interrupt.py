"""Ctrl-C and SIGTERM: finish the update, write a checkpoint, stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """Training stopped on request, after writing a checkpoint; the message says how to resume.

    A KeyboardInterrupt, so that a script that does not catch it ends like any other on Ctrl-C.
    """


class StopRequest:
    """Whether the process was asked to stop."""

    made = False


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Record the first SIGINT or SIGTERM within the block; the second one acts as usual.

    Only the main thread can handle signals; in another thread the block changes nothing.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    here, children = os.getpid(), []

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.made = True
        restore()
        if hasattr(signal, "SIGCHLD"):
            # A cluster's SIGTERM ends the loader processes too, which torch would raise in the middle of an update.
            children.append(signal.signal(signal.SIGCHLD, signal.SIG_DFL))
        if os.getpid() == here:  # and not in a loader's process, which inherits the handler
            # Not print: the signal may have come in the middle of another write to the same stream.
            os.write(2, b"\nstopping after a checkpoint; press Ctrl-C again to stop now\n")

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
        if children:
            signal.signal(signal.SIGCHLD, children[0])
