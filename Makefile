PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OLDEST := .venv-oldest
# One thread per worker: the tests are many small runs, and two of them share a core badly. A file's tests stay in one
# worker, so that what they share is made once.
PYTEST := -m pytest -q -n auto --maxprocesses 8 --dist loadfile
# Tests of real processes and ports may be disturbed by those of another worker: what failed is run once more, alone.
ALONE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow --last-failed --last-failed-no-failures none

.PHONY: help venv demo federation test test-quick test-slow test-all test-oldest lint docs pictures options notebooks clean
.DEFAULT_GOAL := help

help:  ## say what can be made
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,docs,text,deploy]'
	@touch $@

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -q -c constraints-oldest.txt -e '.[dev,text,deploy,parquet]'
	@touch $@

venv: $(READY)  ## set up .venv with the pinned versions

demo: $(READY)  ## fit Local, FedAvg and APFL on the digits data
	$(BIN)/python -m fl_lightning.cli.demo

federation: $(READY)  ## a server and three sites over Flower on this machine, beside the same run simulated
	$(BIN)/fl-lightning federation --config quickstart --clients 3 --trainer.max_epochs 5

lint: $(READY)  ## ruff, mypy --strict, import-linter, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p fl_lightning
	$(BIN)/lint-imports
	$(BIN)/codespell

test: lint test-quick  ## lint, then all tests that are not slow

test-quick: $(READY)  ## the tests that are not slow
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m 'not slow'

test-slow: $(READY)  ## the others: runs that are killed, several processes, the wheel, the site
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m slow || $(ALONE)

test-all: test test-slow  ## lint and every test

test-oldest: $(OLDEST)/.ready  ## the tests that are not slow, with the oldest versions that pyproject.toml declares
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST) -m 'not slow'

docs: $(READY)  ## build the documentation into site/, no network needed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

pictures: $(READY)  ## draw the pictures of docs/ and the table of README.md again; needs MNIST, and Chromium for screenshots
	PYTHONPATH=. $(BIN)/python docs/draw.py

options: $(READY)  ## write the tables of options on the methods' pages again
	PYTHONPATH=. $(BIN)/python docs/options.py

notebooks: $(READY)  ## make notebooks/ from examples/notebooks again
	$(BIN)/python docs/notebooks.py

clean:  ## remove what was made, data excepted
	rm -rf .venv $(OLDEST) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
