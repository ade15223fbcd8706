# make demo | test | check | exhaustive | bench: each sets up .venv by itself, once.
# Another torch (a CUDA build, an older one):  make demo TORCH='torch==2.6.0'

VENV ?= .venv
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
PIP = $(VENV)/bin/python -m pip install --quiet
NATIVE = $(wildcard CMakeLists.txt src/narrowgauge/kernels/*.cpp src/narrowgauge/kernels/*.hpp)

# Two tests at a time, as many of them wait for processes that begin; PARALLEL= for one.
PARALLEL ?= --numprocesses=2 --dist=worksteal

# One stamp per requested torch, so that another TORCH is installed and narrowgauge after it.
STAMP_TORCH = $(VENV)/.installed-torch-$(firstword $(shell printf %s '$(TORCH)' | cksum))
STAMP = $(VENV)/.installed-narrowgauge

.PHONY: demo test check exhaustive bench clean

demo: $(STAMP)
	$(VENV)/bin/narrowgauge demo $(ARGS)

test: check
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest --quiet tests/test_floors.py tests/test_public_names.py

exhaustive: $(STAMP)
	$(VENV)/bin/python tests/exhaustive.py $(ARGS)

bench: $(STAMP)
	$(PIP) --editable '.[dev,bench]'
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python benchmarks/kernels.py
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/python benchmarks/simulator.py
	$(VENV)/bin/python benchmarks/allreduce.py
	$(VENV)/bin/python benchmarks/allreduce.py --two-hosts
	$(VENV)/bin/python benchmarks/ddp.py
	$(VENV)/bin/python benchmarks/inputs.py
	$(VENV)/bin/python benchmarks/parameters.py
	$(VENV)/bin/python benchmarks/operators.py

clean:
	rm -rf $(VENV) build dist narrowgauge-demo CMakeCache.txt CMakeInit.txt .cmake CMakeFiles build.ninja .ninja_* \
		cmake_install.cmake src/narrowgauge/kernels/*.so

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed; none was found on PATH (or say make PYTHON=…)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and by name: left to the dependency list, pip takes the newest, which may be a build
# of several gigabytes for a GPU that is not there.
$(STAMP_TORCH): | $(VENV)/bin/python
	$(PIP) '$(TORCH)'
	@rm -f $(VENV)/.installed-torch-*
	@touch $@

$(STAMP): pyproject.toml $(NATIVE) $(STAMP_TORCH)
	$(PIP) --editable '.[dev]'
	@touch $@
