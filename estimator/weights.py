"""Weights files: safetensors with the architecture and the feature specification they belong to.

A file also carries the device model of the analytical estimate that the network corrects, and
where its training data came from. Nothing in it is executed, and nothing is believed unchecked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import DiscoError, ProfileError, why_unreadable
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.estimator.architecture import Architecture
from disco_hlo.regular_file import read_regular, write_whole

Record = TypeVar("Record", Architecture, DeviceModel)

FORMAT = "disco-hlo fused-op estimator"
VERSION = 1
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Weights:
    """A trained network, ready for ``network``."""

    architecture: Architecture
    device: DeviceModel
    """Of the analytical estimate it was trained to correct."""
    tensors: Mapping[str, NDArray[np.float32]] = field(repr=False)
    """By their names in ``train.FusedOpNet``."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Provenance: device kind, versions, data, errors on held-out samples."""

    @property
    def device_kind(self) -> str:
        """What the training data was measured on."""
        return str(self.about.get("device_kind", ""))


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a network."""
    width, heads, columns = architecture.width, architecture.heads, len(architecture.columns)
    first, second = architecture.dense
    shapes: dict[str, tuple[int, ...]] = {
        "output_mean": (1,),
        "output_range": (2,),
        "op_embedding.weight": (len(spec.VOCABULARY), width),
        "node_input.weight": (width, columns),
        "node_input.bias": (width,),
        "dense1.weight": (first, architecture.pooled_width),
        "dense1.bias": (first,),
        "dense2.weight": (second, first),
        "dense2.bias": (second,),
        "dense3.weight": (1, second),
        "dense3.bias": (1,),
    }
    for name, count in (("node", columns), ("edge", len(spec.EDGE)), ("kernel", len(spec.KERNEL))):
        shapes |= {f"{name}_mean": (count,), f"{name}_scale": (count,)}
    for number in range(architecture.layers):
        layer = {
            "message.weight": (width, width),
            "source": (heads, width // heads),
            "target": (heads, width // heads),
            "bias": (width,),
        }
        if architecture.is_residual:
            layer |= {"norm.weight": (width,), "norm.bias": (width,)}
        if architecture.uses_edges:
            layer |= {
                "edge_score.weight": (heads, len(spec.EDGE)),
                "edge_message.weight": (width, len(spec.EDGE)),
            }
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def to_bytes(weights: Weights) -> bytes:
    """The file's contents; equal weights give equal bytes."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "features": spec.FEATURES,
        "architecture": asdict(weights.architecture),
        "device": asdict(weights.device),
        "about": dict(weights.about),
    }
    tensors = {name: np.ascontiguousarray(weights.tensors[name]) for name in sorted(weights.tensors)}
    return bytes(save(tensors, {"disco_hlo": json.dumps(about, sort_keys=True, allow_nan=False)}))


def from_bytes(data: bytes, source: str) -> Weights:
    """Read and check a weights file; ``source`` names it in the messages.

    Raises:
        ProfileError: it is damaged, no weights file, of another version, or made for other features.
    """
    head = _head(data, source)
    if head.get("format") != FORMAT:
        raise ProfileError(
            f"{source} holds no weights of the fused-op estimator; make some with scripts/train_estimator.py"
        )
    if head.get("version") != VERSION:
        raise ProfileError(
            f"{source} is of version {head.get('version')!r}; this program reads version {VERSION}"
        )
    if head.get("features") != spec.FEATURES:
        raise ProfileError(f"{source} was trained on other features than this program computes; train again")
    try:
        architecture = _record(head["architecture"], "the architecture", Architecture)
        device = _record(head["device"], "the device model", DeviceModel)
        tensors = load(data)
    except (KeyError, ValueError, SafetensorError, DiscoError, msgspec.MsgspecError) as error:
        raise ProfileError(f"{source} is damaged: {type(error).__name__}: {error}") from error
    _check(tensors, expected_shapes(architecture), source)
    about = head.get("about")
    return Weights(architecture, device, tensors, about if isinstance(about, dict) else {})


def _head(data: bytes, source: str) -> dict[str, Any]:
    """The metadata. safetensors gives it for files only, and reads none it has not checked itself."""
    try:
        load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
        head = json.loads(metadata.get("disco_hlo", "{}"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ProfileError(f"{source} is no readable safetensors file: {why_unreadable(error)}") from error
    return head if isinstance(head, dict) else {}


def _record(body: Any, what: str, kind: type[Record]) -> Record:
    names = {field.name for field in fields(kind)}
    if not isinstance(body, dict) or set(body) != names:
        raise ValueError(
            f"{what} has {sorted(body) if isinstance(body, dict) else body!r:.200}, expected {sorted(names)}"
        )
    return msgspec.convert(body, kind)


def _check(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    if set(tensors) != set(shapes):
        odd = sorted(set(tensors) ^ set(shapes))
        raise ProfileError(f"{source} is damaged: missing or unknown tensors {', '.join(odd[:5])}")
    for name, shape in shapes.items():
        found = tensors[name]
        if found.shape != shape or found.dtype != np.float32:
            raise ProfileError(
                f"{source} is damaged: {name} is {found.dtype}{list(found.shape)}, expected float32{list(shape)}"
            )
        if not np.isfinite(found).all():
            raise ProfileError(f"{source} is damaged: {name} holds numbers that are not finite")


# --- files ----------------------------------------------------------------------------------------


def save_file(weights: Weights, path: Path) -> None:
    """Write a weights file, whole or not at all. :class:`ProfileError` where it cannot be written."""
    try:
        write_whole(path.parent, {path.name: to_bytes(weights)})
    except OSError as error:
        raise ProfileError(f"cannot write the weights {path}: {error}") from error


def load_file(path: Path) -> Weights:
    """Read a weights file. :class:`ProfileError` says what is wrong with it."""
    try:
        data = read_regular(path, _MOST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        raise ProfileError(
            f"cannot read the weights {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return from_bytes(data, str(path))


def shipped_name(backend: str, device_kind: str) -> str:
    """File name of the weights of a device: of the GPU's kind; on CPU one file serves every kind."""
    if not BACKENDS[backend].estimator_by_kind:
        return f"{backend}.safetensors"
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".safetensors"


_OF_ITS_KIND = {"NVIDIA H100": "NVIDIA H100 80GB HBM3"}
"""GPUs, by how their names begin, and those of the same processor that an estimator was trained on."""


def shipped(backend: str, device_kind: str) -> Weights | None:
    """The weights that come with the package for this kind of device, or for one of the same processor; None where
    there are none."""
    kinds = [device_kind, *(known for name, known in _OF_ITS_KIND.items() if device_kind.startswith(name))]
    for name in [shipped_name(backend, kind) for kind in kinds]:
        file = resources.files("disco_hlo") / "data" / "weights" / name
        if file.is_file():
            return from_bytes(file.read_bytes(), f"the package's {name}")
    return None
