"""What this process may still take, from files as kernels write them."""

from pathlib import Path

import pytest

from engine.memory import available_memory_bytes

HOST = {"proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:   900 kB\nBuffers: 5 kB\n"}
V1_UNLIMITED = "9223372036854771712\n"


def group(path: str, limit: str, used: int, cache: int | None = None) -> dict[str, str]:
    files = {f"sys/fs/cgroup/{path}memory.max": f"{limit}\n", f"sys/fs/cgroup/{path}memory.current": f"{used}\n"}
    if cache is not None:
        files[f"sys/fs/cgroup/{path}memory.stat"] = f"anon 7\nactive_file 99\ninactive_file {cache}\n"
    return files


def group_v1(path: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory/{path}memory"
    return {
        f"{base}.limit_in_bytes": f"{limit}\n",
        f"{base}.usage_in_bytes": f"{used}\n",
        f"{base}.stat": f"inactive_file 3\ntotal_inactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param({}, None, id="nothing tells"),
        pytest.param(HOST, 900 * 1024, id="the machine alone"),
        pytest.param({**HOST, **group("", "max", 500)}, 900 * 1024, id="a group without a limit"),
        pytest.param({**HOST, **group("", "5000", 2000)}, 3000, id="a group with a limit"),
        pytest.param({**HOST, **group("", "5000", 2000, cache=600)}, 3600, id="page cache can be had back"),
        pytest.param({**HOST, **group("", "5000", 6000)}, 0, id="over its limit"),
        pytest.param({**HOST, **group("", "5000000", 0)}, 900 * 1024, id="the machine has less than the limit"),
        pytest.param(
            {
                **HOST,
                "proc/self/cgroup": "0::/a.slice/b:c.service\n",
                **group("a.slice/", "7000", 3000),
                **group("a.slice/b:c.service/", "max", 2000),
            },
            4000,
            id="the limit of a group above",
        ),
        pytest.param(
            {**HOST, "proc/self/cgroup": "0::/not/seen/from/here\n", **group("", "5000", 1000)},
            4000,
            id="the container's group is the mount",
        ),
        pytest.param({**HOST, **group_v1("", "5000", 2000, cache=50)}, 3050, id="version 1"),
        pytest.param({**HOST, **group_v1("", V1_UNLIMITED, 2000)}, 900 * 1024, id="version 1 without a limit"),
        pytest.param(
            {
                **HOST,
                "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/box/one\n0::/\n",
                **group_v1("", V1_UNLIMITED, 9000),
                **group_v1("box/one/", "4000", 1500),
            },
            2500,
            id="version 1, the process's own group",
        ),
    ],
)
def test_the_least_of_the_limits_counts(tmp_path: Path, files: dict[str, str], available: int | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory_bytes(tmp_path) == available


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_machine_has_some() -> None:
    available = available_memory_bytes()
    assert available is not None and available > 0
