# make demo: the whole head scan on the bundled model. make test: every check. Each sets itself up.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-ray test-plain check bench clean

demo: $(STAMP)
	$(BIN)/mathinterp scan heads --store demo-results
	$(BIN)/mathinterp sql --store demo-results "SELECT * FROM paper_a_table1 WHERE rank <= 5 ORDER BY rank"

test: check
	$(MAKE) --jobs 2 --output-sync test-ray test-plain
	$(BIN)/python -m pytest -m alone

test-ray:  # one after another
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray

test-plain:  # beside them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not ray and not alone"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  # each result is a line of benchmarks/results/NAME.jsonl
	$(BIN)/python benchmarks/run_all.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-results
