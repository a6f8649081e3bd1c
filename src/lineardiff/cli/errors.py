"""From exceptions to one line on stderr and an exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Callable

from lineardiff.extras import MissingExtra

TRAIN_EXTRA = ("accelerate", "datasets", "matplotlib", "tensorboard", "tqdm", "tyro")


def exit_code(work: Callable[[], None]) -> int:
    """Do the work; turn what it raises into one line on stderr and the exit code of the process.

    Mistakes of the user and of the environment end with 2, an interruption with 130. An exception that is
    neither is a bug of ours and passes through with its traceback.
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
        # The reader (head, less) has gone. Python flushes stdout once more at its end: let it.
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
    """What happened and how to mend it in one line; None for an exception that is no fault of the user's."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in TRAIN_EXTRA:
        return f'{error.name} is not installed; pip install "lineardiff[train]"'
    if isinstance(error, MissingExtra) or (isinstance(error, ImportError) and "lineardiff[" in str(error)):
        return str(error)
    # torch and safetensors wrap a full disk in exceptions of their own, which keep only the words.
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return f"disk full: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    if isinstance(error, (ValueError, OSError, FloatingPointError)):
        # What a process of the DataLoader raises arrives with its whole traceback as the message.
        message = str(error).rpartition(f"\n{type(error).__name__}: ")[2]
        return " ".join(message.split())
    return None
