# Two commands on a fresh machine: `make demo` and `make test`. They need Python 3.11, make and a package index.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# one process per core, one thread per process
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-all test-browser test-ssh test-slurm test-ray test-limits test-compat check coverage bench setup clean

demo: $(VENV)/.demo
	$(BIN)/shoal run examples/digits/job.yaml

test: $(VENV)/.dev check
	$(PYTEST) -n 2 --dist worksteal -q

test-browser: $(VENV)/.dev
	tools/install_browser.sh $(BIN)/python
	$(PYTEST) -q -m browser tests/web

test-all: $(VENV)/.dev check
	HYPOTHESIS_PROFILE=explore $(PYTEST) -n 2 --dist worksteal -q -m "not browser and not ssh and not slurm and not ray and not compat and not limits"

test-ssh: $(VENV)/.dev
	tools/install_sshd.sh
	$(PYTEST) -q -m ssh

test-slurm: $(VENV)/.dev
	tools/install_slurm.sh
	$(PYTEST) -q -m slurm

test-ray: $(VENV)/.dev
	$(PIP) --no-build-isolation -e '.[dev,ray]'
	$(PYTEST) -q -m ray

# in an emulated machine, because few kernels leave the whole tree of cgroup v2 to tests
test-limits: $(VENV)/.dev
	tools/cgroup2_vm.sh env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m limits tests/fleet/test_cgroup2.py tests/jobs/test_worker_limits.py

# what other libraries bring; writes the table of docs/compatibility.md from what passed
test-compat: $(VENV)/.dev
	$(PIP) --no-build-isolation -e '.[dev,compat]'
	$(PYTEST) -q -m "compat or compat_row" --compatibility-table=docs/compatibility.md

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house_gates

coverage: $(VENV)/.dev
	$(PYTEST) -n 2 --dist worksteal -q --cov=shoal --cov-branch --cov-report=term:skip-covered

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.overhead

setup: $(VENV)/.dev

$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)" setuptools
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) --no-build-isolation -e .
	$(BIN)/python -m compileall -q src  # pip compiles no files of an editable install
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
