# make demo    train a small ViT with self-attention and with Visual-Contrast Attention, compare them (5 minutes)
# make test    every check of the project
# make docs    the documentation as a web page, in site/
# Each creates .venv when it is missing and installs what it needs; running it again installs nothing.

PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo test docs lint types floors unit timm-suite clean

demo: .venv/installed-train
	$(BIN)/lineardiff demo

test: lint types floors docs unit timm-suite

lint: .venv/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/installed-test
	$(BIN)/mypy

floors: .venv/installed-test
	$(BIN)/lint-imports

unit: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

timm-suite: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python tests/timm_suite/run.py

docs: .venv/installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# one extra of pyproject.toml each; the file is a stamp, written when the installation has succeeded
.venv/installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=python3.12, say." if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing lineardiff[$*] into .venv (a few minutes the first time) ..."
	$(INSTALL) '.[$*]'
	@touch $@

clean:
	rm -rf .venv .cache build dist site
