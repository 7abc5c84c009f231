"""Weights files: bit-equal after a round trip; anything else is refused with the reason."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.estimator.architecture import PAPER, Architecture
from disco_hlo.estimator.network import network, predicted_ns
from disco_hlo.estimator.weights import from_bytes, load_file, save_file, shipped, shipped_name, to_bytes
from tests.estimator.steps import random_weights
from tests.estimator.test_features import many


def test_reloaded_weights_predict_the_same_to_the_bit(tmp_path: Path) -> None:
    weights = random_weights(samples=12)
    save_file(weights, tmp_path / "w.safetensors")
    again = load_file(tmp_path / "w.safetensors")
    assert to_bytes(again) == to_bytes(weights)
    assert (again.architecture, again.device, again.about) == (
        weights.architecture,
        weights.device,
        weights.about,
    )
    before, after = predicted_ns(network(weights), many()), predicted_ns(network(again), many())
    assert before.tobytes() == after.tobytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "w.safetensors"]


def test_weights_of_the_paper_s_network_are_stored_too() -> None:
    weights = random_weights(PAPER)
    assert from_bytes(to_bytes(weights), "it").architecture == PAPER


def changed(**values: object) -> bytes:
    """A weights file whose description differs."""
    data = to_bytes(random_weights())
    length = int.from_bytes(data[:8], "little")
    head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["disco_hlo"])
    return save(dict(random_weights().tensors), {"disco_hlo": json.dumps({**head, **values})})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no readable safetensors file"),
        (b"PK\x03\x04" * 50, "is no readable safetensors file"),
        (to_bytes(random_weights())[:-4], "is no readable safetensors file"),
        (to_bytes(random_weights())[:40], "is no readable safetensors file"),
        (save({"w": np.zeros(3, np.float32)}), "holds no weights of the fused-op estimator"),
        (
            save({"w": np.zeros(3, np.float32)}, {"disco_hlo": "[1]"}),
            "holds no weights of the fused-op estimator",
        ),
        (changed(version=2), "is of version 2; this program reads version 1"),
        (changed(features={"version": 0}), "was trained on other features"),
        (changed(architecture={"layers": 6}), "is damaged: ValueError: the architecture has"),
        (changed(architecture=None), "is damaged"),
        (changed(device={"memory_bandwidth": -1}), "is damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        from_bytes(data, "w.safetensors")
    assert str(caught.value).startswith("w.safetensors ")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("dense3.bias", np.zeros(2, np.float32), r"dense3.bias is float32\[2\], expected float32\[1\]"),
        ("dense3.bias", np.zeros(1, np.float64), "dense3.bias is float64"),
        ("dense3.bias", np.array([np.nan], np.float32), "dense3.bias holds numbers that are not finite"),
        ("extra", np.zeros(1, np.float32), "missing or unknown tensors extra"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: np.ndarray, message: str) -> None:
    weights = random_weights()
    weights.tensors[name] = tensor
    with pytest.raises(ProfileError, match=message):
        from_bytes(to_bytes(weights), "w.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot read the weights .*nothing"):
        load_file(tmp_path / "nothing")
    with pytest.raises(ProfileError, match="cannot write the weights"):
        save_file(random_weights(), tmp_path / "missing" / "w")


@pytest.mark.parametrize(
    "values",
    [{"width": 10, "heads": 3}, {"layers": 0}, {"pooling": ("median",)}, {"node_numbers": ("colour",)}],
)
def test_impossible_architectures_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(DiscoError):
        Architecture(**values)


def test_file_names_follow_the_device() -> None:
    assert shipped_name("gpu", "NVIDIA H200") == "nvidia-h200.safetensors"
    assert shipped_name("cpu", "AMD EPYC, 2 cores") == "cpu.safetensors"
    assert shipped("gpu", "Nobody's GPU") is None
    for kind, expected in (
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3"),
    ):
        found = shipped("gpu", kind)
        assert found is not None
        assert found.device_kind == expected


def test_all_weights_in_the_package_load_and_have_a_compiled_form() -> None:
    folder = resources.files("disco_hlo") / "data" / "weights"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".safetensors"))
    assert "nvidia-h200.safetensors" in names
    for name in names:
        weights = from_bytes((folder / name).read_bytes(), name)
        assert weights.device_kind
        assert network(weights).message.shape[0] == 6
