# The front door. Each target is one script; the scripts can be run by hand too.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-faults check clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r target about; do \
		printf '  make %-12s %s\n' "$$target" "$$about"; done

setup: ## make .venv with vLLM (CPU), NIXL and the tools; a few minutes once, then a moment
	@scripts/setup

demo: setup ## one prompt through a prefill and a decode engine, compared with one engine alone
	@.venv/bin/kvbaton demo

test: setup ## static checks, then every test, real engines last
	@scripts/check
	@scripts/test

test-faults: setup ## real engines that are killed, stopped and starved; three quarters of an hour
	@scripts/test-faults

check: setup ## static checks only: format, lint, types, import contracts
	@scripts/check

clean: ## remove caches and test leftovers; keeps .venv, models and running deployments
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov build dist
	@find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv
	@rm -rf .venv src/*.egg-info
