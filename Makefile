PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help venv demo test lint docs pictures clean
.DEFAULT_GOAL := help

help:  ## say what can be made
	@sed -n 's/^\([a-z]*\):.*##/\1:/p' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,docs,text,deploy]'
	@touch $@

venv: $(READY)  ## set up .venv with the pinned versions

demo: $(READY)  ## fit Local, FedAvg and APFL on the digits data
	$(BIN)/python -m fl_lightning.cli.demo

lint: $(READY)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p fl_lightning
	$(BIN)/lint-imports

# One thread per worker: the tests are many small runs, and two of them share a core badly.
test: lint  ## lint, then all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8

docs: $(READY)  ## build the documentation into site/, no network needed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

pictures: $(READY)  ## draw the pictures of docs/ and the table of README.md again; needs MNIST, and Chromium for screenshots
	PYTHONPATH=. $(BIN)/python docs/draw.py

clean:  ## remove what was made, data excepted
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
