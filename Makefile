# The development environment is .venv, made by the first target that needs it from requirements.lock.
# Nothing but GNU make and Python 3.11 or newer has to be installed beforehand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPECHECK := build/typecheck
PYTEST_ARGS ?=

# Where other work shares the cores, OpenMP threads that spin at barriers make torch ten times slower.
export OMP_WAIT_POLICY ?= passive

# SGLang imports thousands of modules in each of its processes: let them be compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint format bench-quick lock clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/sglang-kvtc demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# mypy cannot follow the directory map of pyproject.toml, so it checks the tree as a wheel lays it out.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPECHECK)
	$(BIN)/python -c "import setuptools; setuptools.setup()" --quiet build_py --build-lib $(TYPECHECK)
	cd $(TYPECHECK) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p sglang_kvtc
	$(BIN)/mypy --cache-dir build/mypy patches/sglang-cpu/sglang_kvtc_cpu

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-quick: $(STAMP)
	$(BIN)/sglang-kvtc bench codec
	$(BIN)/sglang-kvtc bench allocate

lock: $(STAMP)
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade \
		--quiet --no-header --no-annotate --no-emit-index-url --output-file requirements.lock

clean:
	rm -rf $(VENV) build dist *.egg-info patches/*/*.egg-info .pytest_cache .ruff_cache .hypothesis

# An environment without the stamp comes from a run that was interrupted: then no file in it is trusted.
INTERRUPTED = $(if $(wildcard $(STAMP)),,$(wildcard $(VENV)))

$(STAMP): pyproject.toml requirements.lock patches/sglang-cpu/pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit('$(PYTHON) is older than 3.11' if sys.version_info < (3, 11) else 0)"
	@rm -f $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(INTERRUPTED),--force-reinstall) --constraint requirements.lock uv
	$(BIN)/uv pip install --python $(BIN)/python $(if $(INTERRUPTED),--reinstall) --no-deps --requirement requirements.lock \
		--editable . --editable patches/sglang-cpu
	touch $@
