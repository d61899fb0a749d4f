"""Byte planes: the bytes of equal significance of all elements side by side (FORMAT.md section 5.2).

Neighbouring elements share sign and exponent, so the high plane of 16-bit floats codes far better on its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ELEMENT_BYTES = (1, 2, 4)


def shuffle(elements: Bytes, element_bytes: int) -> Bytes:
    """Reorder u8[n * element_bytes] little-endian elements into planes, least significant byte first.

    Elements of one byte are returned as they are, without a copy.
    """
    if element_bytes == 1:
        return elements
    columns = elements.reshape(-1, element_bytes)
    planes = np.empty((element_bytes, len(columns)), np.uint8)
    for significance in range(element_bytes):
        planes[significance] = columns[:, significance]
    return planes.reshape(-1)


def unshuffle(planes: Bytes, element_bytes: int) -> Bytes:
    """Inverse of `shuffle`; the result is fresh, aligned memory unless elements have one byte."""
    if element_bytes == 1:
        return planes
    rows = planes.reshape(element_bytes, -1)
    elements = np.empty((rows.shape[1], element_bytes), np.uint8)
    for significance in range(element_bytes):
        elements[:, significance] = rows[significance]
    return elements.reshape(-1)
