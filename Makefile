# The two commands that matter: `make book` and `make test`.
# Each sets up .venv by itself; all paths are relative, so the project may lie
# in a folder with spaces in its name.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# one thread a process, and a data root that holds in every folder
RUN := OMP_NUM_THREADS=1 TCE_DATA="$${TCE_DATA:+$$(cd "$$TCE_DATA" && pwd)}"

# PyTorch's profiler, which measures memory, else prints when it starts
export KINETO_LOG_LEVEL := 99

# leaves the seconds since .venv/.began-NAME for the benchmark
took = echo $$(( $$(date +%s) - $$(cat .venv/.began-$(1)) )) > .venv/.seconds-$(1)

.PHONY: help book pdf test bench stats sync constraints clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

book: $(READY) ## run a comparison on digits, build the book into _build/html
	@date +%s > .venv/.began-book
	$(BIN)/nbdev_export
	$(RUN) $(BIN)/tce sweep --preset digits
	$(RUN) $(BIN)/jupyter-book build . -n -W --keep-going --quiet
	@$(call took,book)
	@echo "The book is ready: open $(CURDIR)/_build/html/index.html"

pdf: $(READY) ## print the whole book into _build/tce_nb.pdf; needs Chromium
	$(RUN) $(BIN)/jupyter-book build . --builder singlehtml -n --quiet
	$(BIN)/python tests/print_pdf.py _build/singlehtml/nbs/index.html _build/tce_nb.pdf

test: $(READY) ## run all tests: library, notebooks, book, package
	@date +%s > .venv/.began-test
	$(RUN) $(BIN)/python -m pytest -n 2 --dist worksteal
	@$(call took,test)

stats: ## count lines and public names of each room
	@$(PYTHON) tests/rooms.py

bench: $(READY) ## measure loss and trainer as ratios, write results/bench.json
	$(BIN)/python -m tce_nb.report.bench

sync: $(READY) ## clean notebooks, export the library, update the README's table
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/python nbs/make_readme.py

constraints: $(READY) ## pin what new requirements in settings.ini need
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile setup.py --all-extras --universal --refresh-package tce-nb \
	  --python-version 3.10 --no-annotate --no-emit-index-url \
	  --no-emit-find-links --custom-compile-command "make constraints" \
	  --output-file constraints.txt --quiet

clean: ## remove the book, caches, .venv and the runs on digits
	rm -rf _build .venv .pytest_cache .hypothesis .mypy_cache *.egg-info dist build
	cd results && rm -rf work/digits-* records/digits-*

# What is missing is said before anything starts; the stamp is written last,
# so a broken installation is repeated.
$(READY): constraints.txt settings.ini setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $$($(PYTHON) --version) is too old: Python 3.10 or newer is needed, name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv or pip: install them (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@date +%s > .venv/.began-setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@$(call took,setup)
	@touch $(READY)
