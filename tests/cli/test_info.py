import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from lineardiff import ops
from lineardiff.bench import machine
from lineardiff.cli import main


def test_info_shows_versions_hardware_and_backends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    able = ops.BackendInfo("able", "runs anywhere", None)
    unable = ops.BackendInfo("unable", "fast", "needs a GPU of tomorrow")
    monkeypatch.setattr(ops, "list_backends", lambda: (able, unable))
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "timm", "no-such-package"))
    assert main(["info"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["torch"] == [metadata.version("torch")]
    assert rows["timm"] == [metadata.version("timm")]
    assert rows["no-such-package"] == ["not", "installed"]
    assert rows["threads"] == [str(torch.get_num_threads())]
    assert rows["able"] == ["yes", "runs", "anywhere"]
    assert rows["unable"] == ["no", "needs", "a", "GPU", "of", "tomorrow"]


def test_an_unknown_backend_in_the_environment_is_reported_by_every_command() -> None:
    environment = os.environ | {"LINEARDIFF_BACKEND": "quick"}
    for command in ("info", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "lineardiff", command, "--no-such-flag"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "LINEARDIFF_BACKEND='quick'" in done.stderr
