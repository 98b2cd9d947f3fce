# make demo and make test are all a newcomer needs; both set up .venv first, where it is missing or out of date:
# make demo with what the demo needs, the others with the tools of tests, docs and benchmarks too.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Test files that run at once, 0 to run them in pytest's own process (for --pdb); each starts a few processes,
# and many wait for timeouts.
JOBS   ?= 4
NATIVE := $(shell find native -name '*.cc' -o -name '*.h' -o -name '*.c') CMakeLists.txt
export PATH := $(CURDIR)/$(BIN):$(PATH)
MAKEFLAGS += -j2
# Some images forbid it, and each process would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

# The editable install knows the Python files it was made with, so a new file is a reason to install again.
MODULES := $(VENV)/modules
$(shell mkdir -p $(VENV); find src -name '*.py' | sort > $(MODULES).new; \
  cmp -s $(MODULES).new $(MODULES) || cp $(MODULES).new $(MODULES); rm $(MODULES).new)

.PHONY: demo test sanitize bench lint docs native clean

demo: $(VENV)/packages
	torchrelay demo $(ARGS)

test: $(VENV)/tools
	pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

sanitize: $(VENV)/tools
	pytest --sanitize tests/unit/test_native.py $(ARGS)

bench: $(VENV)/tools
	@for script in benchmarks/bench_*.py; do \
	  start=$$(date +%s); python $$script $(ARGS) || exit 1; \
	  echo "$$script: $$(($$(date +%s) - start)) s"; \
	done
	python benchmarks/page.py

lint: $(VENV)/tools
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	clang-format --dry-run --Werror $(filter %.cc %.h,$(NATIVE))
	python docs/generate.py --check
	python -m nanobind.stubgen -q -m torchrelay._native -o build/_native.pyi
	cmp build/_native.pyi src/torchrelay/_native.pyi

docs: $(VENV)/tools
	python docs/generate.py
	mkdocs build --strict

# The native module, rebuilt when a source changed. The build environment is the repository's own. Where nothing but
# sources of the core changed, its build goes on, without the four seconds of pip and CMake.
BUILT := $(wildcard build/cp*/build.ninja)
native: $(VENV)/native
$(VENV)/native: $(VENV)/build-tools pyproject.toml $(NATIVE) $(MODULES)
	$(if $(filter-out native/%,$?)$(filter-out 1,$(words $(BUILT))),\
	  pip install --quiet --no-build-isolation --no-deps -e .,\
	  ninja -C $(dir $(BUILT)) && cmake --install $(dir $(BUILT)) --strip --prefix $(VENV)/lib/python*/site-packages)
	touch $@

$(VENV)/build-tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	pip install --quiet --upgrade pip
	pip install --quiet -c constraints.txt 'scikit-build-core>=0.11' 'nanobind>=2.9' cmake ninja
	touch $@

# By far the largest package, fetched while the native module is compiled.
$(VENV)/torch: $(VENV)/build-tools constraints.txt
	pip install --quiet -c constraints.txt torch
	touch $@

$(VENV)/packages: $(VENV)/torch $(VENV)/native
	pip install --quiet -c constraints.txt 'torchrelay[demo]'
	touch $@

$(VENV)/tools: $(VENV)/packages
	pip install --quiet -c constraints.txt 'torchrelay[all,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
