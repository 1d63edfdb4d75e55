# make demo: set up .venv and run the main job. make test: add what the tests need, and run them but for those that take
# long and rarely fail, which make test-all runs as well; both print their CPU seconds by folder beside a goal, on two idle
# cores; tests/cpu_seconds.py says what is counted, 220 s of ranks that tests share among them. make mutants: tests of the
# tests, half an hour to an hour.
# make drift: whether the newest TRL and verl still are what our tables say; installs them into outputs/drift.
# make lint: style checks. make types: pyright, about a minute. make docs: the documentation as a site, in outputs/site.
PYTHON ?= python3
INSTALLED := .venv/.installed
FOR_TESTS := .venv/.installed-for-tests
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 --dist worksteal

.PHONY: demo test test-all mutants lint types docs drift format clean

demo: $(INSTALLED)
	.venv/bin/pgtk loss=gspo aggregation=constant

test: $(FOR_TESTS)
	$(PYTEST) --cpu-seconds=480 -m "not slow and not mutants"

test-all: $(FOR_TESTS)
	$(PYTEST) --cpu-seconds=1069 -m "not mutants"

mutants: $(FOR_TESTS)
	$(PYTEST) -m mutants

lint: $(FOR_TESTS)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(FOR_TESTS)
	.venv/bin/pyright

docs: $(FOR_TESTS)
	.venv/bin/mkdocs build --strict

drift: $(FOR_TESTS)
	.venv/bin/python -m benchmarks.drift

format: $(FOR_TESTS)
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv outputs multirun

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pgtoolkit needs Python 3.11 or later; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@test -d .venv || $(PYTHON) -m venv .venv
	@echo "Installing pgtoolkit and what it needs into .venv; most of the time and the space goes to PyTorch."
	.venv/bin/python .ci/install.py -e .
	@touch $@

$(FOR_TESTS): $(INSTALLED)
	.venv/bin/python .ci/install.py -e ".[test]"
	@touch $@
