"""Turn exceptions into one line on stderr and an exit code."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable

from lineardiff.extras import MissingExtra, missing_extra

__all__ = ["exit_code"]

# What gloo and NCCL say to the others when a process of a distributed job ends.
_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|gloo/transport|NCCL|Broken pipe", re.IGNORECASE)
TRAIN_EXTRA = ("accelerate", "datasets", "matplotlib", "tensorboard", "tqdm", "tyro")


def exit_code(work: Callable[[], None]) -> int:
    """Run `work` and return the exit code of the process; print what it raises as one line on stderr.

    The code is 2 for mistakes of the user and of the environment, and 130 for an interruption. Any other exception is
    a bug and keeps its traceback.
    """
    try:
        work()
        sys.stdout.flush()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 0
    except KeyboardInterrupt as interrupt:
        hint = f"; {interrupt}" if str(interrupt) else ""
        print(f"lineardiff: interrupted{hint}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has exited. Python flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        line = _explain(error)
        if line is None:
            raise
        if os.environ.get("LINEARDIFF_DEBUG"):
            traceback.print_exc()
        print(f"lineardiff: error: {line}", file=sys.stderr)
        return 2
    return 0


def _explain(error: Exception) -> str | None:
    """Return the error and its fix in one line, or None for an exception that is not the user's fault."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        if package in TRAIN_EXTRA:
            error = missing_extra("train", package=package)
    if isinstance(error, MissingExtra):
        return str(error)
    # torch and safetensors wrap a full disk in their own exceptions, which keep only the words.
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return f"disk full: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    if isinstance(error, (ValueError, OSError, FloatingPointError)):
        # An exception of a DataLoader worker has its complete traceback as the message.
        message = str(error).rpartition(f"\n{type(error).__name__}: ")[2]
        return " ".join(message.split())
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return (
            "a loader process was killed, perhaps because memory ran out. Use fewer --workers or a smaller "
            "--batch-size, then rerun the command to resume."
        )
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return "another process of this job has ended; see its message."
    return None
