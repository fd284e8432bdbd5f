# The whole vocabulary of this repository. Each word sets up what it needs first and is quick when nothing changed.
#
#   make setup        Debian packages, .venv, torch (uses an installed torch 2.11 or newer; NEAP_PYTHON names its Python)
#   make quickstart   a model that does not fit, trained: three runs and a table
#   make test         build, then every C++ and Python test
#   make bench        every benchmark, into benchmarks/results.json and results.md
#   make lint         formatting, ruff, layers, documentation, thread-safety analysis, clang-tidy
#   make asan         tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   make tsan         torch-free tests under ThreadSanitizer
#   make build        what `make test` builds, without running it
#   make clean        remove build/
#   make help         this list

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# Ninja and ctest spread over the cores by themselves; two make recipes at once would only crowd them.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: setup setup-lint quickstart test bench lint asan tsan build release clean help

JOBS ?= $(shell nproc)
PYTHON := $(CURDIR)/.venv/bin/python
NINJA := ninja -j$(JOBS)
# Configuring again is Ninja's own business once there is a build.ninja. ($1: preset)
configure = $(if $(wildcard build/$1/build.ninja),,NEAP_PYTHON=$(PYTHON) cmake --preset $1)

help:
	@sed -n '3,12s/^# *//p' $(MAKEFILE_LIST)

setup:
	@python3 tools/setup.py

setup-lint:
	@python3 tools/setup.py --lint

build: setup
	@$(PYTHON) tools/build.py --build build/dev --jobs $(JOBS)

release: setup
	@$(call configure,release)
	@$(NINJA) -C build/release

test: build
	@$(PYTHON) tools/run_tests.py --build build/dev --jobs $(JOBS)

quickstart: setup
	@$(call configure,release)
	@$(NINJA) -C build/release neap neap_sim
	@$(PYTHON) tools/quickstart.py --build build/release

bench: setup
	@$(call configure,release)
	@$(NINJA) -C build/release benchmarks/all neap neap_sim neap_python
	@$(PYTHON) benchmarks/run.py --build build/release

lint: setup-lint
	@$(call configure,tidy)
	@$(PYTHON) tools/lint.py --build build/tidy --jobs $(JOBS)

# ASAN_TESTS=REGEX builds and runs a part: make asan ASAN_TESTS='neap_offload_.*'. (value: a $ in it is the regex's.)
asan: setup
	@$(call configure,asan)
	@$(PYTHON) tools/run_tests.py --build build/asan --jobs $(JOBS) --no-pytest --make $(if $(ASAN_TESTS),--regex '$(value ASAN_TESTS)')

tsan: setup
	@$(call configure,tsan)
	@$(PYTHON) tools/run_tests.py --build build/tsan --jobs $(JOBS) --no-pytest --make

clean:
	rm -rf build
