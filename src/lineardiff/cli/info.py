"""``lineardiff info``: versions, hardware and attention backends."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lineardiff.cli.arguments import parse


@dataclass
class Info:
    """Show versions, hardware, and which attention backends can run on this machine."""


def run(words: Sequence[str]) -> None:
    parse(Info, words, prog="lineardiff info")
    from lineardiff.bench.machine import describe_machine, machine_table
    from lineardiff.ops import list_backends
    from lineardiff.ops.backends import VARIABLE
    from lineardiff.table import format_table

    about = describe_machine()
    versions = [(name, version or "not installed") for name, version in about["versions"].items()]
    print(format_table(("package", "version"), versions, left=2))
    print("\n" + format_table(("hardware", ""), machine_table(about), left=2))
    rows = [
        (name, "yes" if reason is None else "no", reason or summary)
        for name, summary, reason in list_backends()
    ]
    print("\n" + format_table(("backend", "can run", "what it is, or why it cannot run"), rows, left=3))
    chosen = os.environ.get(VARIABLE, "auto")
    meaning = " (the first of them that can run a call)" if chosen == "auto" else ""
    print(f"\n{VARIABLE}={chosen}{meaning}")
