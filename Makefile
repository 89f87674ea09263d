# Every target sets up .venv from nothing; `make demo` and `make test` need no other preparation.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs sweep clean

demo: .venv/ready
	$(BIN)/gradmesh demo

test: .venv/ready
	$(BIN)/pytest -m "not slow"

# The long form of the law tests: more ranks, more dtypes, more random cases.
sweep: .venv/ready
	$(BIN)/pytest -m slow

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Writes what is generated into README.md.
docs: .venv/ready
	$(BIN)/python tools/generate.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
