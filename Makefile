# make demo: the whole head scan on the bundled model. make test: every check. Each sets itself up.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STORES := $(VENV)-stores
TWO := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
export PYTHONDONTWRITEBYTECODE :=  # tests start hundreds of processes, which read what the first one compiled

.PHONY: docs demo test test-stores check lint types test-most test-quick bench notebooks clean

demo: $(STAMP)
	$(BIN)/mathinterp scan heads --store demo-results
	$(BIN)/mathinterp sql --store demo-results "SELECT * FROM paper_a_table1 WHERE rank <= 5 ORDER BY rank"

test: $(STAMP)
	$(MAKE) --jobs 2 --output-sync lint types
	$(MAKE) test-most
	$(BIN)/python -m pytest -m alone

test-most:  # on two cores, the files of tests one after another; tests that start Ray come last, see tests/in_order.py
	$(TWO) --dist loadscope --no-loadscope-reorder -m "not alone"

test-stores: $(STORES)/.installed  # what plays object stores brings much that no other test needs
	OMP_NUM_THREADS=1 $(STORES)/bin/python -m pytest tests/test_object_store.py tests/test_google_store.py

check: $(STAMP)  # a part of the tests, see CONTRIBUTING.md
	$(MAKE) --jobs 2 --output-sync lint types test-quick

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

test-quick:  # without Ray and the bundled model, the quick ones, on three families of models
	$(TWO) --dist worksteal -m "not ray and not alone and not bundled and not slow and not families"

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

$(STORES)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STORES)
	$(STORES)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(STORES)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[s3-test,gcs-test]" pytest pytest-timeout
	touch $@

clean:
	rm -rf $(VENV) $(STORES) demo-results
