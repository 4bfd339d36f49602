# Forewarn. `make run` shows it at work, `make test` proves it; both set up what they need first.

# Threads of OpenMP that wait by spinning starve each other where cores are few.
export OMP_WAIT_POLICY := PASSIVE

PYTHON := .venv/bin/python
WORKERS ?= 2
SOURCES := collectors models daemon src tests scripts

.PHONY: help run test test-all check bench clean setup screenshots

help:
	@echo "make run          start the demo: service, agent, controller and a simulated fleet on this machine"
	@echo "make test         set up and run the tests"
	@echo "make test-all     the same with the slow tests"
	@echo "make check        ruff and mypy (strict)"
	@echo "make bench        measure against the budgets; writes build/bench.json"
	@echo "make screenshots  make the pictures in docs/images again"
	@echo "make clean        remove everything that was built"

setup:
	@scripts/setup.sh test

run:
	@scripts/setup.sh run
	@exec .venv/bin/forewarn demo

test: setup
	@$(PYTHON) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-all: setup
	@$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile

check: setup
	@$(PYTHON) -m ruff check $(SOURCES)
	@$(PYTHON) -m ruff format --check $(SOURCES)
	@$(PYTHON) -m mypy src tests
	@.venv/bin/lint-imports

bench: setup
	@$(PYTHON) tests/bench/run.py

screenshots: setup
	@$(PYTHON) scripts/screenshots.py

clean:
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
