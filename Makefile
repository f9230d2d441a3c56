# make demo: the whole head scan on the bundled model. make test: every check. Each sets itself up.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TINY := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: docs demo test test-ray test-larger check lint types test-tiny test-quick bench notebooks clean

demo: $(STAMP)
	$(BIN)/mathinterp scan heads --store demo-results
	$(BIN)/mathinterp sql --store demo-results "SELECT * FROM paper_a_table1 WHERE rank <= 5 ORDER BY rank"

test: $(STAMP)
	$(MAKE) --jobs 2 --output-sync lint types test-tiny
	$(MAKE) --jobs 2 --output-sync test-ray test-larger
	$(BIN)/python -m pytest -m alone

test-ray:  # one after another
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray

test-larger:  # beside them: tests that hold the bundled model or a larger one
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not ray and not alone and bundled"

check: $(STAMP)  # a part of the tests, see CONTRIBUTING.md
	$(MAKE) --jobs 2 --output-sync lint types test-quick

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

test-tiny:  # all others, on two cores
	$(TINY) -m "not ray and not alone and not bundled"

test-quick:  # of these, the quick ones, on three families of models
	$(TINY) -m "not ray and not alone and not bundled and not slow and not families"

docs: $(STAMP)  # the documentation site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)  # each result is a line of benchmarks/results/NAME.jsonl
	$(BIN)/python benchmarks/run_all.py

notebooks: $(STAMP)  # runs them and keeps what they show
	$(BIN)/python -m recipes.notebooks

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-results
