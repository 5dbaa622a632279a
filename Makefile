# `make tour` and `make test` each do everything on a fresh machine: environment, packages, model, run.
# Another Python: make PYTHON=python3.12 test. Arguments of a tour: make tour ARGS="--stages kv_cache".
# Some chapters only: make notebooks CHAPTERS="00 02".

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-$(notdir $(PYTHON))

.PHONY: env tour test coverage notebooks stubs lint clean
.DEFAULT_GOAL := tour

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "minillm needs Python 3.11 or newer, and $(PYTHON) is older or missing: install one and name it, as in make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') && \
	  $(BIN)/python -m pip --version 2>/dev/null | grep -qF "(python $$version)" || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev,notebooks]"
	@touch $@

tour: env
	@mkdir -p tour
	$(BIN)/minillm tour --plot tour/roofline.png --json tour/tour.json $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 # two processes of one thread: most tests have no work for two

coverage: env # of minillm/ by lines, processes that tests start included; takes longer than the tests alone
	$(BIN)/python -m coverage erase
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n 2
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=95

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

notebooks: env
	$(BIN)/python chapters/build.py $(CHAPTERS)

stubs: env # after a change in exercises/*/solution.py: the learner's files, the notebooks and the graders' digests
	$(BIN)/python -m minillm.grading --force

clean:
	rm -rf $(VENV) tour build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find minillm tests benchmarks chapters exercises -name __pycache__ -type d -prune -exec rm -rf {} +
