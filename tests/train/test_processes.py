"""Two processes with half of each batch learn what one process learns with full batches."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import PartialState
from kill import run_module
from toy import TINY, rows

from lineardiff.train import ClassificationTask, train

RECIPE = replace(TINY, accumulate=2, random_erasing=0.5, hflip=0.5, ema_decay=0.9, log_every=1)
MIXED = replace(TINY, epochs=1, warmup_epochs=0, mixup=0.8, cutmix=1.0, drop_path=0.3)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    run_module(
        __file__, tmp_path, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    )
    train(ClassificationTask(RECIPE), output=tmp_path / "one")
    for name in ("train.csv", "validation.csv"):
        for one, two in zip(rows(tmp_path / "one" / name), rows(tmp_path / "two" / name), strict=True):
            assert two == pytest.approx(one, rel=1e-4)
    summaries = [json.loads((tmp_path / f"answer{rank}.json").read_text()) for rank in (0, 1)]
    assert summaries[0] == summaries[1]
    assert summaries[0]["processes"] == 2
    # Both processes wrote into one folder, and only one of them did.
    assert (tmp_path / "two/train.csv").read_text().count("step") == 1
    # What the main process refuses is refused by both, which then train together again.
    refusals = [(tmp_path / f"refused{rank}").read_text() for rank in (0, 1)]
    assert refusals[0] == refusals[1]
    assert "already holds a run" in refusals[0]
    # With mixing the numbers follow from the rank, so two runs of two processes still agree bit for bit.
    mixed = [(tmp_path / name / "train.csv").read_bytes() for name in ("mixed", "again")]
    assert mixed[0] == mixed[1]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    summary = train(ClassificationTask(RECIPE), output=folder / "two")
    (folder / f"answer{PartialState().process_index}.json").write_text(json.dumps(summary))
    try:
        train(ClassificationTask(RECIPE), output=folder / "two", resume=False)
    except ValueError as error:
        (folder / f"refused{PartialState().process_index}").write_text(str(error))
    for name in ("mixed", "again"):
        train(ClassificationTask(MIXED), output=folder / name)
