# `make demo` and `make test` do all the set-up themselves; where packages come from is pip's own configuration.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready
SOURCES := rankless tests examples bench packages
# Each run is several interpreters: without compiled files each of them would compile Rankless anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check lint docs bench dist gpu soak soak-torch clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, train LeNet on 4 workers, verify its first 2 epochs against one worker"
	@echo "make test    set up, run every test [PYTEST=arguments]"
	@echo "make check   set up, then format, lint, types, imports, documentation and tests, beside each other: what CI runs"
	@echo "make docs    set up, then build the documentation site into build/docs; warnings are errors"
	@echo "make gpu     set up, run the tests that need a GPU; without one all are skipped"
	@echo "make soak    set up, run every test there is, also those that CI leaves out; resumable, hours; writes docs/soak.md [SOAK=path]"
	@echo "make soak-torch  run CI's tests of compiler, jobs, views, collectives and verify on each other supported PyTorch [VERSIONS='2.12 2.14'] [SOAK=path]"
	@echo "make dist    set up, build the source archive and the wheels of all packages into dist, and check them"
	@echo "make bench   set up, then measure against torchrun and DistributedDataParallel [BENCH=name] [JSON=file]"

# The stamp is older than a changed pin, so a pull that moves one sets up again. Torch goes first and by name, so that
# its build (CPU or CUDA) is the one that pip's configuration offers, whatever the others ask for.
$(READY): Makefile requirements/locked.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Rankless needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --requirement requirements/locked.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

demo: $(READY)
	$(BIN)/rankless run -n 4 examples/lenet.py --at-least 0.97
	$(BIN)/rankless verify -n 4 examples/lenet.py --epochs 2

# Two test processes for each core, up to four, each with worker pools of its own: most of a test's time is one process
# waiting for another. All of them have more threads than there are cores, so threads that wait for work must not spin.
TEST_PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(4, 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 3))')
test: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal $(PYTEST)

lint: $(READY)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env docs build/docs

# Beside each other: while tests wait for processes, the others compute.
check: $(READY)
	+$(MAKE) --no-print-directory --jobs 3 lint docs test

bench: $(READY)
	PYTHONPATH=tests $(BIN)/python -m bench $(BENCH) $(if $(JSON),--json $(JSON))

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	for package in packages/*; do $(BIN)/python -m build --no-isolation --outdir dist $$package || exit 1; done
	test -x build/twine/bin/twine || { $(PYTHON) -m venv build/twine && build/twine/bin/pip install --quiet twine==7.0.0; }
	build/twine/bin/twine check --strict dist/*

gpu: $(READY)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) tests/gpu tests/collectives/test_all_collectives.py -k "gpu or nccl" $(PYTEST)

soak: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/support/soak.py $(SOAK)

# Other versions of PyTorch than the pinned one, in environments of their own.
soak-torch: $(READY)
	VERSIONS="$(VERSIONS)" PYTHONPATH=tests $(BIN)/python tests/support/torch_soak.py $(SOAK)

clean:
	rm -rf .soak .venv build dist log .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
