# Both `make run` and `make test` start from a fresh clone with Python 3.11+ and pip, in either order.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
export FLWR_TELEMETRY_ENABLED := 0

.PHONY: run test test-slow test-faults lint audit

run: .venv/.runtime
	$(BIN)/hedgerow run flower_apps/sd-feel --engine flower

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

test-slow: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

# Those of the slow tests with real processes that end within three minutes.
test-faults: .venv/.dev
	$(BIN)/pytest -m slow tests/deployment/test_faults_malice.py tests/deployment/test_faults_silence.py \
		tests/deployment/test_faults_strangers.py

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Known holes in what constraints.txt pins; asks PyPI's own pages, which a mirror need not have. Without hashes:
# builds of torch differ between indexes.
audit: .venv/.dev
	$(PIP) pip-audit
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

.venv/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[all]'
	touch $@

.venv/.dev: .venv/.runtime
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@
