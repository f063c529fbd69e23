# Two commands for a fresh machine, each enough alone: `make demo` and `make test`.
# They need a Python 3.11 to 3.13 and, the first time, a package registry to install from.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@echo "make demo    install into $(VENV), plan Llama-3-8B for two DGX H100, then plan a"
	@echo "             small GPT for four processes of this machine and train it on them"
	@echo "make test    install into $(VENV), then lint, type check and test"
	@echo "make lint    the lint and the type check alone"
	@echo "make clean   remove $(VENV)"
	@echo "Another Python: make demo PYTHON=python3.12"

demo: $(VENV)/.installed
	$(BIN)/plan llama3-8b --topology dgx-h100:2 --global-batch 256 --seq-len 8192
	@printf '\nA small GPT, planned for four processes of this machine and trained on them:\n\n'
	$(ON_CPU) $(BIN)/plan examples/small-gpt/config.json --topology local:4 --use-all-devices \
	    --global-batch 16 --seq-len 128 --precision fp32 -o $(VENV)/small-gpt.json
	$(ON_CPU) $(BIN)/torchrun --nproc-per-node 4 -m executor train $(VENV)/small-gpt.json \
	    --steps 30 --lr 1e-3

test: lint
	$(BIN)/pytest -n $(JOBS) -m "not processes"
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m processes

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
