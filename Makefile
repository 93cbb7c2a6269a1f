# Everything here runs in a virtual environment of its own, .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
AOT_STAMP := .venv/.installed-aot

.PHONY: quickstart test test-aot test-all lint docs clean

quickstart: $(STAMP)  ## install, then train, evaluate and sample a small language model
	$(BIN)/dsjax train configs/quickstart.yaml

test: $(DEV_STAMP)  ## what a change must pass
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-aot: $(AOT_STAMP)  ## what is compiled for GPUs that are not here
	$(BIN)/python -m pytest tests/aot tests/plan tests/pallas_kernels -m "not slow" -n 2 --dist worksteal

test-all: $(AOT_STAMP)  ## the campaigns and whole products too
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@! find tests -name 'test_*.py' -printf '%f\n' | sort | uniq -d | grep . || { echo "no two test files may have one name"; exit 1; }

docs: $(STAMP)  ## what is generated from the code
	$(BIN)/python -m dsjax.config.reference > docs/config.md

.venv/bin/python:
	$(PYTHON) -m venv .venv || { echo "this needs Python >= 3.11 with venv (Debian: apt-get install python3-venv)"; exit 1; }

$(STAMP): .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

$(AOT_STAMP): $(DEV_STAMP)
	$(BIN)/python -m pip install -q -e '.[dev,aot]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
