"""Write weights in Hugging Face's format, one tensor in memory at a time.

Each rank can write some of the files of one folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtron.io.filesystem import sync_directory, write_atomically
from dtron.io.safetensors_file import Region, TensorSpec, full_region, write_tensors
from dtron.models.config import DecoderConfig
from dtron.models.hf import HuggingFace
from dtron.models.hf_weights import (
    CONFIG,
    INDEX,
    SINGLE,
    WeightLocation,
    hf_shapes,
    is_gamma,
    weight_locations,
)


class HFExport:
    """Writer of a model in Hugging Face's format.

    Attributes:
        files: names of the tensors in each file, in order.
    Args:
        hf: translation table of the model family.
        config: config of the model.
        model: on any device; gives names and shapes.
        dtype_of: FQN -> dtype in the files; saved buffers keep their dtype.
        get: (FQN, region) -> the values of the parameter in this region, on any device.
        file_bytes: maximum size of a file in bytes, unless one tensor is larger.
    Raises:
        CheckpointError: transformers does not support the config; the message names the field.
    """

    def __init__(
        self,
        hf: HuggingFace,
        config: DecoderConfig,
        model: nn.Module,
        dtype_of: Callable[[str], torch.dtype],
        get: Callable[[str, Region], Tensor],
        file_bytes: int,
    ) -> None:
        self.config_json = hf.write(config)
        ours = weight_locations(hf, config, model)
        kind = str(dtype_of(next(iter(ours)))).removeprefix("torch.")
        self.config_json |= {"dtype": kind, "torch_dtype": kind}
        self._config, self._get, self._zero_centered = config, get, hf.zero_centered
        self._sources: dict[str, list[tuple[str, WeightLocation, int]]] = {}
        for fqn, each in ours.items():
            for number, theirs in enumerate(each.tensor_names()):
                self._sources.setdefault(theirs, []).append((fqn, each, number))
        shapes = hf_shapes(config, ours)
        for theirs, fqn in hf.copies(config).items():
            fqn = fqn if fqn in ours else "embed.weight"  # the head of a tied model
            self._sources[theirs] = [(fqn, ours[fqn], 0)]
            shapes[theirs] = shapes[ours[fqn].theirs]
        self._tensors = {}
        for key, shape in shapes.items():
            fqn, each, _ = self._sources[key][0]
            self._tensors[key] = TensorSpec(each.dtype or dtype_of(fqn), shape)
        self.files = list(_filled(self._tensors, file_bytes))

    def name(self, number: int) -> str:
        """Return the name of file `number`."""
        n = len(self.files)
        return SINGLE if n == 1 else f"model-{number + 1:05}-of-{n:05}.safetensors"

    def write(self, folder: Path, numbers: Sequence[int]) -> None:
        """Write the files with these numbers. Raises OSError: a file cannot be written."""
        for number in numbers:
            tensors = {key: self._tensors[key] for key in self.files[number]}
            write_tensors(folder / self.name(number), tensors, self._tensor, {"format": "pt"})

    def write_json(self, folder: Path) -> None:
        """Write config.json and, if the weights are in several files, the index.

        Raises OSError: a file cannot be written.
        """
        write_atomically(folder / CONFIG, _text(self.config_json))
        if len(self.files) > 1:
            total = sum(described.nbytes for described in self._tensors.values())
            weight_map = {key: self.name(i) for i, keys in enumerate(self.files) for key in keys}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_atomically(folder / INDEX, _text(index))
        sync_directory(folder)

    def _tensor(self, theirs: str) -> Tensor:
        """Assemble the tensor with Hugging Face name `theirs` from dtron's parameters."""
        described = self._tensors[theirs]
        sources = self._sources[theirs]
        if len(sources) == 1 and not sources[0][1].name.transposed and not sources[0][1].name.rows:
            fqn, each, number = sources[0]
            return self._mine(fqn, each, number).to(described.dtype)
        out = torch.empty(list(described.shape), dtype=described.dtype)
        for fqn, each, number in sources:
            mine, name = self._mine(fqn, each, number), each.name
            swap = name.transposed and out.dim() > 1
            target = out.transpose(-1, -2) if swap else out
            rows = range(mine.shape[name.dim])
            if name.rows is not None:
                rows = name.rows(self._config, mine.shape[name.dim])
            target.index_copy_(name.dim, torch.tensor(rows), mine.to(out.dtype).cpu())
        return out

    def _mine(self, fqn: str, each: WeightLocation, number: int) -> Tensor:
        region = full_region(each.shape)
        if each.stacked:
            return self._get(fqn, (slice(number, number + 1), *region[1:]))[0]
        mine = self._get(fqn, region)
        added = int(self._config.norm_zero_centered) - int(self._zero_centered)
        return mine.float() + added if added and is_gamma(fqn) else mine


def _filled(tensors: Mapping[str, TensorSpec], file_bytes: int) -> Iterator[list[str]]:
    """Split tensor names, in order, into files of at most `file_bytes` or of one tensor."""
    keys: list[str] = []
    size = 0
    for key, described in tensors.items():
        if keys and size + described.nbytes > file_bytes:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += described.nbytes
    yield keys


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
