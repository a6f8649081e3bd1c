from importlib import metadata

import pytest
import torch

from lineardiff.cli import info, main
from lineardiff.ops.backends import Backend


def test_info_tells_versions_hardware_and_backends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    able = Backend("able", lambda inputs: inputs.q, lambda inputs: None, "runs anywhere")
    unable = Backend("unable", lambda inputs: inputs.q, lambda inputs: "needs a GPU of tomorrow", "fast")
    monkeypatch.setattr(info, "BACKENDS", (able, unable))
    assert main(["info"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["torch"] == [metadata.version("torch")]
    assert rows["timm"] == [metadata.version("timm")]
    assert rows["threads"] == [str(torch.get_num_threads())]
    assert rows["able"] == ["yes", "runs", "anywhere"]
    assert rows["unable"] == ["no", "needs", "a", "GPU", "of", "tomorrow"]


def test_a_package_that_is_missing_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "PACKAGES", ("torch", "no-such-package"))
    assert info.versions()["no-such-package"] == "not installed"
