from importlib import metadata

import pytest
import torch

from lineardiff.bench import machine
from lineardiff.cli import main
from lineardiff.ops import backends
from lineardiff.ops.backends import Backend


def test_info_shows_versions_hardware_and_backends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    able = Backend("able", lambda inputs: inputs.q, lambda inputs: None, "runs anywhere")
    unable = Backend("unable", lambda inputs: inputs.q, lambda inputs: "needs a GPU of tomorrow", "fast")
    monkeypatch.setattr(backends, "BACKENDS", (able, unable))
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "timm", "no-such-package"))
    assert main(["info"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["torch"] == [metadata.version("torch")]
    assert rows["timm"] == [metadata.version("timm")]
    assert rows["no-such-package"] == ["not", "installed"]
    assert rows["threads"] == [str(torch.get_num_threads())]
    assert rows["able"] == ["yes", "runs", "anywhere"]
    assert rows["unable"] == ["no", "needs", "a", "GPU", "of", "tomorrow"]
