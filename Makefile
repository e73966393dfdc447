# `make demo` and `make test` set everything up by themselves; a second call starts at once.
# Variables: PYTHON (which interpreter makes .venv), TORCH_INDEX (an index with CPU builds of torch), RANKS, CONFIG.

BIN := .venv/bin
STAMP := .venv/.installed
RANKS ?= 4
CONFIG ?= configs/grpo_arithmetic.yaml
SHELL_SCRIPTS := .ci/run tools/install.sh $(wildcard slurm/*.sbatch)

.PHONY: help install demo test test-all lint types format docs bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)  ## make or update .venv

$(STAMP): pyproject.toml constraints.txt tools/install.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/install.sh
	@touch $@

demo: $(STAMP)  ## GRPO learns arithmetic on RANKS=4 CPU ranks (TP 2 x CP 2, sequence parallel, packed)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m parallel_rl.cli train $(CONFIG) --run.resume never

test: $(STAMP)  ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow and not gpu and not slurm"

test-all: $(STAMP)  ## the slow tests too
	$(BIN)/python -m pytest -m "not gpu and not slurm"

lint: $(STAMP)  ## ruff, shellcheck, bash -n
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	for script in $(SHELL_SCRIPTS); do bash -n $$script || exit 1; done

types: $(STAMP)  ## mypy
	$(BIN)/mypy

format: $(STAMP)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## docs/losses.md, from the code and the recipes
	$(BIN)/python -m tools.losses_table

bench: $(STAMP)  ## the benchmarks, with their figures checked
	$(BIN)/python -m benchmarks.token_stats --check
	$(BIN)/python -m benchmarks.linear --check
	$(BIN)/python -m benchmarks.losses --check
	$(BIN)/python -m benchmarks.truncation --check

clean:  ## caches and builds; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
