# `make repro` is the main job; `make test` checks the code. Each installs what it needs first.

# A name alone may be a version manager's placeholder for a Python that is not there, hence the trial run.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	if $$p -c "" 2>/dev/null; then echo $$p; break; fi; done)
VENV_PYTHON := .venv/bin/python
# DVC stages and pytest find this environment's programs, activated or not.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export DVC_NO_ANALYTICS := 1
# For the shell: a path may hold spaces and quotes.
quoted = '$(subst ','\'',$(1))'
CHOICES = $(if $(MODEL),--model $(call quoted,$(MODEL))) $(if $(PROFILE),--profile $(call quoted,$(PROFILE))) \
	$(if $(REGISTRY),--registry $(call quoted,$(REGISTRY))) $(if $(QUERIES),--queries $(call quoted,$(QUERIES)))

.PHONY: help repro test verify doctor install params peers lock clean

help:
	@echo "make repro    measure and draw everything in half an hour: [PROFILE=quick|laptop|full] [FORCE=1]"
	@echo "              your own case: [MODEL=name or GGUF path] [REGISTRY=tools.json QUERIES=queries.jsonl]"
	@echo "make test     run all tests: [ARGS='-k name']"
	@echo "make verify   say whether results match dvc.lock, without running anything"
	@echo "make doctor   check this machine and installation"
	@echo "make install  create .venv from requirements.txt; [PYTHON=python3.12]"
	@echo "make params   write params.yaml from conf/"
	@echo "make peers    install xgrammar into .nexus/peers, to be measured beside our own constraints"
	@echo "make lock     write the requirements files from pyproject.toml (needs uv)"
	@echo "make clean    remove measured cells, stamps, caches and results of other profiles than full"

repro: install
	@$(VENV_PYTHON) -m nexus repro $(CHOICES) $(if $(FORCE),--force)

test: install
	@$(VENV_PYTHON) -m pytest $(ARGS)

verify doctor params: install
	@$(VENV_PYTHON) -m nexus $@

install:
ifeq ($(strip $(PYTHON)),)
	@echo "nexus install: no Python found; install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=/path/to/python3" >&2; \
	exit 1
else
	@$(PYTHON) install.py
endif

# Without dependencies: xgrammar asks for PyTorch and transformers, which masks do not need.
peers: install
	@$(VENV_PYTHON) -m venv --clear .nexus/peers
	@.nexus/peers/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
		--only-binary :all: --requirement requirements-peers.txt
	@echo "xgrammar is in .nexus/peers; measure with: .venv/bin/python -m experiments.constrain_cost"

# Compilers write `cpycppyy`, but its headers then land in a folder of that spelling, where cppyy does not look for them.
lock:
	uv pip compile --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header --universal \
		--python-version 3.11 --extra build --extra cluster --extra peers --extra test pyproject.toml -o requirements.txt
	sed -i.bak 's/^cpycppyy==/CPyCppyy==/' requirements.txt && rm requirements.txt.bak
	$(PYTHON) -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
		print(*project['optional-dependencies']['train'], sep='\n')" | \
		uv pip compile --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header --universal \
		--python-version 3.11 --constraint requirements.txt - -o requirements-train.txt
	$(PYTHON) -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
		print(*project['optional-dependencies']['engine'], sep='\n')" | \
		uv pip compile --generate-hashes --no-deps --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
		--universal --python-version 3.11 - -o requirements-peers.txt

clean:
	rm -rf .nexus/cells .nexus/blocks .nexus/done .nexus/stamp .nexus/times .nexus/sweeps .nexus/hydra
	rm -rf results/*.quick results/*.laptop results/own-* results/multirun
	rm -rf .pytest_cache .hypothesis
	find conf nexus experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
