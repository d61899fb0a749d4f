"""Damaged frames: what storage, transport and wrong writers do to bytes, drawn by a seeded generator.

Knows the layout from FORMAT.md only. Damage under the old checksum stands for storage; a wrong writer's comes with a
checksum that fits, and then only the checks behind it can find it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitstream.sample_frames import resealed

HEADER_BYTES, ENTRY_BYTES, CHECKSUM_BYTES = 44, 12, 8
ROW = struct.Struct("<BBBBII")
CODER, RAW_BYTES, STORED_BYTES = 1, 4, 5
SIZES = (0, 1, 2, 3, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)


@dataclass
class Parts:
    """A frame taken apart; `build` puts it together again, whole or not."""

    header: bytearray
    table: list[list[int]]
    stored: list[bytes]

    @classmethod
    def of(cls, frame: bytes) -> Parts:
        start = HEADER_BYTES + ENTRY_BYTES * frame[6]
        table = [list(row) for row in ROW.iter_unpack(frame[HEADER_BYTES:start])]
        stored = []
        for row in table:
            stored.append(frame[start : start + row[STORED_BYTES]])
            start += row[STORED_BYTES]
        return cls(bytearray(frame[:HEADER_BYTES]), table, stored)

    def build(self) -> bytes:
        rows = [ROW.pack(*row) for row in self.table]
        return resealed(bytes(self.header) + b"".join([*rows, *self.stored, bytes(CHECKSUM_BYTES)]))


def flip_bits(rng: random.Random, frame: bytes) -> bytes:
    damaged = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        bit = rng.randrange(8 * len(damaged))
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def cut(rng: random.Random, frame: bytes) -> bytes:
    """At the end, at the start, or inside."""
    first, end = sorted((rng.randrange(len(frame)), rng.randrange(len(frame) + 1)))
    return rng.choice((frame[:first], frame[end:], frame[:first] + frame[end:]))


def repeat_part(rng: random.Random, frame: bytes) -> bytes:
    first, end = sorted((rng.randrange(len(frame)), rng.randrange(len(frame) + 1)))
    return frame[:end] + frame[first:]


def add_garbage(rng: random.Random, frame: bytes) -> bytes:
    garbage = rng.choice((b"\0", b"KVTC", frame[-8:], frame[:HEADER_BYTES], rng.randbytes(rng.randrange(1, 300))))
    return rng.choice((garbage + frame, frame + garbage))


def overwrite_field(rng: random.Random, frame: bytes) -> bytes:
    """One byte or one u32 of header or table with a number that breaks careless arithmetic."""
    damaged = bytearray(frame)
    end = HEADER_BYTES + ENTRY_BYTES * frame[6]
    if rng.random() < 0.5:
        damaged[rng.randrange(end)] = rng.choice((0, 1, 2, 3, 4, 5, 6, 127, 128, 254, 255))
        return bytes(damaged)
    at = 4 * rng.randrange(2, end // 4)
    before = int.from_bytes(damaged[at : at + 4], "little")
    number = rng.choice((*SIZES, before + 1, before - 1, before * 2)) % 2**32
    damaged[at : at + 4] = number.to_bytes(4, "little")
    return bytes(damaged)


def mix(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """The start of one frame and the end of another."""
    at = rng.randrange(1, min(len(frame), len(other)))
    return frame[:at] + other[at - rng.choice((0, 0, 1)) :]


def reorder_sections(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """Sections or rows swapped, doubled, lost, or taken from another frame; the sizes still add up."""
    parts, foreign = Parts.of(frame), Parts.of(other)
    first, second = rng.randrange(len(parts.table)), rng.randrange(len(parts.table))
    action = rng.randrange(5)
    if action == 0:
        parts.stored[first], parts.stored[second] = parts.stored[second], parts.stored[first]
        sizes = parts.table[first][STORED_BYTES], parts.table[second][STORED_BYTES]
        parts.table[second][STORED_BYTES], parts.table[first][STORED_BYTES] = sizes
    elif action == 1:
        parts.table[first], parts.table[second] = parts.table[second], parts.table[first]
    elif action == 2:
        parts.table.insert(second, list(parts.table[first]))
        parts.stored.insert(second, parts.stored[first])
    elif action == 3:
        del parts.table[first], parts.stored[first]
    else:
        index = rng.randrange(len(foreign.table))
        parts.table[first][CODER:] = foreign.table[index][CODER:]
        parts.stored[first] = foreign.stored[index]
    parts.header[6] = len(parts.table)
    return parts.build()


def change_stream(rng: random.Random, frame: bytes) -> bytes:
    """Another stream in one section, with a table that fits: what reaches an entropy decoder."""
    parts = Parts.of(frame)
    index = rng.randrange(len(parts.table))
    row, stream = parts.table[index], parts.stored[index] or b"\0"
    parts.stored[index] = rng.choice((flip_bits, flip_bits, cut, repeat_part, add_garbage))(rng, stream)
    row[STORED_BYTES] = len(parts.stored[index])
    if rng.random() < 0.3:
        row[RAW_BYTES] = rng.choice((*SIZES, max(0, row[RAW_BYTES] - 2), row[RAW_BYTES] + 2))
    if rng.random() < 0.2:
        row[CODER] = rng.randrange(6)
    return parts.build()


# Streams have most of the bytes and meet the only code that is not ours: they get a larger share.
DAMAGES: Sequence[Callable[[random.Random, bytes], bytes]] = (
    flip_bits,
    cut,
    repeat_part,
    add_garbage,
    overwrite_field,
    change_stream,
    change_stream,
    change_stream,
)
MIXTURES: Sequence[Callable[[random.Random, bytes, bytes], bytes]] = (mix, reorder_sections)


def mutated(rng: random.Random, whole: Sequence[bytes]) -> tuple[bytes, bytes]:
    """One of the frames, and the same damaged; half of the time under a checksum that fits the damaged bytes."""
    frame = rng.choice(whole)
    if rng.random() < 0.2:
        damaged = rng.choice(MIXTURES)(rng, frame, rng.choice(whole))
    else:
        damaged = rng.choice(DAMAGES)(rng, frame)
    return frame, resealed(damaged) if len(damaged) >= CHECKSUM_BYTES and rng.random() < 0.5 else damaged
