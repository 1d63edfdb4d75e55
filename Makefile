# make demo: set up .venv and run the main job. make test: set up .venv and run the tests, but for those that take long
# and rarely fail, which make test-all runs as well. make lint: style checks.
PYTHON ?= python3
INSTALLED := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 --dist worksteal

.PHONY: demo test test-all lint format clean

demo: $(INSTALLED)
	.venv/bin/pgtk loss=gspo aggregation=constant

test: $(INSTALLED)
	$(PYTEST) -m "not slow and not mutants"

test-all: $(INSTALLED)
	$(PYTEST)

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: $(INSTALLED)
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv outputs multirun

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pgtoolkit needs Python 3.11 or later; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@
