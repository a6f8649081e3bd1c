"""The code blocks, commands, links and names of the pages are right."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from lineardiff.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page, language):
    return [code for name, code in BLOCK.findall(page.read_text("utf-8")) if name == language]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "bash")], ids=lambda p: p.name)
def test_commands_of_a_page_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        if words[:1] == ["make"]:
            assert set(words[1:]) <= targets, line
        elif "lineardiff" in words[:5] and words[0] not in ("pip", "cd", "git"):
            assert words[words.index("lineardiff") + 1] in COMMANDS, line


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
            if not re.match(r"https?://|mailto:", target):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_api_page_names_what_exists():
    for section in (ROOT / "docs" / "api.md").read_text("utf-8").split("\n::: ")[1:]:
        module = import_module(section.split()[0])
        missing = [name for name in re.findall(r"^ +- (\w+)$", section, re.M) if not hasattr(module, name)]
        assert not missing, f"{module.__name__}: {missing}"


def test_design_page_has_the_floors_that_import_linter_checks():
    contracts = (ROOT / "pyproject.toml").read_text("utf-8").split("\nlayers = [")[1].split("]")[0]
    floors = [set(re.findall(r"\w+", line)) for line in contracts.strip().splitlines()][::-1]
    written = [set() for _ in floors]
    for floor, names in re.findall(
        r"^\| (\d) \| (.*?) \|", (ROOT / "docs" / "design.md").read_text("utf-8"), re.M
    ):
        written[int(floor)] |= set(re.findall(r"\w+", names))
    assert written == floors
