"""The command that installs a missing extra is one that pip can run as written."""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lineardiff.extras import MissingExtra, install_command, missing_extra


@pytest.fixture
def nothing_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)


def _declared(extra):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    with open("pyproject.toml", "rb") as file:
        lines = tomllib.load(file)["project"]["optional-dependencies"][extra]
    return {Requirement(line).name: Requirement(line).specifier for line in lines}


@pytest.mark.parametrize("extra", ["train", "generate", "score", "export"])
def test_the_command_installs_what_the_extra_declares(nothing_installed, extra):
    words = shlex.split(install_command(extra, package="unused"))
    given = [Requirement(word) for word in words[words.index("install") + 1 :]]
    assert {requirement.name: requirement.specifier for requirement in given} == _declared(extra)


def test_an_extra_brings_the_extras_it_includes(nothing_installed):
    names = {
        Requirement(word).name
        for word in shlex.split(install_command("bench", package="linformer"))[-15:]
        if ">" in word
    }
    assert {"linformer", "tyro", "accelerate"} <= names
    assert "lineardiff" not in names


def test_what_is_installed_is_not_installed_again(monkeypatch):
    installed = {"diffusers": "0.37.1", "torchdiffeq": "0.1"}
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    assert install_command("generate", package="torchdiffeq").endswith("install 'torchdiffeq>=0.2.5'")


def test_without_metadata_the_package_itself_is_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("score", package="torch_fidelity").endswith(" install torch-fidelity")


@pytest.mark.parametrize("activated", [True, False])
def test_pip_understands_the_command_in_any_shell(nothing_installed, monkeypatch, tmp_path, activated):
    path = os.path.dirname(sys.executable) if activated else "/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    command = install_command("generate", package="diffusers")
    assert command.startswith("pip ") == activated
    # An empty index: pip gets as far as looking for the first requirement of the command.
    result = subprocess.run(
        [*shlex.split(command), "--dry-run", "--no-index", "--no-deps", "--ignore-installed"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "No matching distribution found for diffusers>=0.37" in result.stderr


def test_the_exception_names_the_package():
    error = missing_extra("generate", package="diffusers")
    assert isinstance(error, MissingExtra)
    assert error.name == "diffusers"
    assert str(error).startswith("diffusers is not installed; run: ")


@pytest.mark.parametrize("pattern", ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "src/**/*.py"])
def test_no_page_or_message_installs_from_an_index_that_does_not_have_lineardiff(pattern):
    root = Path(__file__).parents[1]
    for file in root.glob(pattern):
        assert not re.findall(r"pip install [^\n`]*[\"' ]lineardiff\b.*", file.read_text()), file
