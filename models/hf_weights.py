"""Reading weights in Hugging Face's format, slice by slice.

`placed` says where each of our parameters lies in their tensors. A `Folder` is checked when it is
opened: every tensor of the model is there with its shape, and no other one. Its `read` gives a
region of one of our parameters and reads no more than that.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dtron.errors import CheckpointError, cause_of, nearest
from dtron.io.filesystem import plain_name, read_json
from dtron.io.safetensors_file import DTYPE_NAMES, DTYPES_BY_NAME, StoredTensors
from dtron.models.config import DecoderConfig
from dtron.models.hf import HuggingFace, Name
from dtron.parallelisms.placement import matches

log = logging.getLogger("dtron")

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Region = tuple[slice, ...]
"""Of each dim from where to where, without steps."""


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return tuple(slice(0, n) for n in shape)


@dataclass(frozen=True)
class Placed:
    """One of our parameters and where it lies in their tensors."""

    shape: tuple[int, ...]
    name: Name
    theirs: str
    """With `{expert}` still in it."""
    dtype: torch.dtype | None = None
    """Of a saved buffer, which no conversion changes; None: a parameter, of any dtype."""

    @property
    def stacked(self) -> bool:
        """Whether each index of dim 0 is a tensor of theirs."""
        return "{expert}" in self.theirs

    def tensors(self) -> list[str]:
        """Names of the tensors of theirs that hold it."""
        if not self.stacked:
            return [self.theirs]
        return [self.theirs.format(expert=i) for i in range(self.shape[0])]

    def one_shape(self) -> tuple[int, ...]:
        """Shape of what lies in one of their tensors."""
        return self.shape[1:] if self.stacked else self.shape


def placed(hf: HuggingFace, model: nn.Module) -> dict[str, Placed]:
    """Where all parameters and saved buffers of a model are in Hugging Face's format, by FQN; of a
    tied weight the first."""
    buffers = {id(b) for _, b in model.named_buffers()}
    owned = {id(p) for _, p in model.named_parameters()} | buffers
    found: dict[str, Placed] = {}
    for fqn, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in owned:
            owned.remove(id(tensor))
            kept = tensor.dtype if id(tensor) in buffers else None
            found[fqn] = replace(_place(hf, fqn, tuple(tensor.shape)), dtype=kept)
    return found


def _place(hf: HuggingFace, fqn: str, shape: tuple[int, ...]) -> Placed:
    path, _, kind = fqn.rpartition(".")
    for name in hf.names:
        for candidate, suffix in ((fqn, ""), (path, f".{kind}")):
            if matches(name.ours, candidate):
                layers = [
                    part
                    for star, part in zip(name.ours.split("."), candidate.split("."), strict=True)
                    if star == "*"
                ]
                theirs = name.theirs.replace("*", layers[0] if layers else "*") + suffix
                return Placed(shape, name, theirs)
    raise AssertionError(f"{hf.architecture} has no name for {fqn}")


def their_shapes(config: DecoderConfig, ours: Mapping[str, Placed]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of theirs."""
    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for each in ours.values():
        one, dim = list(each.one_shape()), each.name.dim
        for theirs in each.tensors():
            shape = list(one)
            if each.name.rows is not None:
                rows[theirs] = rows.get(theirs, 0) + shape[dim]
                shape[dim] = rows[theirs]
            if each.name.transposed and len(shape) > 1:
                shape[-1], shape[-2] = shape[-2], shape[-1]
            shapes[theirs] = tuple(shape)
    return shapes


@dataclass(frozen=True)
class Family:
    """A row of MODELS, as far as this format needs it."""

    name: str
    hf: HuggingFace
    build: Callable[[DecoderConfig], nn.Module]


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def is_gamma(fqn: str) -> bool:
    """Whether it is the weight of a norm."""
    return fqn.endswith("norm.weight")


class Folder:
    """A model in Hugging Face's format.

    Attributes:
        family: name of its row in MODELS.
        config: what config.json says.
        ours: where each of our parameters is.
    Args:
        path: the folder.
        families: rows of MODELS that have a name in this format, by `model_type`.
        zero_centered: give weights of norms as gamma - 1, as `norm_zero_centered` wants them.
    Raises:
        CheckpointError: it is not such a folder, the model is not one of dtron's, or a tensor is
            missing, left over, of another shape or not of a dtype that weights have; names it.
    """

    def __init__(
        self, path: Path, families: Mapping[str, Family], zero_centered: bool = False
    ) -> None:
        self.path, self._zero_centered = path, zero_centered
        given = read_json(path / CONFIG)
        kind = str(given.get("model_type"))
        if kind not in families:
            raise CheckpointError(
                f"{path / CONFIG}: model_type = {kind!r} is none of dtron's models"
                f"{nearest(kind, families)}; there are {', '.join(families)}"
            )
        family = families[kind]
        self.family, self._hf = family.name, family.hf
        self._open: dict[Path, StoredTensors] = {}
        self._tensors = self._headers()
        self.config = self._without_absent(family.hf.read(given, str(path / CONFIG)))
        self._refuse_missing_layers()
        with torch.device("meta"):
            self.ours = placed(family.hf, family.build(self.config))
        self._check()

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which each of our parameters is stored, and that of each saved buffer."""
        return {
            fqn: each.dtype or self._tensors[each.tensors()[0]].dtype
            for fqn, each in self.ours.items()
        }

    def read(self, fqn: str, region: Region) -> Tensor:
        """A part of one of our parameters: a copy on the host, of its dtype in `dtypes`, or
        float32 where gamma - 1 is asked for.

        Args:
            region: of our parameter, one slice a dim.
        """
        each = self.ours[fqn]
        if not each.stacked:
            part = self._read_one(each, each.theirs, region)
            if each.dtype is not None:
                return part.to(each.dtype)
            return part.float() - 1 if self._zero_centered and is_gamma(fqn) else part
        experts = range(region[0].start, region[0].stop)
        parts = [self._read_one(each, each.theirs.format(expert=i), region[1:]) for i in experts]
        if parts:
            return torch.stack(parts)
        return torch.empty([s.stop - s.start for s in region], dtype=self.dtypes[fqn])

    def _read_one(self, each: Placed, theirs: str, region: Region) -> Tensor:
        name, dim = each.name, each.name.dim
        rows: Sequence[int] = ()
        if name.rows is not None:
            rows = name.rows(self.config, each.one_shape()[dim])[region[dim]]
            around = slice(min(rows), max(rows) + 1) if rows else slice(0, 0)
            region = (*region[:dim], around, *region[dim + 1 :])
        part = self._slice(theirs, _swapped(region) if name.transposed else region)
        if name.transposed and len(region) > 1:
            part = part.transpose(-1, -2)
        if rows:
            part = part.index_select(dim, torch.tensor(rows) - min(rows))
        return part.contiguous()

    def _slice(self, theirs: str, region: Region) -> Tensor:
        """A part of a tensor of theirs."""
        stored = self._tensors[theirs]
        try:
            return self._open[stored.file].get_slice(stored.key)[region]
        except (OSError, ValueError) as error:
            cause = cause_of(error, stored.file)
            raise CheckpointError(f"{stored.file} cannot be read: {cause}") from None

    def _headers(self) -> dict[str, _Stored]:
        found: dict[str, _Stored] = {}
        for file, listed in _files(self.path).items():
            try:
                reader = self._open[file] = StoredTensors(file)
                keys = reader.keys() if listed is None else listed & reader.keys()
                headers = {key: reader.get_slice(key) for key in keys}
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file} cannot be read: {cause_of(error, file)}") from None
            if listed is not None and (absent := sorted(listed - keys)):
                raise CheckpointError(f"{file} lacks {absent[0]}, which {INDEX} says is there")
            for key, header in headers.items():
                dtype = DTYPES_BY_NAME[header.get_dtype()]
                found[key] = _Stored(file, key, dtype, tuple(header.get_shape()))
        if not any(key.startswith(self._hf.prefix) for key in found):  # the model without its head
            return {self._hf.prefix + key if key != _HEAD else key: v for key, v in found.items()}
        return found

    def _without_absent(self, config: DecoderConfig) -> DecoderConfig:
        """Without layers that predict further tokens where the files lack them: transformers speaks
        of them in config.json and neither reads nor writes them."""
        layers = tuple(f"model.layers.{config.n_layers + i}." for i in range(config.mtp))
        if not layers or any(key.startswith(layers) for key in self._tensors):
            return config
        log.info(
            "%s: %s speaks of %d layers that predict further tokens, which the files lack",
            self.path,
            CONFIG,
            config.mtp,
        )
        return config.model_copy(update={"mtp": 0})

    def _refuse_missing_layers(self) -> None:
        """Before a model of as many layers and experts as config.json names is built, which takes
        long. Raises CheckpointError: the files hold far fewer tensors; `_check` names one."""
        least = self.config.n_layers + self.config.mtp
        if any("{expert}" in name.theirs for name in self._hf.names):
            least += self.config.n_expert_layers * self.config.n_experts
        if least > len(self._tensors) + 1000:
            raise CheckpointError(
                f"{self.path}: {CONFIG} describes at least {least} tensors, and the files hold "
                f"{len(self._tensors)}"
            )

    def _check(self) -> None:
        """All tensors are there, with their shapes, and no others. Raises CheckpointError."""
        wanted = their_shapes(self.config, self.ours)
        left = [
            key
            for key in sorted(self._tensors.keys() - wanted.keys())
            if not any(matches(pattern, key) for pattern in self._hf.constants)
            and not self._repeats(key)
        ]
        problems = {
            "is missing": sorted(wanted.keys() - self._tensors.keys()),
            "is left over: the model has no such tensor": left,
        }
        for problem, names in problems.items():
            if names:
                more = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
                raise CheckpointError(f"{self.path}: {names[0]}{more} {problem}")
        for key, shape in wanted.items():
            if (stored := self._tensors[key]).shape != shape:
                raise CheckpointError(
                    f"{stored.file}: {key} has shape {list(stored.shape)}, and the model of "
                    f"{CONFIG} has {list(shape)}"
                )
            if stored.dtype not in _WEIGHTS:
                found, weights = (
                    DTYPE_NAMES[stored.dtype],
                    ", ".join(DTYPE_NAMES[d] for d in _WEIGHTS),
                )
                raise CheckpointError(
                    f"{stored.file}: {key} is {found}, and weights are {weights}; save the model "
                    "dequantised"
                )

    def _repeats(self, key: str) -> bool:
        """Whether it is another tensor once more: the head of a model whose head is the embedding,
        or a copy that the architecture stores."""
        copies = dict(self._hf.copies(self.config))
        reason = ""
        if self.config.tied:
            copies = dict.fromkeys([_HEAD, *copies], "embed.weight")
            reason = f", to which tie_word_embeddings ties it in {CONFIG}"
        if key not in copies:
            return False
        theirs = self.ours[copies[key]].theirs
        one, other = self._tensors[key], self._tensors.get(theirs)
        if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        views = [self._open[t.file].get_slice(t.key) for t in (one, other)]
        for start in range(0, one.shape[0], _ROWS):
            rows = (slice(start, min(start + _ROWS, one.shape[0])),)
            ours, its = (view[rows] for view in views)
            if not torch.equal(ours, its):
                raise CheckpointError(f"{self.path}: {key} differs from {theirs}{reason}")
        return True


_HEAD = "lm_head.weight"
_WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS = 4096  # compared at once


def _swapped(region: Region) -> Region:
    return (*region[:-2], region[-1], region[-2]) if len(region) > 1 else region


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Weight files of a folder and the tensors that its index wants of each; None: all of it."""
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    if not (path / INDEX).is_file():
        pickled = sorted(p.name for p in path.glob("*.bin")) + sorted(
            p.name for p in path.glob("*.pt*")
        )
        why = f"; {pickled[0]} is a pickle, which dtron never loads" if pickled else ""
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
