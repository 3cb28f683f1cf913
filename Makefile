# From a fresh clone: `make train`, `make check`, `make test`, `make large`. Each makes its own virtual environment.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
PACKAGES ?= wholestep stepcheck
ENGINES ?= jax tensorflow
PARALLEL := --numprocesses 2 --dist worksteal
on-both = for engine in $(ENGINES); do for package in $(PACKAGES); do \
	(cd $$package && KERAS_BACKEND=$$engine $(BIN)/pytest $(PARALLEL) $(1)) || exit 1; done; done
BACKEND ?= jax
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: train check test slow lint suite torch remote large keras-own matrix release corpus bench docs clean

train: $(VENV)/installed-demo-$(BACKEND)
	KERAS_BACKEND=$(BACKEND) $(BIN)/python examples/digits.py

# stepcheck on a loop that is wrong, and on the loop with the fix that the report proposes.
check: $(VENV)/installed-check-$(BACKEND)
	KERAS_BACKEND=$(BACKEND) $(BIN)/python examples/audit.py

test: lint suite torch

lint: $(VENV)/installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	for package in $(PACKAGES); do (cd $$package && $(BIN)/mypy) || exit 1; done

# The tests of both packages on both engines: a Keras backend is fixed for a process.
suite: $(VENV)/installed-all
	$(call on-both,)

# What takes the long way: processes, whole examples, long loops. It belongs to a change as `make test` does.
slow: $(VENV)/installed-all
	$(call on-both,-m "slow and not large")

# stepcheck on PyTorch's loops, where TensorFlow is not installed: with Triton, a process cannot load both.
OF_TORCH = $(addprefix tests/test_torch,.py _certificates.py _devices.py _diff.py _objective.py _processes.py _steps.py) $(addprefix tests/test_,command.py pairs.py probe.py)
torch: $(VENV)-torch/installed
	cd stepcheck && KERAS_BACKEND=jax $(VENV)-torch/bin/pytest $(PARALLEL) $(OF_TORCH)
	cd stepcheck && KERAS_BACKEND=jax $(VENV)-torch/bin/pytest -k torch tests/test_docs.py tests/test_readme.py

# Checkpoints in a local server of S3's protocol.
remote: $(VENV)-remote/installed
	cd wholestep && KERAS_BACKEND=jax $(VENV)-remote/bin/pytest tests/checkpoints/test_remote.py

# All tests and the larger runs of them, compiled as users have it: hours, in parts, as compiled programs take room.
large: export XLA_FLAGS = --xla_force_host_platform_device_count=8
large: $(VENV)/installed-all
	for package in $(PACKAGES); do for engine in $(ENGINES); do for part in a-c d-f g-r s-z; do \
		(cd $$package && KERAS_BACKEND=$$engine $(BIN)/pytest --numprocesses 2 -m "large or not large" \
			$$(find tests -name "test_[$$part]*.py")) || exit 1; \
	done; done; done

# Keras' own tests of its loop, its callbacks and its data, each call of `fit` and its like carried out by this library.
KERAS = $(BIN)/python -c "import importlib.util as i; print(i.find_spec('keras').submodule_search_locations[0])"
keras-own: BIN = $(VENV)-keras/bin
keras-own: $(VENV)-keras/installed
	keras=$$($(KERAS))/src; for engine in $(ENGINES); do KERAS_BACKEND=$$engine PYTHONPATH=wholestep/tests/support $(BIN)/pytest \
		-q -c /dev/null --rootdir $$keras -p keras_own -p no:cacheprovider --import-mode=importlib \
		$$keras/trainers/trainer_test.py $$keras/trainers/data_adapters $$keras/callbacks || exit 1; done

# A part of the suite with the oldest and the newest supported versions of Keras, the engines and numpy, in build/matrix.
MATRIX ?= oldest-jax oldest-tensorflow newest-jax newest-tensorflow
QUICK ?= $(addprefix wholestep/tests/,$(addsuffix .py,test_drive engines/test_engines test_trainer test_callbacks model/test_metrics pages/test_resume reports/test_run_report))
matrix: $(VENV)-release/installed
	for each in $(MATRIX); do $(MAKE) --no-print-directory matrix-$$each || exit 1; done

matrix-%: UV = $(VENV)-release/bin/uv
matrix-%: HERE = build/matrix/$*
matrix-%: ENGINE = $(lastword $(subst -, ,$*))
matrix-%: $(VENV)-release/installed
	$(UV) venv --quiet --clear --python $(PYTHON) $(HERE)
	$(UV) pip install --quiet --python $(HERE) --editable './wholestep[$(ENGINE)]' \
		--resolution $(if $(findstring oldest,$*),lowest-direct,highest)
	$(UV) pip freeze --quiet --python $(HERE) --exclude-editable > $(HERE)/versions.txt
	$(UV) pip install --quiet --python $(HERE) --editable './wholestep[$(ENGINE),demo]' --constraint $(HERE)/versions.txt \
		hypothesis pytest pytest-xdist 'tensorboard>=2.19,<3'
	grep -iE '^(keras|jax|tensorflow-cpu|tensorflow|numpy|ml-dtypes|xxhash)==' $(HERE)/versions.txt | xargs echo $*:
	KERAS_BACKEND=$(ENGINE) $(HERE)/bin/pytest -c wholestep/pyproject.toml $(PARALLEL) $(QUICK)

# Builds the archives of both packages in build/release, checks them, and runs READMEs and examples in empty environments.
release: $(VENV)-release/installed
	$(VENV)-release/bin/python wholestep/tests/support/release.py

# stepcheck on the loops of the corpus, compared with its table: half an hour.
corpus: $(VENV)/installed-all $(VENV)-torch/installed $(VENV)-trainers/installed
	$(BIN)/python -m corpus --jobs 2 --check

bench: $(VENV)/installed-all
	$(BIN)/python -m benchmarks

# The sites of both packages, in build/site; a warning is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/installed-docs
	for package in $(PACKAGES); do $(BIN)/mkdocs build --strict --config-file $$package/mkdocs.yml || exit 1; done

PROJECTS := wholestep/pyproject.toml stepcheck/pyproject.toml constraints.txt

$(VENV)/installed-demo-%: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable './wholestep[demo,$*]'
	touch $@

$(VENV)/installed-check-%: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable './wholestep[$*]' --editable './stepcheck[keras,pictures]'
	touch $@

$(VENV)/installed-all: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable './wholestep[demo,jax,tensorflow,dev]' \
		--editable './stepcheck[keras,dev]'
	touch $@ $(foreach engine,jax tensorflow,$(VENV)/installed-demo-$(engine) $(VENV)/installed-check-$(engine))

$(VENV)-torch/installed: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/pip install --quiet --constraint constraints.txt --editable './wholestep[demo,jax,dev]' \
		--editable './stepcheck[keras,torch,dev]'
	touch $@

$(VENV)-trainers/installed: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)-trainers
	$(VENV)-trainers/bin/pip install --quiet --constraint constraints.txt --editable './wholestep[jax,dev]' \
		--editable './stepcheck[keras,torch,trainers,dev]'
	touch $@

$(VENV)-remote/installed: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)-remote
	$(VENV)-remote/bin/pip install --quiet --editable './wholestep[jax,dev,stores]'  # s3fs fits few versions of its dependencies
	touch $@

$(VENV)-keras/installed: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)-keras
	$(VENV)-keras/bin/pip install --quiet --constraint constraints.txt --editable './wholestep[demo,jax,tensorflow,dev,keras-own]'
	touch $@

$(VENV)-release/installed: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/pip install --quiet 'build>=1.2,<2' 'twine>=6.1,<8' 'uv>=0.8,<1'
	touch $@

$(VENV)/installed-docs: $(PROJECTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable './wholestep[docs]'
	touch $@

clean:
	rm -rf build $(VENV) $(VENV)-keras $(VENV)-release $(VENV)-remote $(VENV)-torch $(VENV)-trainers
