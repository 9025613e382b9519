"""What every test starts from."""

import gc
import os
import sys

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported; threads that wait would spin

import torch  # noqa: E402
from parts import part_of
from quick_interpreter import make_interpreter_quick

FROZEN = {"modules": 0}  # how many were imported when objects were frozen last


@pytest.fixture(autouse=True)
def seeded():
    """Tests that draw numbers draw the same ones alone and in any order."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed looks at every kind of device
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


def pytest_addoption(parser):
    parser.addoption("--fuzz", action="store_true", help="every seed, line and case, not a sample: hours")
    parser.addoption("--part", default="1/1", help="2/4: of what would run, the second of four parts")


def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(*ids): of the cases of this test, a run without --fuzz takes those")
    config.addinivalue_line("markers", "alone: nothing else may use the GPU: takes what is free, or times copies")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out what only `--fuzz` runs. What has more than a test run takes is selected by `-m sampled`."""
    chosen, left_out, unknown = [], [], {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            case = item.callspec.id if hasattr(item, "callspec") else ""
            unknown.setdefault((item.path, item.originalname), set(marker.args)).discard(case)
        elif "fuzz" in item.fixturenames:
            item.add_marker("sampled")
        is_chosen = marker is None or case in marker.args or config.getoption("--fuzz")
        (chosen if is_chosen else left_out).append(item)
    chosen, of_others = part_of(chosen, config.getoption("--part"))
    left_out += of_others
    wrong = {key: ids for key, ids in unknown.items() if ids}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"ids of no case: {wrong}")
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


@pytest.fixture(scope="session")
def fuzz(request) -> bool:
    """Whether tests take all that they can draw from, not a sample."""
    return request.config.getoption("--fuzz")


@pytest.fixture(autouse=True, scope="session")
def frozen_until_the_end():
    """Unfreeze at the end: to libraries that look for leaks then, frozen objects are some.

    Trees of sources are hundreds of thousands of objects that stay: Python would look at all of them each time that
    they are a quarter more. Modules and engines ask for the collections that are needed.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(10_000, 20, 1_000)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def quick_collections(frozen_until_the_end):
    """A collection passes over what was imported: half a million objects. Engines that end ask for one each.

    In each module: tests import more, whole packages of models among it.
    """
    freeze()


@pytest.fixture(autouse=True)
def quick_collections_behind_imports(quick_collections):
    """As after a test that imported much, where the next ones of its module end many engines."""
    if len(sys.modules) > FROZEN["modules"] + 50:
        freeze()


def freeze():
    gc.collect()
    gc.freeze()
    FROZEN["modules"] = len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def quick_floors():
    """The bandwidth of the CPU's memory is measured with little: the figures mean nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoinfer.memory.floors.CPU_COPY_BYTES", 2**20)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    with pytest.MonkeyPatch.context() as patch:
        make_interpreter_quick(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_configs():
    """transformers writes each config that it reads as text, for a log: half of the time that reading one takes."""
    configs = sys.modules.get("transformers.configuration_utils")
    with pytest.MonkeyPatch.context() as patch:
        if configs is not None:
            patch.setattr(configs.PretrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Family, and settings of `make_checkpoint` -> the folder of that checkpoint, which is made once."""
    from tiny_models import make_checkpoint

    made = {}

    def make(family, **settings):
        key = family, *settings.items()
        if key not in made:
            made[key] = make_checkpoint(family, tmp_path_factory.mktemp(family), **settings)
        return made[key]

    return make


@pytest.fixture(scope="module")
def specs_of(tmp_path_factory):
    """Name of a shape -> its `Specs`, which are read once."""
    from nanoinfer.memory.setup import Specs
    from nanoinfer.models.shapes import write_shape
    from nanoinfer.weights.load import read_checkpoint

    made = {}

    def specs(shape):
        if shape not in made:
            made[shape] = Specs(read_checkpoint(write_shape(shape, tmp_path_factory.mktemp(shape))))
        return made[shape]

    return specs


@pytest.fixture(scope="module")
def checksums():
    """Engines of this module compute checksums, in blocks of 4 tokens: see `tests/support/checksum`."""
    import checksum

    with pytest.MonkeyPatch.context() as patch:
        checksum.use(patch, block_size=4)
        yield
