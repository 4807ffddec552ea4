"""How much memory this process may still take: what the machine has, and what its control groups leave it."""

from collections.abc import Iterator
from pathlib import Path

_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
"""Names of the limit, of what is used, and of the reclaimable page cache in memory.stat."""


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the machine could give without swapping and what each control group above this process has
    left; None where nothing tells. `root` is where proc/ and sys/ lie."""
    limits = [*_machine_bytes(root / "proc/meminfo"), *_group_bytes(root)]
    return max(0, min(limits)) if limits else None


def _machine_bytes(meminfo: Path) -> Iterator[int]:
    for line in _lines(meminfo):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _group_bytes(root: Path) -> Iterator[int]:
    """What is left under the limit of this process's group and of every group above it, in both versions' layouts.

    In a container the path of the group may be the host's, which is not there; the container's own group is then the
    mount itself.
    """
    mount = root / "sys/fs/cgroup"
    paths = {"": Path("/"), "memory": Path("/")}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group_path = line.split(":", 2)
        paths.update({name: Path(group_path) for name in controllers.split(",") if name in paths})
    for base, path, names in ((mount, paths[""], _V2_FILES), (mount / "memory", paths["memory"], _V1_FILES)):
        for group in (path, *path.parents):
            yield from _left_bytes(base / group.relative_to("/"), *names)


def _left_bytes(group: Path, limit_name: str, used_name: str, cache_name: str) -> Iterator[int]:
    """One number, or none for a group without a limit. Page cache that the kernel would drop first counts as free."""
    try:
        left = int((group / limit_name).read_text()) - int((group / used_name).read_text())
    except (OSError, ValueError):  # no such files, or a limit that reads `max`
        return
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == cache_name:
            left += int(value)
    yield left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
