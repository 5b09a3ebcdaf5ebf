"""Read weights in Hugging Face's format, slice by slice.

`weight_locations` maps each parameter of dtron to tensors of transformers; in names, "ours" means
dtron and "theirs" means transformers. Opening an `HFFolder` checks that the folder has exactly the
tensors of the model, with the right shapes. `HFFolder.read` reads only the bytes of the requested
region of a parameter.
"""

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtron.errors import CheckpointError, counted, nearest
from dtron.io.filesystem import plain_name, read_json
from dtron.io.safetensors_file import (
    DTYPE_NAMES,
    Region,
    StoredTensor,
    StoredTensors,
    full_region,
    reading,
)
from dtron.models.config import DecoderConfig
from dtron.models.hf import HuggingFace, WeightName
from dtron.parallelisms.placement import matches

log = logging.getLogger("dtron")

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class WeightLocation:
    """Location of a dtron parameter in the tensors of transformers."""

    shape: tuple[int, ...]
    name: WeightName
    theirs: str
    """Name of the tensor; for a stacked parameter with `{expert}` in place of the index."""
    dtype: torch.dtype | None = None
    """Dtype of a saved buffer, which is never converted; None: a parameter."""

    @property
    def stacked(self) -> bool:
        """Whether each index of dim 0 is a separate tensor in the files."""
        return "{expert}" in self.theirs

    def tensor_names(self) -> list[str]:
        """Return the names of the tensors that hold the parameter."""
        if not self.stacked:
            return [self.theirs]
        return [self.theirs.format(expert=i) for i in range(self.shape[0])]

    def tensor_shape(self) -> tuple[int, ...]:
        """Return the shape of the part of the parameter that one tensor holds."""
        return self.shape[1:] if self.stacked else self.shape


def weight_locations(
    hf: HuggingFace, config: DecoderConfig, model: nn.Module, stored: Container[str] = ()
) -> dict[str, WeightLocation]:
    """Return {FQN: location} for all parameters and saved buffers of a model.

    Tied weights appear once.

    Args:
        stored: names of the tensors in the files, which decide between several names.
    """
    mtp = {f"model.layers.{config.n_layers + i}.": f"layers.{i}." for i in range(config.mtp)}
    buffers = {id(b) for _, b in model.named_buffers()}
    owned = {id(p) for _, p in model.named_parameters()} | buffers
    found: dict[str, WeightLocation] = {}
    for fqn, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in owned:
            owned.remove(id(tensor))
            kept = tensor.dtype if id(tensor) in buffers else None
            names = [
                replace(each, theirs=_mtp_name(hf, mtp, each.theirs), dtype=kept)
                for each in _locations(hf, config, fqn, tuple(tensor.shape))
            ]
            found[fqn] = next((n for n in names if n.tensor_names()[0] in stored), names[0])
    return found


def _mtp_name(hf: HuggingFace, mtp: Mapping[str, str], theirs: str) -> str:
    """Rename a tensor of an MTP layer for `mtp_prefix`; `mtp`: {prefix: prefix from layer 0}."""
    first = next((prefix for prefix in mtp if theirs.startswith(prefix)), "")
    if not hf.mtp_prefix or not first:
        return theirs
    return hf.mtp_prefix + mtp[first] + theirs.removeprefix(first)


def locate(
    hf: HuggingFace, config: DecoderConfig, fqn: str, shape: tuple[int, ...]
) -> WeightLocation:
    """Return the location of a parameter of dtron in the tensors of transformers."""
    return next(_locations(hf, config, fqn, shape))


def _locations(
    hf: HuggingFace, config: DecoderConfig, fqn: str, shape: tuple[int, ...]
) -> Iterator[WeightLocation]:
    """Yield the locations of a parameter, in the order of `HuggingFace.names`; at least one."""
    path, _, kind = fqn.rpartition(".")
    known = False
    for name in hf.names:
        for candidate, suffix in ((fqn, ""), (path, f".{kind}")):
            if matches(name.ours, candidate):
                layers = [
                    part
                    for star, part in zip(name.ours.split("."), candidate.split("."), strict=True)
                    if star == "*"
                ]
                if name.layers is not None:
                    own = name.layers(config)
                    if int(layers[0]) not in own:
                        continue
                    layers = [str(own.index(int(layers[0])))]
                theirs = name.theirs.replace("*", layers[0] if layers else "*") + suffix
                known = True
                yield WeightLocation(shape, name, theirs)
    assert known, f"{hf.architecture} has no name for {fqn}"


def hf_shapes(
    config: DecoderConfig, ours: Mapping[str, WeightLocation]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in Hugging Face's format, by name."""
    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for each in ours.values():
        one, dim = list(each.tensor_shape()), each.name.dim
        for theirs in each.tensor_names():
            shape = list(one)
            if each.name.rows is not None:
                rows[theirs] = rows.get(theirs, 0) + shape[dim]
                shape[dim] = rows[theirs]
            if each.name.transposed and len(shape) > 1:
                shape[-1], shape[-2] = shape[-2], shape[-1]
            shapes[theirs] = tuple(shape)
    return shapes


@dataclass(frozen=True)
class HFFamily:
    """The fields of a ModelSpec that `HFFolder` needs."""

    name: str
    hf: HuggingFace
    build: Callable[[DecoderConfig], nn.Module]


def is_gamma(fqn: str) -> bool:
    """Whether a parameter is the weight of a norm."""
    return fqn.endswith("norm.weight")


class HFFolder:
    """Reader of a folder in Hugging Face's format.

    Attributes:
        family: `model.name` of the model family.
        config: converted from config.json.
        ours: {FQN: location} of the model's parameters and saved buffers.
    Args:
        path: the folder.
        families: {model_type: family} of the model families that transformers has too.
        zero_centered: return norm weights as gamma - 1, for `norm_zero_centered`; None: as stored.
    Raises:
        CheckpointError: the folder has no weight files, dtron has no such model, or a tensor is
            missing, unexpected, or has the wrong shape or dtype; the message names the tensor.
    """

    def __init__(
        self, path: Path, families: Mapping[str, HFFamily], zero_centered: bool | None = None
    ) -> None:
        self.path = path
        given = read_json(path / CONFIG)
        kind = str(given.get("model_type"))
        outer = {f.hf.inside.model_type: f for f in families.values() if f.hf.inside is not None}
        if kind in outer:
            given = _language_model(given, path / CONFIG)
            kind = outer[kind].hf.model_type
        if kind not in families:
            raise CheckpointError(
                f"{path / CONFIG}: model_type = {kind!r} is not a model of dtron"
                f"{nearest(kind, families)}; dtron has {', '.join(families)}"
            )
        family = families[kind]
        self.family, self._hf = family.name, family.hf
        stored = self._hf.zero_centered
        self._add_to_gamma = int(stored) - int(stored if zero_centered is None else zero_centered)
        self._tensors = self._headers()
        self.config = self._without_absent(family.hf.read(given, str(path / CONFIG)))
        self._refuse_missing_layers()
        with torch.device("meta"):
            model = family.build(self.config)
        self.ours = weight_locations(family.hf, self.config, model, self._tensors)
        self._check()

    def dtype(self, fqn: str, wanted: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype of a parameter after loading: `wanted`, or by default the stored dtype.

        A saved buffer keeps its dtype.
        """
        each = self.ours[fqn]
        return each.dtype or wanted or self._tensors[each.tensor_names()[0]].dtype

    def read(self, fqn: str, region: Region | None = None) -> Tensor:
        """Read a region of a parameter to the host, in its stored dtype.

        Norm weights that are not returned as stored are float32.

        Args:
            region: one slice per dim of the dtron parameter; None: the whole parameter.
        """
        each = self.ours[fqn]
        region = full_region(each.shape) if region is None else region
        if not each.stacked:
            part = self._read_one(each, each.theirs, region)
            if each.dtype is not None:
                return part.to(each.dtype)
            added = self._add_to_gamma if is_gamma(fqn) else 0
            return part.float() + added if added else part
        experts = range(region[0].start, region[0].stop)
        parts = [self._read_one(each, each.theirs.format(expert=i), region[1:]) for i in experts]
        if parts:
            return torch.stack(parts)
        return torch.empty([s.stop - s.start for s in region], dtype=self.dtype(fqn))

    def _read_one(self, each: WeightLocation, theirs: str, region: Region) -> Tensor:
        name, dim = each.name, each.name.dim
        rows: Sequence[int] = ()
        if name.rows is not None:
            rows = name.rows(self.config, each.tensor_shape()[dim])[region[dim]]
            around = slice(min(rows), max(rows) + 1) if rows else slice(0, 0)
            region = (*region[:dim], around, *region[dim + 1 :])
        part = self._slice(theirs, _swapped(region) if name.transposed else region)
        if name.transposed and len(region) > 1:
            part = part.transpose(-1, -2)
        if rows:
            part = part.index_select(dim, torch.tensor(rows) - min(rows))
        return part.contiguous()

    def _slice(self, theirs: str, region: Region) -> Tensor:
        """Read a region of a tensor in the files."""
        stored = self._tensors[theirs]
        with reading(stored.path):
            return stored[region]

    def _headers(self) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for file, listed in _files(self.path).items():
            with reading(file):
                stored = StoredTensors(file)
                keys = stored.keys() if listed is None else listed & stored.keys()
                names = {key: self._name(key) for key in keys}
                found |= {name: stored.get_slice(key) for key, name in names.items() if name}
            if listed is not None and (absent := sorted(listed - keys)):
                raise CheckpointError(f"{file} lacks {absent[0]}, which {INDEX} lists for it")
        if not any(key.startswith(self._hf.prefix) for key in found):  # model without a head
            return {self._hf.prefix + key if key != _HEAD else key: v for key, v in found.items()}
        return found

    def _name(self, key: str) -> str | None:
        """Return a tensor's name in `HuggingFace.names`; None: of a part that is not read."""
        for prefix, ours in self._hf.aliases.items():
            if key.startswith(prefix):
                key = ours + key.removeprefix(prefix)
        inside = self._hf.inside
        for old, new in self._hf.older_names.items():
            if key.endswith(old):
                key = key.removesuffix(old) + new
        if inside is None:
            return key
        if key.startswith(inside.others):
            return None
        language = key.startswith(inside.prefix)
        return "model." + key.removeprefix(inside.prefix) if language else key

    def _without_absent(self, config: DecoderConfig) -> DecoderConfig:
        """Return the config, without MTP layers if the files have no weights of MTP layers.

        transformers keeps MTP layers in config.json, but neither reads nor writes their weights.
        """
        layers = tuple(f"model.layers.{config.n_layers + i}." for i in range(config.mtp))
        layers = (self._hf.mtp_prefix,) if layers and self._hf.mtp_prefix else layers
        if not layers or any(key.startswith(layers) for key in self._tensors):
            return config
        log.info(
            "%s: %s has %d MTP layers, but the files have no such weights; loading without MTP",
            self.path,
            CONFIG,
            config.mtp,
        )
        return config.model_copy(update={"mtp": 0})

    def _refuse_missing_layers(self) -> None:
        """Raise CheckpointError if the files have far fewer tensors than config.json implies.

        This runs before the model is built, which would take long; `_check` is exact.
        """
        least = self.config.n_layers + self.config.mtp
        if all("{expert}" in name.theirs for name in self._hf.names if ".experts." in name.ours):
            least += self.config.n_expert_layers * self.config.n_experts
        if least > len(self._tensors) + 1000:
            raise CheckpointError(
                f"{self.path}: {CONFIG} describes at least {least} tensors, but the files hold "
                f"{len(self._tensors)}"
            )

    def _check(self) -> None:
        """Raise CheckpointError if a tensor's name, shape or dtype does not fit the model."""
        wanted = hf_shapes(self.config, self.ours)
        left = [
            key
            for key in sorted(self._tensors.keys() - wanted.keys())
            if not any(matches(pattern, key) for pattern in self._hf.ignored_tensors)
            and not self._repeats(key)
        ]
        problems = {
            "is missing": sorted(wanted.keys() - self._tensors.keys()),
            "is unexpected: the model has no such tensor": left,
        }
        for problem, names in problems.items():
            if names:
                more = f" (and {counted(len(names) - 1, 'other')})" if len(names) > 1 else ""
                raise CheckpointError(f"{self.path}: {names[0]}{more} {problem}")
        for key, shape in wanted.items():
            if (stored := self._tensors[key]).shape != list(shape):
                raise CheckpointError(
                    f"{stored.path}: {key} has shape {stored.shape}, but the model of {CONFIG} has "
                    f"{list(shape)}"
                )
            if stored.dtype not in _WEIGHTS:
                weights = ", ".join(DTYPE_NAMES[dtype] for dtype in _WEIGHTS)
                raise CheckpointError(
                    f"{stored.path}: {key} is {DTYPE_NAMES[stored.dtype]}, but weights must be "
                    f"{weights}; save the model dequantised"
                )

    def _repeats(self, key: str) -> bool:
        """Whether a tensor duplicates a tensor of the model.

        That is the head of a model with tied weights, or a copy that the architecture stores.

        Raises:
            CheckpointError: the values of the two tensors differ.
        """
        copies = dict(self._hf.copies(self.config))
        reason = ", of which it must be a copy"
        if self.config.tied:
            head = locate(self._hf, self.config, "head.weight", ()).theirs
            copies = dict.fromkeys([head, *copies], "embed.weight")
            reason = f", but {CONFIG} ties them; to load both, set tie_word_embeddings to false"
        if key not in copies:
            return False
        theirs = self.ours[copies[key]].theirs
        one, other = self._tensors[key], self._tensors.get(theirs)
        if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        for start in range(0, one.shape[0], _ROWS):
            rows = (slice(start, min(start + _ROWS, one.shape[0])),)
            if not torch.equal(one[rows], other[rows]):
                raise CheckpointError(f"{self.path}: {key} differs from {theirs}{reason}")
        return True


def _language_model(given: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the config of a multimodal model's language model."""
    text = given.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config, the language model's config, is missing")
    log.info("%s: only the language model is read", where)
    tied = given.get("tie_word_embeddings")
    return dict(text) if tied is None else {**text, "tie_word_embeddings": tied}


_HEAD = "lm_head.weight"
_WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS = 4096  # rows compared at a time


def _swapped(region: Region) -> Region:
    return (*region[:-2], region[-1], region[-2]) if len(region) > 1 else region


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Return the weight files of a folder and the tensors to read from each; None: all tensors."""
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    if not (path / INDEX).is_file():
        pickled = sorted(p.name for p in path.glob("*.bin")) + sorted(
            p.name for p in path.glob("*.pt*")
        )
        why = f"; {pickled[0]} is a pickle file, which dtron never loads" if pickled else ""
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}{why}")
    mapped = read_json(path / INDEX).get("weight_map")
    if not isinstance(mapped, dict):
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    found: dict[Path, set[str] | None] = {}
    for key, name in mapped.items():
        wanted = found.setdefault(path / plain_name(name, path / INDEX), set())
        assert wanted is not None, "files of an index are listed"
        wanted.add(key)
    return found
