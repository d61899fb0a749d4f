from __future__ import annotations

import numpy as np
import pytest

from sglang_kvtc.bitstream.shuffle import ELEMENT_BYTES, shuffle, unshuffle


@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_unshuffle_inverts_shuffle_exactly(element_bytes: int, count: int) -> None:
    elements = np.random.default_rng(count).integers(0, 256, count * element_bytes).astype(np.uint8)
    np.testing.assert_array_equal(unshuffle(shuffle(elements, element_bytes), element_bytes), elements)


def test_planes_go_from_the_least_significant_byte_to_the_most() -> None:
    assert shuffle(np.array([0x0102, 0x0304], "<u2").view(np.uint8), 2).tolist() == [2, 4, 1, 3]
    assert shuffle(np.array([0x01020304, 0x05060708], "<u4").view(np.uint8), 4).tolist() == [4, 8, 3, 7, 2, 6, 1, 5]


def test_unshuffled_elements_are_aligned_for_their_dtype() -> None:
    planes = np.frombuffer(bytes(81), np.uint8)[1:]
    assert unshuffle(planes, 4).view("<f4").flags.aligned
