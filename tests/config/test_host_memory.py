"""What a process may still take, by the files of real layouts: no container, control groups of version 1 and of version
2."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_semkv.config.host_memory import available_memory, total_memory
from worker_connector.errors import Refused
from worker_connector.memory.slab import slots_for

GIB = 2**30
V1_UNLIMITED = 9223372036854771712
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_OTHER = "32 31 0:29 {root} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
V2_MOUNT = "30 25 0:26 {root} /sys/fs/cgroup ro,nosuid,relatime - cgroup2 cgroup rw,nsdelegate"


class Machine:
    """A root folder with /proc and /sys/fs/cgroup in it."""

    def __init__(self, root: Path, free: int = 17 * GIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 32000000 kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n")

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def v1(self, path: str, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"9:name=systemd:{path}\n4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/")
        lines = (V1_OTHER.format(root=mounted), V1_MOUNT.format(root=mounted))
        self.write("proc/self/mountinfo", "\n".join(lines))

    def v2(self, path: str, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{path}")
        self.write("proc/self/mountinfo", V2_MOUNT.format(root=mounted))

    def v1_group(self, group: str, limit: int, usage: int, cache: int = 0, inherited: int = V1_UNLIMITED) -> None:
        at = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{at}/memory.limit_in_bytes", limit)
        self.write(f"{at}/memory.usage_in_bytes", usage)
        stat = f"cache 5\ntotal_inactive_file {cache // 2}\ntotal_active_file {cache - cache // 2}"
        self.write(f"{at}/memory.stat", f"{stat}\nhierarchical_memory_limit {inherited}")

    def v2_group(self, group: str, limit: object, usage: int, cache: int = 0, high: object = "max") -> None:
        at = f"sys/fs/cgroup/{group}"
        self.write(f"{at}/memory.max", limit)
        self.write(f"{at}/memory.high", high)
        self.write(f"{at}/memory.current", usage)
        stat = f"anon 7\nfile {cache}\nshmem 9\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}"
        self.write(f"{at}/memory.stat", stat)

    def size(self) -> int:
        found = available_memory(self.root)
        assert found is not None
        return found.size


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_slab_beyond_the_container_s_limit_is_refused_on_a_machine_with_more(machine: Machine) -> None:
    machine.v2("/")
    machine.v2_group(".", 2 * GIB, 300 * 2**20)
    with pytest.raises(
        Refused, match=r"8192 MiB are wanted and 1748 MiB are available: memory.max of /sys/fs/cgroup \(2147483648\)"
    ):
        slots_for(8 * GIB, 2**20, available_memory(machine.root))
    assert slots_for(GIB, 2**20, available_memory(machine.root)) == 1024


def test_without_control_groups_the_machine_decides(machine: Machine) -> None:
    assert machine.size() == 17 * GIB
    assert total_memory(machine.root) == (32000000 * 1024, "MemTotal of /proc/meminfo")
    assert available_memory(machine.root / "nowhere") is None


@pytest.mark.parametrize("path", ["/", "/kubepods/burstable/pod1/abc"])
def test_version_2_inside_a_container_and_as_the_host_sees_it(machine: Machine, path: str) -> None:
    machine.v2(path)
    machine.v2_group(path.lstrip("/") or ".", 4 * GIB, 1 * GIB)
    assert machine.size() == 3 * GIB


def test_version_2_page_cache_is_given_back_and_not_counted(machine: Machine) -> None:
    machine.v2("/")
    machine.v2_group(".", 4 * GIB, 4 * GIB - 1, cache=3 * GIB)
    assert machine.size() == 3 * GIB + 1


def test_version_2_limits_of_groups_above_count(machine: Machine) -> None:
    machine.v2("/pod/container")
    machine.v2_group("pod/container", "max", 1 * GIB)
    machine.v2_group("pod", 6 * GIB, 4 * GIB)
    found = available_memory(machine.root)
    assert found == (2 * GIB, f"memory.max of /sys/fs/cgroup/pod ({6 * GIB})")
    assert total_memory(machine.root) == (6 * GIB, "memory.max of /sys/fs/cgroup/pod")


def test_version_2_beyond_memory_high_a_process_stands_still(machine: Machine) -> None:
    machine.v2("/")
    machine.v2_group(".", 4 * GIB, 1 * GIB, high=3 * GIB)
    assert machine.size() == 2 * GIB


@pytest.mark.parametrize(
    ("path", "mounted", "group"),
    [
        ("/docker/abc", "/docker/abc", "."),
        ("/docker/abc", "/", "docker/abc"),
        ("/", "/docker/abc", "."),
        ("/../other", "/", "."),
    ],
)
def test_version_1_wherever_the_group_is_mounted(machine: Machine, path: str, mounted: str, group: str) -> None:
    machine.v1(path, mounted)
    machine.v1_group(group, 4 * GIB, 3 * GIB, cache=2 * GIB)
    assert machine.size() == 3 * GIB


def test_version_1_limits_of_groups_that_the_container_does_not_see_count(machine: Machine) -> None:
    machine.v1("/docker/abc", "/docker/abc")
    machine.v1_group(".", V1_UNLIMITED, 1 * GIB, inherited=5 * GIB)
    assert machine.size() == 4 * GIB


def test_no_limit_in_either_version(machine: Machine) -> None:
    machine.v1("/docker/abc", "/docker/abc")
    machine.v1_group(".", V1_UNLIMITED, 1 * GIB)
    assert machine.size() == 17 * GIB
    machine.v2("/")
    machine.v2_group(".", "max", 1 * GIB)
    assert machine.size() == 17 * GIB


def test_a_container_at_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.v2("/")
    machine.v2_group(".", 1 * GIB, 2 * GIB)
    assert machine.size() == 0


def test_this_machine_says_something() -> None:
    found = available_memory()
    assert found is not None
    assert 1024 * 1024 < found.size < 1 << 50
