# What a newcomer and CI call. Everything lands in .venv and .cache, both ignored by git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where a machine's environment forbids compiled files, each of the hundreds of processes would compile our modules anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-learning learning-table test-harnesses test-engines test-trainers test-sources faults bench docs audit lint clean help environments engines trainers

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.base: pyproject.toml constraints.txt
	@scripts/setup.sh $(PYTHON) $(VENV) demo
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	@scripts/setup.sh $(PYTHON) $(VENV) test
	@touch $@ $(VENV)/.base

demo: $(VENV)/.base  ## an unmodified agent gets better in four minutes, no GPU
	@$(BIN)/rolltap demo --report reports/demo.json $(ARGS)

# A test that its own limit does not end ends its worker after so many seconds, and is named: a hang says where it is.
HANGS := --max-worker-restart 2 -o faulthandler_exit_on_timeout=true -o faulthandler_timeout=

test: $(VENV)/.test  ## the tests (about twelve minutes on 2 cores)
	@scripts/servers.sh
	@$(BIN)/pytest -q -n 4 --dist loadfile --no-loadscope-reorder $(HANGS)500 -m "not harness and not engines and not trainers and not long and not gpu" $(ARGS)

test-learning: $(VENV)/.test  ## the demo's learning, beside a control whose rewards are shuffled
	@$(BIN)/pytest -q -s tests/acceptance/test_learning.py $(ARGS)

learning-table: $(VENV)/.test  ## what recipes learn, beside their controls: hours; it goes on where it stopped
	@$(BIN)/python -m tests.learning.table .cache/learning $(ARGS) && $(BIN)/python scripts/recipes_page.py

test-harnesses: $(VENV)/.test  ## real releases of real harnesses against the proxy
	@scripts/servers.sh
	@$(BIN)/pytest -q -n 2 $(HANGS)1000 -m harness $(ARGS)

test-engines: $(VENV)/.test engines  ## a real vLLM (CPU build) behind the proxy
	@$(BIN)/pytest -q $(HANGS)1000 -m engines $(ARGS)

test-trainers: $(VENV)/.test trainers  ## trainers that need environments of their own, on our rows
	@$(BIN)/pytest -q $(HANGS)1000 -m "trainers and not sources" $(ARGS)

test-sources: $(VENV)/.test  ## slime, NeMo RL and prime-rl from check-outs in SOURCES, each named like its repository
	@scripts/trainers.sh .cache/trainers/sources-1
	@ROLLTAP_SOURCES=$(abspath $(SOURCES)) $(BIN)/pytest -q -m sources tests/trainers/test_sources.py $(ARGS)

environments: engines trainers  ## what test-engines and test-trainers install

engines:
	@scripts/engines.sh .cache/engines/vllm-0.32.0

trainers:
	@for name in tinker-cookbook-0.5.8 verl-0.9.1 llamafactory-0.9.5 openenv-0.10.0 verifiers-0.4.0 environments-1 \
	  harbor-0.25.0 python-3.12; do \
	  scripts/trainers.sh .cache/trainers/$$name || exit 1; done
	@scripts/sinks.sh .cache/trainers/sinks-1

faults: $(VENV)/.test  ## every fault over 20 seeds, 1,000 kills; prints the table of docs/faults.md
	@scripts/servers.sh
	@nice $(BIN)/python -m tests.faults.run $(ARGS)

bench: $(VENV)/.test  ## the call log and the whole proxy beside a durable floor (half an hour on a quiet machine)
	@scripts/servers.sh
	@$(BIN)/python -m tests.bench.bench_calllog
	@$(BIN)/python -m tests.bench.bench_proxy
	@$(BIN)/python -m tests.bench.bench_scale
	@$(BIN)/python scripts/tables.py

docs: $(VENV)/.base  ## the documentation as a site in .cache/site; fails on a link that leads nowhere
	@scripts/setup.sh $(PYTHON) $(VENV) docs
	@$(BIN)/mkdocs build

audit: $(VENV)/.base  ## advisories of the tested pins, where they can be reached, and reports/sbom.cdx.json
	@$(BIN)/python scripts/audit.py $(ARGS)

lint: $(VENV)/.test  ## ruff, pyright, import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright && $(BIN)/lint-imports

clean:  ## removes the virtual environment and caches
	rm -rf $(VENV) .cache build dist src/*.egg-info
