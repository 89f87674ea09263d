# Every target sets up .venv from nothing; `make demo` and `make test` need no other preparation.
PYTHON ?= python3
BIN := .venv/bin
VERSION ?= 2.15.0
# A file at a time, the longest first (tests/conftest.py); a third worker uses the cores while others wait.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# The tests are compiled once, not by each worker and each rank that imports them.
export PYTHONDONTWRITEBYTECODE :=

# Built by the installation, where there is a compiler.
NATIVE := hatch_build.py src/gradmesh/backends/shm/native.c

.PHONY: demo test quick gpu torch python lint docs site sweep bench modes attack attack-jax attack-check clean

demo: .venv/ready
	$(BIN)/gradmesh demo

test: .venv/ready
	$(BIN)/pytest $(PARALLEL) -m "not slow"

# The laws, the transports, the imports, the public API, and a few tests of each tool.
QUICK := laws transport public_api first_import errors report versions axis structure autodiff_modes agreement edges \
	audit_inputs audit_pages gradcheck_digits checker_findings checker_baseline simulator_attack simulator_model \
	same_as_single typed_rules balanced_sizes
quick: .venv/ready
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" $(QUICK:%=tests/test_%.py)

# The tests on another torch: `make torch VERSION=2.11.0`, in an environment of its own (several GB with CUDA's parts).
torch: .venv-$(VERSION)/ready
	.venv-$(VERSION)/bin/pytest $(PARALLEL) -m "not slow" --junitxml build/torch-$(VERSION).xml

# The tests on another Python: `make python VERSION=3.14`, in an environment of its own, with the torch of constraints.txt.
python: .venv-py$(VERSION)/ready
	.venv-py$(VERSION)/bin/pytest $(PARALLEL) -m "not slow" --junitxml build/python-$(VERSION).xml

# The long form of the law tests: more ranks, more dtypes, more random cases.
sweep: .venv/ready
	$(BIN)/pytest -m slow

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.wording
	$(BIN)/python -m tools.size
	$(BIN)/mypy

# Writes what is generated into README.md and docs/versions.md.
docs: .venv/ready
	$(BIN)/python -m tools.generate

# The documentation site, into build/site; offline, and a warning is an error.
site: .venv/ready
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -c website docs build/site

# The tables that compare gradmesh with other systems, and their pages. Some ten minutes each.
bench: .venv/peers
	$(BIN)/python -m tools.report docs/reports/bench.md

modes: .venv/peers
	$(BIN)/python -m tools.report docs/reports/modes.md

# What needs NVIDIA GPUs, one rank on each: tests, overlap, a benchmark; writes docs/reports/gpu.md and the status tables.
gpu: .venv/ready
	$(BIN)/python -m tools.gpu --device cuda --slow

# Random programs against dense runs of the same; some ten minutes.
attack: .venv/ready
	$(BIN)/python -m tools.attack --programs 10000 --backend threads
	$(BIN)/python -m tools.attack --programs 1000 --backend shm
	$(BIN)/python -m tools.attack --programs 1000 --backend gloo

# Random training scripts and faults in them against gradmesh check; half an hour on two cores.
attack-check: .venv/ready
	$(BIN)/python -m tools.check_attack --programs 200 --seed 1 --mutants 3
	$(BIN)/python -m tools.check_attack.verbs --programs 200 --seed 1

# The same programs under JAX, which has an environment of its own; some seven minutes.
attack-jax: .venv/ready .venv-jax/ready
	$(BIN)/python -m tools.attack.jax_run --programs 600 --seed 1 --jax-python .venv-jax/bin/python

.venv-jax/ready:
	$(PYTHON) -m venv .venv-jax
	.venv-jax/bin/pip install --quiet "jax[cpu]"
	touch $@

.venv/peers: .venv/ready benchmarks/requirements.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt
	touch $@

.venv/ready: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv-py%/ready: pyproject.toml constraints.txt $(NATIVE)
	python$* -m venv .venv-py$*
	.venv-py$*/bin/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv-%/ready: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv-$*
	grep -v '^torch==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/pip install --quiet --constraint .venv-$*/constraints.txt --editable ".[dev]" torch==$*
	touch $@

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
