# Two commands for a fresh machine, each enough alone: `make demo` and `make test`.
# They need a Python 3.11 to 3.13 and, the first time, a package registry to install from.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@echo "make demo    install into $(VENV), then plan Llama-3-8B for two DGX H100"
	@echo "make test    install into $(VENV), then lint, type check and test"
	@echo "make lint    the lint and the type check alone"
	@echo "make clean   remove $(VENV)"
	@echo "Another Python: make demo PYTHON=python3.12"

demo: $(VENV)/.installed
	$(BIN)/plan llama3-8b --topology dgx-h100:2 --global-batch 256 --seq-len 8192

test: lint
	$(BIN)/pytest -n $(JOBS) -m "not processes"
	$(BIN)/pytest -m processes

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

# Stamp files make a second run fast; a changed pyproject.toml installs again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "Python 3.11, 3.12 or 3.13 is needed; '$(PYTHON)' is" \
	        "$$($(PYTHON) --version 2>&1 || true). Name another: make PYTHON=python3.12" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(VENV)/.installed $@
