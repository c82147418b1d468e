# make help lists the targets.
PYTHON ?= python3
TORCH ?= 2.11.0
GATE_ARGS ?=
PYTEST_ARGS ?=
PYTEST_MARKS := not long
BENCH ?= kernels small block growth host cpu
BENCH_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

# Threads that spin between torch's parallel regions take the time of those that work.
export OMP_WAIT_POLICY ?= passive

# For the GPUs of this machine, or the one of the committed figures; pip builds for all.
gpus := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | paste -sd';')
export TORCH_CUDA_ARCH_LIST ?= $(or $(gpus),9.0)

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMPS := $(VENV)/stamps
CMAKE := $(BIN)/cmake
PACKAGE := python/automodel_rms_norm
CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help install gate test bench report lint format test-all test-cpp test-arm test-gpu-memory golden clean FORCE
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) TORCH=$(TORCH) GATE_ARGS PYTEST_ARGS BENCH BENCH_ARGS, and setup.py's:"
	@echo "AUTOMODEL_RMS_NORM_CUDA TORCH_CUDA_ARCH_LIST MAX_JOBS AUTOMODEL_RMS_NORM_WERROR"

# --- Environment: a stamp's name holds what it was made from --------------------------------------

hash = $(firstword $(shell { $(1); } | sha1sum))
python_key := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys.base_prefix)' 2>/dev/null)
pyproject_key := $(call hash,cat pyproject.toml .ci/requirements.py)
source_key := $(call hash,find csrc CMakeLists.txt setup.py pyproject.toml -type f | LC_ALL=C sort | xargs cat; \
  command -v nvcc || true; \
  echo '$(AUTOMODEL_RMS_NORM_CUDA) $(TORCH_CUDA_ARCH_LIST) $(AUTOMODEL_RMS_NORM_WERROR) $(CUDA_HOME) $(CXX)')

venv_stamp := $(STAMPS)/python-$(call hash,echo $(python_key))
tools_stamp := $(STAMPS)/tools-$(pyproject_key)
torch_stamp := $(STAMPS)/torch-$(TORCH)-$(pyproject_key)
package_stamp := $(STAMPS)/package-$(TORCH)-$(source_key)

# pip cannot be trusted to repair what it was killed in.
unfinished := $(VENV)/unfinished
ifneq ($(wildcard $(unfinished)),)
$(venv_stamp): FORCE
endif

$(venv_stamp):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; choose a Python: make PYTHON=python3.11" >&2; exit 1; }
	@echo "== $(VENV): $(PYTHON)"
	$(PYTHON) .ci/make_venv.py $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# $(call pip_install,NAMES OF .ci/requirements.py,OPTIONS)
pip := $(BIN)/python -m pip --disable-pip-version-check
pip_install = $(BIN)/python .ci/requirements.py $(1) > $(VENV)/requirements.txt; touch $(unfinished); \
  $(pip) install -r $(VENV)/requirements.txt $(2); rm $(unfinished)

$(tools_stamp): $(venv_stamp)
	@echo "== $(VENV): build tools, linters"
	@$(call pip_install,build dev,--quiet)
	@rm -f $(STAMPS)/tools-*; touch $@

$(torch_stamp): $(tools_stamp)
	@echo "== $(VENV): torch $(TORCH) and what the tests need (minutes the first time)"
	@$(call pip_install,build run test bench,torch==$(TORCH))
	@rm -f $(STAMPS)/torch-*; touch $@

$(package_stamp): $(torch_stamp)
	@echo "== automodel-rms-norm: compiling against torch $(TORCH)"
	@rm -f $(STAMPS)/package-*
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(pip) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

install: $(package_stamp) ## .venv with torch, the tools and this package; redone only where something changed

# --- The two commands -----------------------------------------------------------------------------

gate: install ## does the installed op keep its contract on this machine?
	$(BIN)/numerics-gate check $(GATE_ARGS)

test-all: PYTEST_MARKS :=
test-all: test ## the same with the tests marked long

test: install ## C++ tests, plain and sanitized, then pytest
	@if .ci/have-googletest; then $(MAKE) test-cpp; \
	else echo "SKIPPED: C++ tests, for lack of GoogleTest; to have them run: apt-get install googletest"; fi
	$(BIN)/python -m pytest -m "$(PYTEST_MARKS)" $(PYTEST_ARGS)

# --- C++ without torch ----------------------------------------------------------------------------

# $(call cpp_build,FOLDER,OPTIONS)
cpp_build = PATH="$(BIN):$$PATH" $(CMAKE) -S . -B build/$(1) -G Ninja -DWITH_TORCH=OFF \
  -DAUTOMODEL_WERROR=$(or $(AUTOMODEL_RMS_NORM_WERROR),OFF) $(2) && $(CMAKE) --build build/$(1)
cpp_test = $(call cpp_build,$(1),$(2)) && \
  $(BIN)/ctest --test-dir build/$(1) --output-on-failure --no-tests=error --progress --parallel $$(nproc)

test-cpp: $(tools_stamp) ## GoogleTest of numerics and CPU kernels, plain and under ASan and UBSan
	@echo "== C++ tests"
	@$(call cpp_test,cpp)
	@echo "== C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@$(call cpp_test,cpp-sanitized,-DAUTOMODEL_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g1')

test-arm: $(tools_stamp) ## the same tests, cross-compiled and under qemu
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && [[ -d /usr/src/googletest ]] || \
	  { echo "make test-arm needs: apt-get install g++-aarch64-linux-gnu qemu-user googletest" >&2; exit 1; }
	@echo "== C++ tests for Arm, under qemu"
	@$(call cpp_test,arm,-DCMAKE_TOOLCHAIN_FILE=tests/cpp/aarch64.cmake)

# Of more elements some rows are a cluster's of eight blocks. There synccheck (CUDA 13.0) says that
# it lost count of the barriers, whatever number it is given, and ends the launch.
SYNCCHECK_ELEMENTS := 131071

test-gpu-memory: $(tools_stamp) ## compute-sanitizer's four tools over the CUDA kernels (needs a GPU)
	@command -v nvcc >/dev/null && command -v compute-sanitizer >/dev/null || \
	  { echo "make test-gpu-memory needs nvcc and compute-sanitizer, which come with the CUDA toolkit" >&2; exit 1; }
	@$(call cpp_build,cuda,-DWITH_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native) --target cuda_driver
	@sanitize() { echo "== $$1"; compute-sanitizer --error-exitcode 1 --tool "$$@"; }; \
	driver=build/cuda/tests/cpp/cuda_driver; \
	for tool in memcheck racecheck initcheck; do sanitize $$tool $$driver; done; \
	sanitize synccheck --num-cuda-barriers 16 $$driver $(SYNCCHECK_ELEMENTS)

golden: $(tools_stamp) ## regenerates csrc/numerics/golden.h from the kernels
	@$(call cpp_build,cpp) --target golden_writer
	build/cpp/tests/cpp/golden_writer > build/golden.h
	$(BIN)/clang-format -i build/golden.h && mv build/golden.h csrc/numerics/golden.h

# --- Upkeep ---------------------------------------------------------------------------------------

bench: install ## the benchmarks that this machine can run, of those in BENCH
	@for program in $(BENCH); do echo "== $$program"; \
	  $(BIN)/python benchmarks/$$program.py $(BENCH_ARGS) || [[ $$? == 77 ]]; done

report: install ## the documents of benchmarks/results
	$(BIN)/python benchmarks/report.py

lint: install ## ruff, mypy --strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(tools_stamp) ## applies ruff and clang-format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean: ## removes what was built, keeps .venv's torch and tools
	rm -rf build dist python/*.egg-info $(PACKAGE)/{_C*.so,_build_config.py,include,lib} $(STAMPS)/package-*
