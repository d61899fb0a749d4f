from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle  # noqa: TID251 - to show that it is refused
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from artifact.toy_artifact import PLAN, artifact, lossless_artifact
from safetensors import safe_open
from safetensors.numpy import save_file

from sglang_kvtc.artifact.io import FILE_NAME, _content_digest, load_artifact, save_artifact
from sglang_kvtc.artifact.schema import Artifact, Group, SideBasis, SidePlan
from sglang_kvtc.errors import ArtifactError
from sglang_kvtc.types import Side

TENSORS = [f"{side}.{field}" for side in ("k", "v") for field in ("weights", "mean", "basis", "variances")]


def assert_equal(found: Artifact, expected: Artifact) -> None:
    for field in dataclasses.fields(Artifact):
        if field.name not in ("k", "v"):
            assert getattr(found, field.name) == getattr(expected, field.name)
    for side in Side:
        ours, theirs = found.basis(side), expected.basis(side)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.total_variance == theirs.total_variance
            for name in ("weights", "mean", "basis", "variances"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), strict=True)


def with_tensor(tensor: str, value: npt.NDArray[Any]) -> Artifact:
    """The toy artifact with one tensor replaced."""
    made = artifact()
    side, field = tensor.split(".")
    basis: SideBasis = getattr(made, side)
    return dataclasses.replace(made, **{side: dataclasses.replace(basis, **{field: value})})


def with_element(tensor: str, index: tuple[int, ...], number: float) -> Artifact:
    side, field = tensor.split(".")
    changed = getattr(getattr(artifact(), side), field).copy()
    with np.errstate(over="ignore"):
        changed[index] = number
    return with_tensor(tensor, changed)


def with_groups(*groups: Group) -> Artifact:
    return artifact((dataclasses.replace(PLAN, k=SidePlan(groups, 0.0)),))


def with_uniform_groups(*groups: Group) -> Artifact:
    return artifact((dataclasses.replace(PLAN, k=SidePlan(groups, 0.0, step=0.5, stored_bits=20.5)),))


def rewrite(file: Path, **changes: str) -> None:
    """Write an artifact file again with other metadata."""
    with safe_open(file, framework="numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        metadata = {**opened.metadata(), **changes}
    save_file(tensors, file, {key: text for key, text in metadata.items() if text})


@pytest.mark.parametrize(
    "made",
    [artifact(), lossless_artifact(), artifact(()), with_uniform_groups(Group(0, 3, 12), Group(3, 7, 4))],
    ids=["bases", "lossless", "no plans", "uniform"],
)
def test_an_artifact_comes_back_as_it_was_saved(made: Artifact, tmp_path: Path) -> None:
    saved = save_artifact(made, tmp_path / "artifact")
    assert len(saved.digest) == 16
    loaded = load_artifact(tmp_path / "artifact")
    assert_equal(loaded, saved)
    assert_equal(load_artifact(tmp_path / "artifact" / FILE_NAME), saved)


def test_a_file_name_is_taken_as_it_is(tmp_path: Path) -> None:
    saved = save_artifact(artifact(), tmp_path / "deep" / "toy.safetensors")
    assert os.listdir(tmp_path / "deep") == ["toy.safetensors"]
    assert_equal(load_artifact(tmp_path / "deep" / "toy.safetensors"), saved)


def test_saving_twice_gives_the_same_digest_and_leaves_one_file(tmp_path: Path) -> None:
    first = save_artifact(artifact(), tmp_path)
    assert save_artifact(artifact(), tmp_path).digest == first.digest
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_failed_save_keeps_the_old_artifact_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_artifact(artifact(), tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ArtifactError, match="disk full"):
        save_artifact(lossless_artifact(), tmp_path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [FILE_NAME]
    assert_equal(load_artifact(tmp_path), saved)


def test_numpy_scalars_are_stored_as_numbers(tmp_path: Path) -> None:
    plan = dataclasses.replace(
        PLAN, target_ratio=np.float64(16), k=SidePlan((Group(np.int64(0), np.int64(16), np.uint8(3)),), np.float32(0.5))
    )
    save_artifact(artifact((plan,)), tmp_path)
    assert load_artifact(tmp_path).plans == (plan,)


def test_fields_of_wrong_types_are_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"provenance"):
        save_artifact(dataclasses.replace(artifact(), provenance={"tokens": 1000}), tmp_path)
    with pytest.raises(ArtifactError, match="PosixPath is not a JSON value"):
        save_artifact(dataclasses.replace(artifact(), provenance={"corpus": tmp_path}), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tensor", TENSORS)
def test_the_digest_covers_every_tensor(tensor: str, tmp_path: Path) -> None:
    saved = save_artifact(artifact(), tmp_path)
    side, field = tensor.split(".")
    changed = getattr(getattr(saved, side), field).copy()
    changed.flat[-1] /= 2
    assert save_artifact(with_tensor(tensor, changed), tmp_path).digest != saved.digest


def test_the_digest_covers_everything_else(tmp_path: Path) -> None:
    digests = {
        save_artifact(changed, tmp_path).digest
        for changed in (
            artifact(),
            dataclasses.replace(artifact(), provenance={}),
            dataclasses.replace(artifact(), rope=dataclasses.replace(artifact().rope, attention_factor=1.5)),
            dataclasses.replace(artifact(), geometry=dataclasses.replace(artifact().geometry, dtype="float16")),
            artifact((dataclasses.replace(PLAN, target_ratio=17.0),)),
            lossless_artifact(),
        )
    }
    assert len(digests) == 6


def test_a_file_from_before_ropes_had_limits_is_read(tmp_path: Path) -> None:
    """Under the digest it was written with, which frames carry."""
    saved = save_artifact(artifact(), tmp_path)
    file = tmp_path / FILE_NAME
    with safe_open(file, framework="numpy") as opened:
        description = json.loads(opened.metadata()["description"])
        tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
    assert description["rope"].pop("position_limit") is None
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    digest = _content_digest(text, tensors)
    rewrite(file, description=text, digest=digest.hex())
    assert digest != saved.digest
    assert_equal(load_artifact(tmp_path), dataclasses.replace(saved, digest=digest))


@pytest.mark.parametrize("path", ["nothing", "nothing.safetensors"])
def test_a_missing_artifact_says_what_to_run(path: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"there is no artifact at .*: run `sglang-kvtc calibrate`"):
        load_artifact(tmp_path / path)


@pytest.mark.parametrize("sixteenth", range(16))
def test_a_cut_artifact_is_refused(sixteenth: int, tmp_path: Path) -> None:
    save_artifact(artifact(), tmp_path)
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(whole[: len(whole) * sixteenth // 16])
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        load_artifact(tmp_path)


def test_changed_bytes_are_found_by_the_digest(tmp_path: Path) -> None:
    save_artifact(artifact(), tmp_path)
    whole = bytearray((tmp_path / FILE_NAME).read_bytes())
    whole[-1] ^= 1
    (tmp_path / FILE_NAME).write_bytes(whole)
    with pytest.raises(ArtifactError, match="digest does not match"):
        load_artifact(tmp_path)


class _SideEffect:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_a_sec_01_a_pickle_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    payload = pickle.dumps(_SideEffect(target))
    pickle.loads(payload)
    assert target.exists(), "the pickle must be dangerous for this test to mean anything"
    target.unlink()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("archive/data.pkl", payload)
    for content in (payload, archive.getvalue()):
        (tmp_path / FILE_NAME).write_bytes(content)
        with pytest.raises(ArtifactError, match="not a readable safetensors file"):
            load_artifact(tmp_path)
    assert not target.exists()


def test_a_safetensors_file_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / FILE_NAME)
    with pytest.raises(ArtifactError, match="no calibration artifact: its metadata lack description, digest, schema"):
        load_artifact(tmp_path)


def test_another_schema_version_is_refused_by_number(tmp_path: Path) -> None:
    save_artifact(artifact(), tmp_path)
    rewrite(tmp_path / FILE_NAME, schema_version="2")
    with pytest.raises(ArtifactError, match="has schema version 2, this version reads 3"):
        load_artifact(tmp_path)


def test_changed_metadata_are_found_by_the_digest(tmp_path: Path) -> None:
    save_artifact(artifact(), tmp_path)
    rewrite(tmp_path / FILE_NAME, description="{}")
    with pytest.raises(ArtifactError, match="digest does not match"):
        load_artifact(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k.mean": np.zeros(3, np.float64)}, "k.mean is F64, expected F32"),
        ({"k.basis": np.zeros((3, 2), np.float32)}, "k.basis is F32, expected F16"),
        ({"k.extra": np.zeros(3, np.float32)}, "unknown tensor k.extra"),
        ({"mean": np.zeros(3, np.float32)}, "unknown tensor mean"),
    ],
)
def test_tensors_of_other_names_and_dtypes_are_refused_by_name(
    tensors: dict[str, npt.NDArray[Any]], message: str, tmp_path: Path
) -> None:
    metadata = {"schema_version": "3", "description": "{}", "digest": "00"}
    save_file(tensors, tmp_path / FILE_NAME, metadata)
    with pytest.raises(ArtifactError, match=message):
        load_artifact(tmp_path)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (1e-50, "is no symmetric, positive definite matrix"),
        (-1.0, "is no symmetric, positive definite matrix"),
        (0.0, "is no symmetric, positive definite matrix"),
        (1e-40, "is no symmetric, positive definite matrix"),
        (1e300, "expected it to be finite"),
        (float("nan"), "expected it to be finite"),
        (float("inf"), "expected it to be finite"),
    ],
)
@pytest.mark.parametrize("tensor", ["k.weights", "v.weights"])
def test_a_num_04_weights_that_cannot_be_undone_are_refused_by_head(
    tensor: str, block: float, message: str, tmp_path: Path
) -> None:
    side = artifact().basis(Side[tensor[0].upper()])
    assert side is not None
    assert side.weights is not None
    weights = side.weights.copy()
    with np.errstate(over="ignore", under="ignore"):
        weights[1, 0] = np.diag(np.full(weights.shape[-1], block))
    with pytest.raises(ArtifactError, match=rf"^{re.escape(tensor)}\[1, 0.*{message}"):
        save_artifact(with_tensor(tensor, weights), tmp_path)


@pytest.mark.parametrize("change", ["asymmetric", "singular"])
def test_weights_must_be_symmetric_and_invertible(change: str, tmp_path: Path) -> None:
    weights = np.broadcast_to(np.eye(16, dtype=np.float32), (2, 2, 16, 16)).copy()
    weights[0, 1, 0, 1] = 0.5
    weights[0, 1, 1, 0] = 0.5 if change == "singular" else 0.4
    if change == "singular":
        weights[0, 1, 0, 0] = 0.25
    with pytest.raises(ArtifactError, match=r"^k\.weights\[0, 1\] is no symmetric, positive definite matrix"):
        save_artifact(with_tensor("k.weights", weights), tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("tensor", "index"), [("k.mean", (3,)), ("v.basis", (7, 2)), ("k.variances", (0,))])
def test_numbers_that_are_not_finite_are_refused_by_place(
    tensor: str, index: tuple[int, ...], number: float, tmp_path: Path
) -> None:
    place = re.escape(f"{tensor}{list(index)} is {number}: expected it to be finite")
    with pytest.raises(ArtifactError, match=place):
        save_artifact(with_element(tensor, index, number), tmp_path)


def test_the_largest_float16_is_finite(tmp_path: Path) -> None:
    save_artifact(with_element("k.basis", (0, 0), 65504), tmp_path)
    assert load_artifact(tmp_path / FILE_NAME).k is not None


def test_variances_must_fall_and_not_be_negative(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"k\.variances\[4\] is .*: expected it to be at most the one before it"):
        save_artifact(with_element("k.variances", (4,), 2), tmp_path)
    with pytest.raises(ArtifactError, match=r"k\.variances\[19\] is -1\.0: expected it to be not negative"):
        save_artifact(with_element("k.variances", (19,), -1), tmp_path)


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("k.weights", np.ones((2, 2, 16, 15), np.float32)),
        ("k.mean", np.ones((64, 1), np.float32)),
        ("k.basis", np.ones((64, 21), np.float16)),
        ("v.basis", np.ones((20, 16), np.float16)),
        ("v.mean", np.ones(32, np.float64)),
        ("v.variances", np.ones(0, np.float32)),
        ("v.variances", np.ones(33, np.float32)),
    ],
)
def test_a_sec_01_shapes_that_do_not_fit_the_geometry_are_refused_by_name(
    tensor: str, value: npt.NDArray[Any], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=f"^{re.escape(tensor)} "):
        save_artifact(with_tensor(tensor, value), tmp_path)


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (with_groups(Group(0, 2, 3)), r"plans[0].k.groups[0].size"),
        (with_groups(Group(0, 16, 9)), r"plans[0].k.groups[0].width"),
        (with_groups(Group(0, 16, -1)), r"plans[0].k.groups[0].width"),
        (with_groups(Group(0, 64, 3)), r"plans[0].k.groups[0] is [0, 64)"),
        (with_groups(Group(-1, 1, 3)), r"plans[0].k.groups[0] is [-1, 0)"),
        (with_groups(Group(0, 16, 3), Group(15, 1, 3)), r"plans[0].k.groups[1].start"),
        (with_groups(Group(4, 1, 3), Group(0, 1, 3)), r"plans[0].k.groups[1].start"),
        (artifact((dataclasses.replace(PLAN, k=SidePlan((), float("nan"))),)), r"plans[0].k.predicted_error"),
        (artifact((dataclasses.replace(PLAN, v=SidePlan((), 0.0, -0.5)),)), "plans[0].v.step"),
        (artifact((dataclasses.replace(PLAN, v=SidePlan((), 0.0, math.inf)),)), "plans[0].v.step"),
        (
            artifact((dataclasses.replace(PLAN, v=SidePlan((), 0.0, 1e-30)),)),
            "plans[0].v.step is 1e-30: expected 0, or",
        ),
        (artifact((dataclasses.replace(PLAN, v=SidePlan((), 0.0, 1.0, math.nan)),)), "plans[0].v.stored_bits"),
        (with_uniform_groups(Group(0, 0, 8)), r"plans[0].k.groups[0].size is 0: expected 1 or more"),
        (with_uniform_groups(Group(0, 5, 1)), r"plans[0].k.groups[0].width is 1: expected 2 to 16"),
        (with_uniform_groups(Group(0, 5, 17)), r"plans[0].k.groups[0].width"),
        (with_uniform_groups(Group(0, 5, 12), Group(4, 3, 8)), r"plans[0].k.groups[1].start"),
        (with_uniform_groups(Group(0, 21, 8)), r"plans[0].k.groups[0] is [0, 21)"),
        (artifact((PLAN, dataclasses.replace(PLAN, target_ratio=0.0))), r"plans[1].target_ratio"),
        (artifact((dataclasses.replace(PLAN, target_ratio=float("nan")),)), r"plans[0].target_ratio"),
        (artifact((PLAN, PLAN)), r"plans[1].target_ratio"),
        (dataclasses.replace(lossless_artifact(), plans=(PLAN,)), "plans"),
        (dataclasses.replace(artifact(), v=None), "bases for both K and V"),
    ],
)
def test_plans_that_cannot_be_right_are_refused_by_key(made: Artifact, key: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=re.escape(key)):
        save_artifact(made, tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "key"),
    [
        ("geometry", {"num_layers": 0}, "geometry.num_layers"),
        ("geometry", {"dtype": "int8"}, "geometry.dtype"),
        ("rope", {"rotary_dim": 18}, "rope.rotary_dim"),
        ("rope", {"rotary_dim": 15}, "rope.rotary_dim"),
        ("rope", {"rotary_dim": 14}, "rope.inv_freq"),
        ("rope", {"inv_freq": (float("nan"),) * 8}, r"rope.inv_freq\[0\]"),
        ("rope", {"attention_factor": 0.0}, "rope.attention_factor"),
        ("rope", {"position_limit": 0}, "rope.position_limit"),
        ("k", {"total_variance": float("inf")}, "k_total_variance"),
    ],
)
def test_geometry_and_rope_that_cannot_be_right_are_refused_by_key(
    part: str, change: dict[str, object], key: str, tmp_path: Path
) -> None:
    made = artifact()
    changed = dataclasses.replace(made, **{part: dataclasses.replace(getattr(made, part), **change)})
    with pytest.raises(ArtifactError, match=f"^{key} is|^{key} has"):
        save_artifact(changed, tmp_path)


def test_a_file_of_another_writer_is_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sglang_kvtc.artifact.io.check_artifact", lambda _: None)
        save_artifact(with_element("k.variances", (19,), -1), tmp_path)
    with pytest.raises(ArtifactError, match=rf"{FILE_NAME}: k\.variances\[19\] is -1\.0"):
        load_artifact(tmp_path)
