"""Torture lineardiff: kills, bit flips, damaged files, bad input and random configurations of the op.

    python -m tests.torture --minutes 15 --output torture.json

Every case runs in a forked process with a deadline. The exit code is 1 if anything was silently accepted, hung,
crashed, left a process behind, or printed a traceback. `make torture` runs it; docs/reliability.md shows its figures.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.torture import files, inputs, kills, op
from tests.torture.harness import Section

SECTIONS = {
    "bad input": (inputs.run, 0.35),
    "damaged files": (files.run, 0.25),
    "kills": (kills.run, 0.25),
    "op": (op.run, 0.15),
}
"""By name: ``run(section, folder, seconds, rng)`` and its share of the time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="time budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--output", type=Path, help="write the counts and the failures to this JSON file")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)

    total = sum(SECTIONS[name][1] for name in arguments.only)
    sections = []
    for name in arguments.only:
        work, share = SECTIONS[name]
        section, start = Section(name), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            seconds = 60 * arguments.minutes * share / total
            work(section, Path(folder), seconds, random.Random(f"{arguments.seed} {name}"))
        sections.append(section)
        counts = ", ".join(f"{outcome} {count}" for outcome, count in section.counts.items())
        print(f"{name}: {counts} ({time.monotonic() - start:.0f} s)", flush=True)
        for failure in section.failures:
            print(f"  {failure}", flush=True)
    if arguments.output:
        result = {section.name: {**section.counts, "failures": section.failures} for section in sections}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    failures = sum(len(section.failures) for section in sections)
    print(f"{sum(section.counts['cases'] for section in sections)} cases, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
