"""Which tests `make test-near` runs, and how a run is cut into parts."""

import subprocess

import near
import pytest
from arrows import ROOT
from parts import part_of


@pytest.fixture(scope="module", autouse=True)
def arrows():
    found = near.arrows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near, "arrows", lambda: found)
        yield found


@pytest.mark.parametrize(
    "changed, reached, others",
    [
        ("nanoinfer/parsers/harmony.py", {"tests/parsers/test_tool_calls.py"}, {"tests/kv/test_admission.py"}),
        ("nanoinfer/kv/admission.py", {"tests/kv/test_admission.py", "tests/engine/test_interrupts.py"}, set()),
        ("offload/ring.py", {"tests/offload/test_ring_schedule.py", "tests/engine/test_offload_random.py"}, set()),
        ("nanoinfer/kernels/step/sample.py", {"tests/sampling/test_sampler.py"}, {"tests/chat/test_chat_session.py"}),
        ("tests/support/checksum/oracle.py", {"tests/devices/test_checksum_device.py"}, {"tests/kv/test_fp8_kv.py"}),
        ("tools/cards_table.py", {"tests/tools/test_cards_table.py"}, {"tests/kv/test_fp8_kv.py"}),
        ("docs/coming-from.md", {"tests/test_coming_from.py"}, {"tests/kv/test_fp8_kv.py"}),
    ],
)
def test_a_change_reaches_the_tests_of_its_folder_and_of_who_imports_it(changed, reached, others):
    assert (ROOT / changed).exists()
    found = near.reached([changed])
    assert reached < set(found) and not others & set(found) and set(near.ALWAYS) <= set(found)


def test_the_nearest_come_first_and_what_all_start_from_reaches_all():
    found = near.reached(["nanoinfer/kv/admission.py"])
    assert found.index("tests/kv/test_admission.py") < found.index("tests/engine/test_structured.py")
    assert len(near.reached(["tests/conftest.py"])) == len([*(ROOT / "tests").rglob("test_*.py")])


def test_tests_that_start_the_command_are_reached_from_it(arrows):
    started = {name for name, others in arrows.items() if "nanoinfer/commands/main.py" in others}
    assert "tests/commands/test_generate.py" in started


def test_what_is_not_committed_counts_and_new_files_too(monkeypatch):
    printed = {"diff": "nanoinfer/config.py\n", "ls-files": "tests/kv/test_new.py\n"}
    run = subprocess.run

    def instead(command, **options):
        assert command[1] != "diff" or command[-1] == "main"
        return run(["printf", printed[command[1]]], **options)

    monkeypatch.setattr(near.subprocess, "run", instead)
    assert near.changed("main") == {"nanoinfer/config.py", "tests/kv/test_new.py"}


def test_parts_have_each_case_once():
    items = [object() for _ in range(11)]
    parts = [part_of(items, f"{number}/4")[0] for number in (1, 2, 3, 4)]
    assert sorted(map(id, sum(parts, []))) == sorted(map(id, items)) and max(map(len, parts)) == 3
    for wrong in ("0/4", "5/4"):
        with pytest.raises(pytest.UsageError, match="give the number of a part"):
            part_of(items, wrong)
