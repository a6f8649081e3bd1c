"""SIGKILL at random moments of a training; the finished run must equal an undisturbed one bit for bit."""

import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

from toy import fingerprint

from tests.torture.harness import Section, in_child
from tests.torture.runs import CLASSIFIER, command, trained

OPTIONS = ((), ("--workers", "1"), ("--ema-decay", "0.9", "--mixup", "0.8", "--repeated-augmentation", "2"))


def run(section: Section, folder: Path, seconds: float, rng: random.Random) -> None:
    end = time.monotonic() + seconds
    expected, duration = {}, {}
    for number, options in enumerate(OPTIONS):
        start = time.monotonic()
        expected[number] = fingerprint(trained(folder / f"undisturbed-{number}", (*CLASSIFIER, *options)))
        duration[number] = time.monotonic() - start
    attempt = 0
    while time.monotonic() < end:
        number, kills = attempt % len(OPTIONS), 0
        output = folder / f"killed-{attempt}"
        words = (*CLASSIFIER, *OPTIONS[number], "--output", str(output))
        while True:
            # After ten kills the run may finish: a kill that comes before the first checkpoint makes no progress.
            moment = rng.uniform(0, 1.1 * duration[number]) if kills < 10 else None
            ending = in_child(partial(_killed_at, words, moment), deadline=300)
            if ending.code != -signal.SIGKILL:
                break
            kills += 1
            section.counts["kills"] += 1
        same = ending.code == 0 and fingerprint(output) == expected[number]
        detail = (
            f"{' '.join(OPTIONS[number])} after {kills} kills: exit {ending.code}: {ending.stderr[-300:]}"
        )
        section.record("recovered bit for bit" if same else "not recovered", failed=not same, detail=detail)
        attempt += 1


def _killed_at(words: tuple[str, ...], moment: float | None) -> int:
    if moment is not None:
        timer = threading.Timer(moment, os.killpg, (os.getpgid(0), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    return command(*words)
