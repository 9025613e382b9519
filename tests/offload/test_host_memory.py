"""Host memory that can still be taken, on made-up machines: a directory that holds /proc and /sys."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from offload.memory import host_memory
from offload.memory.host_memory import memory_available_bytes
from offload.memory.pinned import PAGE_BYTES, HostArena

MACHINE = 10**6
UNLIMITED_V1 = 9223372036854771712
V2_MOUNT = "30 23 0:26 {root} {point} rw,nosuid,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {root} {point} rw,relatime master:11 - cgroup cgroup rw,memory"
OTHER_MOUNTS = [
    "22 1 254:1 / / rw,relatime - ext4 /dev/root rw",
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu",
]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """The kernel reports 1,000,000 bytes as available."""
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))


class Machine:
    """A made-up /proc and /sys below `root`."""

    def __init__(self, root: Path, groups: list[str], mounts: list[str]) -> None:
        self.root = root
        self._write("proc/self/cgroup", "".join(f"{group}\n" for group in groups))
        self._write("proc/self/mountinfo", "".join(f"{mount}\n" for mount in OTHER_MOUNTS + mounts))

    def v2(self, directory: str, limit: int | str, used: int, high: int | str = "max", **stat: int) -> None:
        self._group(f"sys/fs/cgroup/{directory}", "memory.max", limit, "memory.current", used, stat)
        self._write(f"sys/fs/cgroup/{directory}/memory.high", f"{high}\n")

    def v1(self, directory: str, limit: int, used: int, **stat: int) -> None:
        names = "memory.limit_in_bytes", limit, "memory.usage_in_bytes", used
        # Those of the group alone, without "total", leave the groups below it out.
        self._group(f"sys/fs/cgroup/memory/{directory}", *names, {"inactive_file": 7, "active_file": 9, **stat})

    def available(self) -> int:
        return memory_available_bytes(self.root)

    def _group(self, directory: str, limit_name: str, limit: int | str, used_name: str, used: int, stat: dict) -> None:
        self._write(f"{directory}/{limit_name}", f"{limit}\n")
        self._write(f"{directory}/{used_name}", f"{used}\n")
        self._write(f"{directory}/memory.stat", "".join(f"{name} {value}\n" for name, value in stat.items()))

    def _write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


def in_container(tmp_path) -> Machine:
    """Version 2 within a namespace: the process sees its own group as the topmost one."""
    return Machine(tmp_path, ["0::/"], [V2_MOUNT.format(root="/", point="/sys/fs/cgroup")])


def on_host(tmp_path, group: str) -> Machine:
    """Version 2 without one."""
    return Machine(tmp_path, [f"0::{group}"], [V2_MOUNT.format(root="/", point="/sys/fs/cgroup")])


def with_v1(tmp_path, group: str, root: str = "/") -> Machine:
    groups = ["8:pids:/elsewhere", f"4:hugetlb,memory:{group}", "1:cpu:/elsewhere", "0::/"]
    return Machine(tmp_path, groups, [V1_MOUNT.format(root=root, point="/sys/fs/cgroup/memory")])


def test_without_groups_it_is_what_the_kernel_reports(tmp_path):
    assert memory_available_bytes(tmp_path) == MACHINE
    assert in_container(tmp_path).available() == MACHINE, "no limit is set"


def test_a_limit_leaves_what_is_not_used(tmp_path):
    machine = in_container(tmp_path)
    machine.v2("", limit=50_000, used=20_000)
    assert machine.available() == 30_000
    machine.v2("", limit="max", used=20_000)
    assert machine.available() == MACHINE
    machine.v2("", limit=2 * MACHINE, used=20_000)
    assert machine.available() == MACHINE, "the machine has less"
    machine.v2("", limit=50_000, used=51_000)
    assert machine.available() == 0
    machine.v2("", limit=50_000, used=20_000, high=45_000)
    assert machine.available() == 25_000, "beyond it the process would be made to wait"


def test_files_in_the_page_cache_count_as_free_but_those_that_must_be_written_first(tmp_path):
    machine = in_container(tmp_path)
    files = dict(inactive_file=9_000, active_file=3_000, file_dirty=500, file_writeback=100)
    # tmpfs is a part of "file", and like anonymous and locked memory it cannot be given back
    others = dict(anon=4_000, file=14_000, shmem=2_000, inactive_anon=6_000, unevictable=1_000, file_mapped=8_000)
    machine.v2("", limit=50_000, used=20_000, **files, **others)
    assert machine.available() == 30_000 + 12_000 - 600
    machine.v2("", limit=50_000, used=20_000, inactive_file=100, file_dirty=300)
    assert machine.available() == 30_000
    machine.v2("", limit=50_000, used=2_000, inactive_file=2_100)
    assert machine.available() == 50_000, "a page that was read in between is not two"


def test_the_files_of_version_1_count_the_groups_below_too(tmp_path):
    machine = with_v1(tmp_path, "/")
    files = dict(total_inactive_file=9_000, total_active_file=3_000, total_dirty=500, total_writeback=100)
    machine.v1("", limit=50_000, used=20_000, total_cache=14_000, total_shmem=2_000, **files)
    assert machine.available() == 30_000 + 12_000 - 600
    machine.v1("", limit=UNLIMITED_V1, used=20_000, **files)
    assert machine.available() == MACHINE


@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_above_the_process_counts(tmp_path, version, tightest):
    machine = on_host(tmp_path, "/a/b/c") if version == 2 else with_v1(tmp_path, "/a/b/c")
    write = machine.v2 if version == 2 else machine.v1
    for group in ("a", "a/b", "a/b/c"):
        write(group, limit=40_000 if group == tightest else 90_000, used=30_000)
    for group in ("a/other", "a/b/other", "other"):
        write(group, limit=40_000, used=39_000)
    assert machine.available() == 10_000


def test_groups_without_the_files_are_passed_over(tmp_path):
    """The topmost group has none, and those in which memory is not counted have none either."""
    machine = on_host(tmp_path, "/a/b/c")
    machine.v2("a", limit=40_000, used=10_000)
    (tmp_path / "sys/fs/cgroup/a/b/c").mkdir(parents=True)
    assert machine.available() == 30_000
    (tmp_path / "sys/fs/cgroup/a/memory.stat").unlink()
    assert machine.available() == 30_000


def test_a_container_without_a_namespace_finds_itself_where_its_group_is_mounted(tmp_path):
    """/proc names the group as the host sees it; of the host's tree the container has its own part alone."""
    for group, below in (("/docker/abc", ""), ("/docker/abc/job", "job")):
        machine = with_v1(tmp_path, group, root="/docker/abc")
        machine.v1("", limit=90_000, used=10_000)
        machine.v1(below, limit=40_000, used=10_000)
        assert machine.available() == 30_000


@pytest.mark.parametrize("group", ["/../outside", "/not/mounted"])
def test_a_process_outside_of_what_it_sees_gets_what_is_mounted(tmp_path, group):
    machine = with_v1(tmp_path, group, root="/docker/abc")
    machine.v1("", limit=40_000, used=10_000)
    assert machine.available() == 30_000


def test_what_lies_beside_the_mount_point_is_no_group(tmp_path):
    machine = on_host(tmp_path, "/../outside")
    machine.v2("", limit=40_000, used=10_000)
    machine.v2("../outside", limit=40_000, used=39_000)
    assert machine.available() == 30_000


def test_another_groups_mount_does_not_count_beside_the_own(tmp_path):
    machine = Machine(
        tmp_path,
        ["0::/a"],
        [V2_MOUNT.format(root="/", point="/sys/fs/cgroup"), V2_MOUNT.format(root="/other", point=r"/mnt/an\040other")],
    )
    machine.v2("a", limit=40_000, used=10_000)
    machine.v2("../../../mnt/an other", limit=40_000, used=39_000)
    assert machine.available() == 30_000
    machine._write("proc/self/cgroup", "0::/other/b\n")
    machine.v2("../../../mnt/an other/b", limit=40_000, used=38_000)
    assert machine.available() == 1_000, "where it is mounted, with a space in its name"


def test_both_versions_count_where_a_machine_has_both(tmp_path):
    v1 = V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory")
    v2 = V2_MOUNT.format(root="/", point="/sys/fs/cgroup")
    machine = Machine(tmp_path, ["4:memory:/a", "0::/b"], [v1, v2])
    machine.v1("a", limit=40_000, used=10_000)
    assert machine.available() == 30_000
    machine.v2("b", limit=20_000, used=15_000)
    assert machine.available() == 5_000
    machine.v1("a", limit=40_000, used=39_000)
    assert machine.available() == 1_000


def test_an_arena_is_not_refused_for_what_was_read_through_the_page_cache(tmp_path, monkeypatch):
    machine = in_container(tmp_path)
    monkeypatch.setattr("offload.memory.pinned.memory_available_bytes", machine.available)
    machine.v2("", limit=10 * PAGE_BYTES, used=9 * PAGE_BYTES, inactive_file=6 * PAGE_BYTES)
    HostArena(7, PAGE_BYTES, pinner=None).close()
    with pytest.raises(MemoryError, match="lower host_memory_limit"):
        HostArena(8, PAGE_BYTES, pinner=None)


def test_this_machine_says_a_sensible_number(monkeypatch):
    monkeypatch.undo()
    assert 0 < memory_available_bytes() < 2**50
