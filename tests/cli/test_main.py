"""The command as a user starts it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import TINY

from lineardiff import __version__
from lineardiff.cli import COMMANDS, main


def start(*words: str, **kwargs: object) -> subprocess.Popen:
    command = [sys.executable, "-c", "import sys; from lineardiff_cli import main; sys.exit(main())", *words]
    return subprocess.Popen(
        command, stdout=kwargs.pop("stdout", subprocess.PIPE), stderr=subprocess.PIPE, text=True, **kwargs
    )


def test_an_unknown_recipe_ends_the_process_with_2_and_one_line() -> None:
    process = start("train", "demmo")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err == "lineardiff: error: there is no recipe 'demmo'; did you mean demo?\n"


def test_ctrl_c_ends_with_130_and_the_same_command_resumes(tmp_path: Path) -> None:
    words = ["train", *TINY, "--epochs", "100", "--train-limit", "800", "--validation-limit", "8"]
    words += ["--log-every", "1", "--output", "run"]
    process = start(*words, cwd=tmp_path)
    log = tmp_path / "run" / "train.csv"
    deadline = time.monotonic() + 120
    while not log.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "lineardiff: interrupted; " in err.splitlines()[-1]
    assert "rerun the command to resume run" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has")
def test_output_that_cannot_be_written_and_a_reader_that_has_gone() -> None:
    with open("/dev/full", "w") as full:
        process = start("train", stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.startswith("lineardiff: error: disk full")
    process = start("train", "demo", "--help")
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read() == ""


def test_help_and_version_need_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["-h"], ["--help"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lineardiff {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_refuses_what_it_does_not_know(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert f"lineardiff {command}" in capsys.readouterr().out
    needed = {
        "train": ["demo"],
        "sample": ["x", "--output", "y"],
        "latents": ["x", "--vae", "v", "--output", "y"],
    }
    assert main([command, *needed.get(command, []), "--nonsense"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lineardiff: error: ")
    assert "--nonsense" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in (*COMMANDS, "train demo", "evaluate fid")),
    ],
    ids=" ".join,
)
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    """Importing torch takes seconds; help is printed without it, although `import lineardiff` needs torch and timm."""
    heavy = ("torch", "timm", "torchvision", "numpy", "accelerate", "datasets", "diffusers", "matplotlib")
    code = f"import sys; from lineardiff_cli import main; print(main(), [n for n in {heavy} if n in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", code, *" ".join(words).split()], capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines()[-1] == "0 []"


def test_a_command_has_the_complete_library() -> None:
    out, err = start("models", "vca_deit_t*_224").communicate(timeout=120)
    assert out.split() == ["vca_deit_tiny_distilled_patch16_224", "vca_deit_tiny_patch16_224"], err


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evalute", "x"]) == 2
    assert (
        capsys.readouterr().err
        == "lineardiff: error: there is no command 'evalute'; did you mean evaluate?\n"
    )


def test_without_the_extra_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith(("lineardiff.cli.", "tyro"))]:
        if name != "lineardiff.cli.errors":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tyro", None)  # import tyro now fails as if it were not there
    assert main(["train", "demo"]) == 2
    assert "error: tyro is not installed; run: " in capsys.readouterr().err
