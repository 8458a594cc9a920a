# make demo: a policy that learns, on this machine, in minutes.   make test: all tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
SGLANG_VENV := .venv-sglang

.PHONY: demo demo-llm sglang test slurm lint format venv clean help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(VENV)/.demo  ## train a tiny language model with DRPO and show what it learnt
	$(BIN)/python -m unirl.demo $(ARGS)

demo-llm: $(VENV)/.test  ## the same with a pretrained 135M model (about 8 minutes)
	$(BIN)/python -m unirl.demo --llm $(ARGS)

sglang: $(SGLANG_VENV)/.packages  ## an environment of its own with SGLang for CPU (1.9 GB)

test: $(VENV)/.test  ## run the tests; lists those that need a part this machine lacks
	$(BIN)/python -m pytest $(ARGS)

slurm: $(VENV)/.test  ## submit the job scripts to a Slurm of the tests' own (root, Debian's slurmd slurmctld munge)
	$(BIN)/python -m pytest tests/slurm $(ARGS)

lint: $(VENV)/.test  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test  ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/.demo  ## only make the virtual environment

clean:  ## remove the virtual environments and what was built
	rm -rf $(VENV) $(SGLANG_VENV) build dist *.egg-info unirl/kernels/*.so

EXTENSION := $(shell find csrc -type f) setup.py pyproject.toml

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "Python 3.11 is needed (found: $$($(PYTHON) --version 2>&1)); name one with PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.packages: requirements/cpu.txt | $(VENV)/.created
	$(BIN)/python -m pip install --disable-pip-version-check -q --progress-bar on -r requirements/cpu.txt
	touch $@

$(VENV)/.demo: $(VENV)/.packages $(EXTENSION)
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.test: $(VENV)/.demo requirements/test.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --progress-bar on -r requirements/test.txt -c requirements/cpu.txt
	touch $@

$(SGLANG_VENV)/.created: | $(VENV)/.created
	$(PYTHON) -m venv $(SGLANG_VENV)
	touch $@

$(SGLANG_VENV)/.packages: requirements/sglang-cpu.txt requirements/sglang-cpu-no-deps.txt | $(SGLANG_VENV)/.created
	$(SGLANG_VENV)/bin/python -m pip install --disable-pip-version-check -q --progress-bar on -r requirements/sglang-cpu.txt
	$(SGLANG_VENV)/bin/python -m pip install --disable-pip-version-check -q --progress-bar on --no-deps -r requirements/sglang-cpu-no-deps.txt
	touch $@
