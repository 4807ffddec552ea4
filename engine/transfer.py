"""KV blocks on their way between device, host memory and disk: what KV memory asks for, and what comes back."""

import hashlib
from enum import IntEnum
from typing import Final

import msgspec

DIGEST_BYTES: Final = 32


def block_digest(parent_digest: bytes, tokens: bytes) -> bytes:
    """The name of the block with these packed tokens behind the block, or the namespace, with that digest: who knows
    it knows every token from the root on. BLAKE2b of 256 bits; parent_digest has a fixed length, so nothing is
    ambiguous."""
    return hashlib.blake2b(parent_digest + tokens, digest_size=DIGEST_BYTES).digest()


class TransferKind(IntEnum):
    DEVICE_TO_HOST = 1
    HOST_TO_DEVICE = 2
    HOST_TO_DISK = 3
    DISK_TO_HOST = 4
    DROP_FROM_DISK = 5


class StoredBlock(msgspec.Struct, frozen=True, gc=False):
    """A block on disk: all that is needed to find its place in the prefix tree again after a restart."""

    digest: bytes
    """32 bytes: of the parent's digest and this block's tokens. Names the block on disk; a look-up compares tokens."""
    parent_digest: bytes
    """Of a block without a parent: that of its namespace."""
    depth: int
    """Blocks from the root to here, this one included; at least 1."""
    tokens: bytes
    """Packed (protocol.pack_ids): block_size of them, or fewer in a leaf."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """Copies of whole blocks in one direction. It begins when every step launched before it is done; later steps do
    not wait for it. Nobody writes its sources or touches its destinations until it is reported finished.

    Copies between device and host are done in the order in which they were started; so are those on the disk.
    """

    transfer_id: int
    """Unique in this engine's life."""
    kind: TransferKind
    block_ids: list[int] = []
    """On the device; for the two kinds that touch it."""
    host_ids: list[int] = []
    """In host memory, 1 .. num_host_blocks; for all kinds but DROP_FROM_DISK. Beside block_ids or stored."""
    stored: list[StoredBlock] = []
    """On disk; for the three kinds that touch it."""


class TransferResult(msgspec.Struct, frozen=True, gc=False):
    """A finished transfer."""

    transfer_id: int
    failed: list[int] = []
    """Indices into its lists that did not arrive: what was to be read is damaged, foreign or gone, and has been
    removed; or what was to be written found no room. Only the disk fails; the others arrive or end the engine."""
    elapsed_s: float = 0.0
    """Time that the copies took, without waiting for steps."""
    num_bytes: int = 0
    """Moved."""
