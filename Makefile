# From a fresh clone: `make train`, `make test`, `make large`. Each makes its own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BACKEND ?= jax
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: train test lint suite torch trainers large keras-own bench docs clean

train: $(VENV)/installed-demo-$(BACKEND)
	KERAS_BACKEND=$(BACKEND) $(BIN)/wholestep demo

test: lint suite torch

lint: $(VENV)/installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

suite: $(VENV)/installed-all
	KERAS_BACKEND=jax $(BIN)/pytest --numprocesses 2 --dist worksteal
	KERAS_BACKEND=tensorflow $(BIN)/pytest --numprocesses 2 --dist worksteal

# The audit of PyTorch's loops, where TensorFlow is not installed: with Triton, a process cannot load both.
torch: $(VENV)-torch/installed
	KERAS_BACKEND=jax $(VENV)-torch/bin/pytest --numprocesses 2 --dist worksteal tests/test_audit_torch.py \
		tests/test_audit_torch_scripts.py

# The audit of scripts of Transformers, Accelerate and Lightning, with models made on the spot.
trainers: $(VENV)-trainers/installed
	KERAS_BACKEND=jax $(VENV)-trainers/bin/pytest tests/test_audit_torch_trainers.py

# All tests and the larger runs of them, compiled as users have it: hours, in parts, as compiled programs take room.
large: export XLA_FLAGS = --xla_force_host_platform_device_count=8
large: $(VENV)/installed-all
	for engine in jax tensorflow; do for part in a-c d-f g-r s-z; do \
		KERAS_BACKEND=$$engine $(BIN)/pytest --numprocesses 2 -m "large or not large" tests/test_[$$part]*.py || exit 1; \
	done; done

# Keras' own tests of its loop, its callbacks and its data, each call of `fit` and its like carried out by this library.
KERAS = $(BIN)/python -c "import importlib.util as i; print(i.find_spec('keras').submodule_search_locations[0])"
keras-own: BIN = $(VENV)-keras/bin
keras-own: $(VENV)-keras/installed
	keras=$$($(KERAS))/src; for engine in jax tensorflow; do KERAS_BACKEND=$$engine PYTHONPATH=tests $(BIN)/pytest \
		-q -c /dev/null --rootdir $$keras -p keras_own -p no:cacheprovider --import-mode=importlib \
		$$keras/trainers/trainer_test.py $$keras/trainers/data_adapters $$keras/callbacks || exit 1; done

bench: $(VENV)/installed-all
	$(BIN)/python -m benchmarks

# The site, in build/site; a warning is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict

$(VENV)/installed-demo-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,$*]'
	touch $@

$(VENV)/installed-all: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,jax,tensorflow,dev]'
	touch $@ $(VENV)/installed-demo-jax $(VENV)/installed-demo-tensorflow

$(VENV)-torch/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/pip install --quiet --constraint constraints.txt --editable '.[demo,jax,dev,torch]'
	touch $@

$(VENV)-trainers/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-trainers
	$(VENV)-trainers/bin/pip install --quiet --constraint constraints.txt --editable '.[jax,dev,torch,trainers]'
	touch $@

$(VENV)-keras/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-keras
	$(VENV)-keras/bin/pip install --quiet --constraint constraints.txt --editable '.[demo,jax,tensorflow,dev,keras-own]'
	touch $@

$(VENV)/installed-docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-keras $(VENV)-torch $(VENV)-trainers
