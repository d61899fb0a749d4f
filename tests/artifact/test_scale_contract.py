from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from artifact.toy_artifact import artifact

from sglang_kvtc.artifact import io
from sglang_kvtc.artifact.io import load_artifact, save_artifact
from sglang_kvtc.errors import ArtifactError
from sglang_kvtc.types import Side


@pytest.mark.parametrize("number", [1e-50, 1e300, float("nan"), float("inf"), -1.0, 0.0, 1e-40])
@pytest.mark.parametrize("side", Side, ids=lambda side: side.name)
def test_a_num_04_a_file_with_weights_that_cannot_be_undone_is_refused_by_tensor(
    side: Side, number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole file with the right digest, as a writer without our checks makes it."""
    good = artifact()
    basis = good.basis(side)
    assert basis is not None
    assert basis.weights is not None
    weights = basis.weights.copy()
    with np.errstate(over="ignore", under="ignore"):
        weights[1, 0] = np.diag(np.full(weights.shape[-1], number))
    name = side.name.lower()
    with monkeypatch.context() as without_checks:
        without_checks.setattr(io, "check_artifact", lambda _artifact: None)
        save_artifact(dataclasses.replace(good, **{name: dataclasses.replace(basis, weights=weights)}), tmp_path)
    with pytest.raises(ArtifactError, match=re.escape(f"{name}.weights[1, 0")):
        load_artifact(tmp_path)


def test_a_num_04_the_smallest_and_largest_usable_weights_are_loaded(tmp_path: Path) -> None:
    good = artifact()
    assert good.k is not None
    assert good.k.weights is not None
    weights, tiny = good.k.weights.copy(), np.finfo(np.float32).tiny
    weights[0, 0], weights[0, 1] = tiny * np.eye(16), np.eye(16) / tiny
    save_artifact(dataclasses.replace(good, k=dataclasses.replace(good.k, weights=weights)), tmp_path)
    loaded = load_artifact(tmp_path)
    assert loaded.k is not None
    np.testing.assert_array_equal(loaded.k.weights, weights)
