"""`lineardiff train` of a generation recipe."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from lineardiff.cli import main
from lineardiff.runs import load_run

TINY = [
    "fashion_sit",
    *("--model-args", "dim=16", "depth=1", "num_heads=2", "patch_size=7", "attention=mhsa"),
    *("--train-limit", "32"),
    *("--validation-limit", "8"),
    *("--batch-size", "8"),
    *("--epochs", "2"),
    *("--grid-images", "2"),
    *("--grid-steps", "1"),
    *("--workers", "0"),
]


def test_a_run_is_trained_continued_and_not_scored_as_a_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    assert main(["train", *TINY, "--output", str(output)]) == 0
    assert f"lineardiff sample {output}" in capsys.readouterr().out
    assert (output / "pipeline/model_index.json").exists()
    config = json.loads((output / "config.json").read_text())
    assert (config["architecture"], config["objective"]) == ("vca_sit_s_4", "flow")
    assert config["model_args"]["sample_size"] == 28
    weights = (output / "model.safetensors").read_bytes()

    assert main(["train", *TINY, "--output", str(output)]) == 0
    assert "resuming the run" in caplog.text
    assert (output / "model.safetensors").read_bytes() == weights
    assert main(["train", *TINY, "--output", str(output), "--path", "gvp"]) == 2
    assert "path was 'linear' and is now 'gvp'" in capsys.readouterr().err

    pipelines = [load_run(path).pipeline() for path in (output, load_run(output).checkpoints()[-1])]
    images = [
        pipeline(
            [3], num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np"
        ).images
        for pipeline in pipelines
    ]
    np.testing.assert_array_equal(images[0], images[1])  # the finished run and its last checkpoint
    assert pipelines[0].config["class_names"] == pipelines[1].config["class_names"]

    drawn = []
    for path in (output, load_run(output).checkpoints()[-1]):
        folder = tmp_path / f"samples of {path.name}"
        sample = [
            "sample",
            str(path),
            "--output",
            str(folder),
            "--labels",
            "3",
            "--steps",
            "1",
            "--device",
            "cpu",
        ]
        assert main(sample) == 0
        drawn.append((folder / "000000.png").read_bytes())
    assert drawn[0] == drawn[1]

    capsys.readouterr()
    assert main(["evaluate", str(output)]) == 2
    err = capsys.readouterr().err
    assert "has no accuracy" in err
    assert err.count("\n") == 1


def test_a_dry_run_counts_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--epochs", "None", "--steps", "9", "--dry-run"]) == 0
    table = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert table["steps"] == ["9", "None"]  # value, instead of
    assert table["updates"] == ["9"]
    # By hand: 16 patches of 7 x 7 pixels, one block of width 16, 2 x 49 outputs of a patch; the time's 256 numbers.
    n, dim = 16, 16
    block = 12 * n * dim * dim + 2 * n * n * dim + 6 * dim * dim
    embeddings = 49 * n * dim + 256 * dim + dim * dim
    assert table["multiply-adds"][-1] == f"{embeddings + block + 98 * n * dim + 2 * dim * dim:,}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--objective", "gan"], "gan"),
        (["--steps", "7"], "steps=7: with epochs=6"),
        (["--model", "vca_sit_s_3"], "did you mean vca_sit_s_"),
        (["--space", "latents", "--image-size", "32"], "hflip=0.0: latents are used"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "fashion_sit", *words, "--output", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_latents_that_are_not_there_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "imagenet_dit_b_4", "--data", "nowhere", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "nowhere holds no index.json" in err
    assert "lineardiff latents" in err
    assert err.count("\n") == 1


def test_help_names_recipes_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert "fashion_sit" in capsys.readouterr().out
    assert main(["train", "fashion_sit", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--grid-guidance" in out
    assert "--prediction {velocity,score,noise}" in out
