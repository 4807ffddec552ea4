"""KV blocks as files, kept over restarts. Whatever is doubtful is a miss and is removed; it is never wrong data.

    disk_kv_path/
        .streamkv.lock                  held by the one engine that uses this folder
        streamkv-<fingerprint>/         one for each model, by what makes its KV values: 64 hexadecimal digits
            <digest>.kv                 one for each block: 64 hexadecimal digits
            <digest>.part               being written

    a block's file, numbers little-endian:
        magic 8 | version 4 | depth 4 | token bytes 4 | payload bytes 8 | fingerprint 32 | digest 32 | parent digest 32
        tokens, filled up with zeros to a whole block | SHA-256 of all before
        payload | SHA-256 of the checksum before and the payload

A file appears under its name when it is complete. It is not forced to the disk: what a crash of the machine leaves half
written fails its checksums. The time of its last change is when it was last written or read; that a copy of it further
up was used does not show.

Nothing but files and folders with such names is ever removed. Folders of other models keep at most half of the size,
the last used first; the rest of them goes, a folder at a time.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.executor import ReportProgress
from engine.transfer import StoredBlock, block_digest
from streamkv.errors import ConfigError
from streamkv.log import fields

_MAGIC: Final = b"StreamKV"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIIQ32s32s32s")
_CHECKSUM_BYTES: Final = 32
_TOKEN_BYTES: Final = 4

_LOCK_NAME: Final = ".streamkv.lock"
_FOLDER_PATTERN: Final = re.compile(r"streamkv-[0-9a-f]{64}")
_BLOCK_PATTERN: Final = re.compile(r"[0-9a-f]{64}\.kv")
_PART_PATTERN: Final = re.compile(r"[0-9a-f]{64}\.part")

_OPEN: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""For any file here: a link is not followed, a pipe does not block."""
_LOCK_POLL_S: Final = 0.1
_LOCK_WAIT_S: Final = 45.0
"""Longer than an engine that was asked to end takes by default to drain and to write its blocks to disk."""
_FREE_SHARE: Final = 0.9
"""Of what the file system has free, the most that blocks take."""
_OTHERS_SHARE: Final = 0.5
"""Of the size, what folders of other models may keep."""
_REPORT_EVERY: Final = 256
_STAGE: Final = "reading KV blocks on disk"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Found:
    """A file whose header is in order."""

    stored: StoredBlock
    used_ns: int
    """When it was last written or read."""


class DiskStore:
    """The blocks of one engine on disk. One thread at a time.

    Made early, since it is here that a wrong setting shows; usable from `open` on.
    """

    def __init__(self, path: str, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        """Make the folder if need be and claim it; wait so long for an engine that is about to end.

        Raises ConfigError: it cannot be made, written or locked, or another engine has it.
        """
        self.path = Path(path)
        self._root = -1
        self._lock = -1
        self._folder = -1
        self._fingerprint = b""
        self._block_size = 0
        self._payload_bytes = 0
        self._num_faults: dict[str, int] = {}
        try:
            self.path = self.path.expanduser().absolute()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root = os.open(self.path, os.O_DIRECTORY | os.O_CLOEXEC)
            flags = os.O_RDWR | os.O_CREAT | _OPEN
            self._lock = os.open(_LOCK_NAME, flags, 0o600, dir_fd=self._root)
            self._acquire(lock_wait_s)
        except ConfigError:
            self.close()
            raise
        except (OSError, ValueError, RuntimeError) as error:  # NUL in the path; no such user behind ~
            self.close()
            raise self._unusable(error) from error

    def _acquire(self, wait_s: float) -> None:
        """The kernel lets go of the lock when the process ends, however it ends."""
        until_s = time.monotonic() + wait_s
        is_told = False
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
                    raise ConfigError(
                        "disk_kv_path",
                        f"{self.path} is in use by another engine (process {owner or 'unknown'}); "
                        "give each engine a folder of its own",
                    ) from None
            if not is_told:
                logger.info("waiting for the engine that uses this folder", extra=fields(path=str(self.path)))
                is_told = True
            time.sleep(_LOCK_POLL_S)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _unusable(self, error: Exception) -> ConfigError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "it, or something above it, is not a folder"
        return ConfigError("disk_kv_path", f"{self.path} cannot be used: {reason}; give a folder that can be written")

    # at the start

    def open(
        self, fingerprint: bytes, block_size: int, payload_bytes: int, size_bytes: int, report: ReportProgress
    ) -> tuple[int, list[StoredBlock]]:
        """→ (how many blocks may be stored, those that are, as DeviceLimits.stored has them).

        fingerprint: 32 bytes. payload_bytes: of one block. size_bytes: the most that everything here may take.
        Reads headers only, and removes what is damaged, foreign, left over, without its parent, or too much.
        Raises ConfigError: the folder cannot be used, or not one block fits.
        """
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._payload_bytes = payload_bytes
        try:
            return self._open(f"streamkv-{fingerprint.hex()}", size_bytes, report)
        except OSError as error:
            raise self._unusable(error) from error

    def _open(self, name: str, size_bytes: int, report: ReportProgress) -> tuple[int, list[StoredBlock]]:
        report(_STAGE, 0.0)
        self._open_folder(name)
        found = self._scan(report)
        # A file takes whole units of the file system.
        unit = max(os.fstatvfs(self._folder).f_frsize, 1)
        file_bytes = -(-self._file_bytes // unit) * unit
        size_bytes -= self._keep_others(name, int(min(size_bytes * _OTHERS_SHARE, size_bytes - file_bytes)))
        if size_bytes < file_bytes:
            raise ConfigError(
                "disk_kv_size_gib", f"{size_bytes / 2**30:.3g} GiB hold no block: one takes {file_bytes / 2**30:.3g}"
            )
        whole = _with_parents(found, self._block_size)
        num_blocks = self._num_blocks(size_bytes, file_bytes, len(whole))
        kept = _most_recent(whole, num_blocks)
        for digest in found.keys() - {each.stored.digest for each in kept}:
            self._remove(_block_name(digest))
        report(_STAGE, 100.0)
        return num_blocks, _parents_first(kept)

    def _num_blocks(self, size_bytes: int, file_bytes: int, num_found: int) -> int:
        """What the size holds, or the free space if that is less; what lies here already has its space."""
        wanted = size_bytes // file_bytes
        statistics = os.fstatvfs(self._folder)
        free_bytes = statistics.f_bavail * statistics.f_frsize
        fitting = num_found + int(free_bytes * _FREE_SHARE) // file_bytes
        if fitting >= wanted:
            return wanted
        if not fitting:
            raise ConfigError(
                "disk_kv_path",
                f"the file system of {self.path} has {free_bytes / 2**30:.3g} GiB free, which hold no block; "
                f"one takes {file_bytes / 2**30:.3g}",
            )
        logger.warning(
            "less disk for KV blocks than asked for: the file system has no more",
            extra=fields(asked_gib=size_bytes / 2**30, taken_gib=fitting * file_bytes / 2**30, path=str(self.path)),
        )
        return fitting

    def _open_folder(self, name: str) -> None:
        """Make or open the folder of this model. It must be ours alone: whoever can write here says what the model
        has read."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._root)
        self._folder = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
        if os.fstat(self._folder).st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{name} in it belongs to another user")
        os.fchmod(self._folder, 0o700)
        # Whether it can be written shows here and not with the first block.
        probe = "0" * 64 + ".part"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | _OPEN, 0o600, dir_fd=self._folder))
        os.unlink(probe, dir_fd=self._folder)

    def _scan(self, report: ReportProgress) -> dict[bytes, _Found]:
        """The files whose header is in order, by digest. Others with our names are removed."""
        names = os.listdir(self._folder)
        found: dict[bytes, _Found] = {}
        for i, name in enumerate(names):
            if i % _REPORT_EVERY == 0:
                report(_STAGE, 100.0 * i / len(names))
            if _BLOCK_PATTERN.fullmatch(name):
                each = self._read_header(name)
                if each is None:
                    self._remove(name)
                else:
                    found[each.stored.digest] = each
            elif _PART_PATTERN.fullmatch(name):
                self._remove(name)
        return found

    def _read_header(self, name: str) -> _Found | None:
        """None for a file that is not whole and ours."""
        try:
            file = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self._folder)
            try:
                facts = os.fstat(file)
                data = os.pread(file, self._header_bytes, 0)
            finally:
                os.close(file)
        except OSError:
            return None
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != self._file_bytes or len(data) != self._header_bytes:
            return None
        _, _, depth, num_token_bytes, _, _, digest, parent_digest = _HEADER.unpack_from(data)
        stored = StoredBlock(digest, parent_digest, depth, data[_HEADER.size : _HEADER.size + num_token_bytes])
        is_ours = (
            0 < num_token_bytes <= self._block_size * _TOKEN_BYTES
            and num_token_bytes % _TOKEN_BYTES == 0
            and depth > 0
            and self._header(stored) == data
            and block_digest(parent_digest, stored.tokens) == digest
            and _block_name(digest) == name
        )
        return _Found(stored, facts.st_mtime_ns) if is_ours else None

    def _keep_others(self, own_name: str, limit_bytes: int) -> int:
        """Let other models' folders keep so much, and remove the rest of them → bytes that they take."""
        others: list[tuple[int, int, str]] = []
        for name in os.listdir(self._root):
            if name == own_name or not _FOLDER_PATTERN.fullmatch(name):
                continue
            try:
                used_ns, num_bytes = self._measure(name)
            except OSError:  # no folder, or not ours to read
                continue
            others.append((used_ns, num_bytes, name))
        kept_bytes = 0
        for _, num_bytes, name in sorted(others, reverse=True):
            if num_bytes and kept_bytes + num_bytes <= limit_bytes:
                kept_bytes += num_bytes
                continue
            limit_bytes = kept_bytes  # whatever was used before it goes, too
            logger.info(
                "KV blocks of another model are removed from disk", extra=fields(folder=name, num_bytes=num_bytes)
            )
            self._remove_folder(name)
        return kept_bytes

    def _measure(self, name: str) -> tuple[int, int]:
        """(last use, bytes on disk) of another model's blocks."""
        folder = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
        try:
            used_ns, num_bytes = 0, 0
            for entry in os.listdir(folder):
                if _BLOCK_PATTERN.fullmatch(entry) or _PART_PATTERN.fullmatch(entry):
                    facts = os.stat(entry, dir_fd=folder, follow_symlinks=False)
                    used_ns = max(used_ns, facts.st_mtime_ns)
                    num_bytes += facts.st_blocks * 512
            return used_ns, num_bytes
        finally:
            os.close(folder)

    def _remove_folder(self, name: str) -> None:
        with contextlib.suppress(OSError):
            folder = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
            try:
                for entry in os.listdir(folder):
                    if _BLOCK_PATTERN.fullmatch(entry) or _PART_PATTERN.fullmatch(entry):
                        os.unlink(entry, dir_fd=folder)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=self._root)  # stays if a file that is not ours is in it

    # from then on

    def write(self, stored: StoredBlock, payload: memoryview) -> bool:
        """Store a block → whether that went well. payload: payload_bytes, in one piece."""
        name = _block_name(stored.digest)
        part = f"{stored.digest.hex()}.part"
        header = self._header(stored)
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN, 0o600, dir_fd=self._folder)
            try:
                _write_all(file, [header, payload, _payload_checksum(header, payload)])
            finally:
                os.close(file)
            os.rename(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            self._remove(part)
            self._complain("a KV block could not be written to disk", str(error))
            return False
        return True

    def read(self, stored: StoredBlock, target: memoryview) -> bool:
        """Read a block's payload into `target` → whether it is whole. If not it is removed, and `target` holds
        nothing of use."""
        name = _block_name(stored.digest)
        wanted = self._header(stored)
        header, checksum = bytearray(self._header_bytes), bytearray(_CHECKSUM_BYTES)
        reason = ""
        try:
            file = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self._folder)
            try:
                facts = os.fstat(file)
                if not stat.S_ISREG(facts.st_mode) or facts.st_size != self._file_bytes:
                    reason = f"its size is {facts.st_size} and not {self._file_bytes}"
                else:
                    _read_all(file, [header, target, checksum])
                    with contextlib.suppress(OSError):  # a disk that has become read-only still gives its blocks
                        os.utime(file)
            finally:
                os.close(file)
        except OSError as error:
            reason = str(error)
        if not reason and header != wanted:
            reason = "its header is not as it was written"
        if not reason and checksum != _payload_checksum(wanted, target):
            reason = "its data is not as it was written"
        if not reason:
            return True
        self._remove(name)
        self._complain("a KV block on disk is lost and will be computed again", reason)
        return False

    def drop(self, stored: StoredBlock) -> bool:
        """Remove a block → whether it is gone."""
        return self._remove(_block_name(stored.digest))

    def close(self) -> None:
        """Let another engine have the folder. Idempotent."""
        for file in (self._folder, self._lock, self._root):
            if file >= 0:
                os.close(file)
        self._folder = self._lock = self._root = -1

    # files

    @property
    def _header_bytes(self) -> int:
        return _HEADER.size + self._block_size * _TOKEN_BYTES + _CHECKSUM_BYTES

    @property
    def _file_bytes(self) -> int:
        return self._header_bytes + self._payload_bytes + _CHECKSUM_BYTES

    def _header(self, stored: StoredBlock) -> bytes:
        facts = _HEADER.pack(
            _MAGIC,
            _VERSION,
            stored.depth,
            len(stored.tokens),
            self._payload_bytes,
            self._fingerprint,
            stored.digest,
            stored.parent_digest,
        )
        data = facts + stored.tokens.ljust(self._block_size * _TOKEN_BYTES, b"\0")
        return data + hashlib.sha256(data).digest()

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._complain("a file in the folder for KV blocks cannot be removed", str(error))
            return False
        return True

    def _complain(self, event: str, reason: str) -> None:
        """A full or broken disk fails thousands of times a minute: only the 1st, 2nd, 4th, 8th … fault is logged."""
        count = self._num_faults[event] = self._num_faults.get(event, 0) + 1
        if count & (count - 1) == 0:
            logger.warning(event, extra=fields(reason=reason, path=str(self.path), count=count))


def _block_name(digest: bytes) -> str:
    return f"{digest.hex()}.kv"


def _payload_checksum(header: bytes, payload: memoryview) -> bytes:
    digest = hashlib.sha256(header[-_CHECKSUM_BYTES:])
    digest.update(payload)
    return digest.digest()


def _write_all(file: int, pieces: list[bytes | memoryview]) -> None:
    """Raises OSError, of a full disk too."""
    left = [memoryview(piece) for piece in pieces]
    while left:
        num_bytes = os.writev(file, left)
        while left and num_bytes >= len(left[0]):
            num_bytes -= len(left.pop(0))
        if left:
            left[0] = left[0][num_bytes:]


def _read_all(file: int, targets: list[bytearray | memoryview]) -> None:
    """Fill the targets from the file's beginning. Raises OSError, for an early end too."""
    left = [memoryview(target) for target in targets]
    while left:
        num_bytes = os.readv(file, left)
        if not num_bytes:
            raise OSError(errno.EIO, "the file ends early")
        while left and num_bytes >= len(left[0]):
            num_bytes -= len(left.pop(0))
        if left:
            left[0] = left[0][num_bytes:]


def _with_parents(found: dict[bytes, _Found], block_size: int) -> dict[bytes, _Found]:
    """Those whose parents are all there, parents before what stands on them. A parent is a whole block."""
    kept: dict[bytes, _Found] = {}
    for each in sorted(found.values(), key=lambda each: each.stored.depth):
        stored = each.stored
        parent = kept.get(stored.parent_digest)
        if stored.depth == 1 or (
            parent is not None
            and parent.stored.depth == stored.depth - 1
            and len(parent.stored.tokens) == block_size * _TOKEN_BYTES
        ):
            kept[stored.digest] = each
    return kept


def _most_recent(found: dict[bytes, _Found], num_blocks: int) -> list[_Found]:
    """So many of those with all their parents, the last used, again with all their parents.

    Who uses a block uses its parents: these count as used no earlier, and of equals the parent comes first.
    """
    for each in reversed(found.values()):
        parent = found.get(each.stored.parent_digest)
        if parent is not None:
            parent.used_ns = max(parent.used_ns, each.used_ns)
    return sorted(found.values(), key=lambda each: (-each.used_ns, each.stored.depth))[:num_blocks]


def _parents_first(kept: list[_Found]) -> list[StoredBlock]:
    """By last use, oldest first, but each behind its parent."""
    by_digest = {each.stored.digest: each.stored for each in kept}
    ordered: dict[bytes, StoredBlock] = {}
    for each in sorted(kept, key=lambda each: (each.used_ns, each.stored.depth)):
        path: list[StoredBlock] = []
        stored: StoredBlock | None = each.stored
        while stored is not None and stored.digest not in ordered:
            path.append(stored)
            stored = by_digest.get(stored.parent_digest)
        ordered.update((stored.digest, stored) for stored in reversed(path))
    return list(ordered.values())
