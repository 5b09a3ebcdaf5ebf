"""Files of a checkpoint: safetensors and a JSON index, without pickle.

    rank-R.safetensors   written by rank R; NAME@4,0 is the part of tensor NAME with offsets 4, 0
    index.json           size and SHA-256 of each file; dtype, shape and parts of each tensor

`torch.distributed.checkpoint` plans which rank writes and reads which parts (chunks) of DTensors;
this module is its storage layer. A file is written and hashed tensor by tensor, then synced to the
disk. If several ranks hold the same part, only one of them writes it."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dtron.errors import CheckpointError
from dtron.io.filesystem import Location, plain_name, read_json, size_of, write_atomically
from dtron.io.remote_path import Remote, UnreachableError
from dtron.io.safetensors_file import (
    DTYPE_NAMES,
    DTYPES_BY_NAME,
    Region,
    StoredTensor,
    StoredTensors,
    TensorSpec,
    WrittenFile,
    parse_shape,
    parse_sizes,
    reading,
    write_tensors,
)
from dtron.io.untrusted import INDEX_BYTES, sha256_of

INDEX = "index.json"
_MAX_COMPARED = 4 * 10**6
"""Maximum number of pairs of parts to compare per tensor; an index that needs more is rejected."""
_FORMAT = 1
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _WrittenPart(NamedTuple):
    """Name, size and SHA-256 of the file that holds a part of a tensor."""

    file: str
    written: WrittenFile


WriteFile = Callable[
    [Location, Mapping[str, TensorSpec], Callable[[str], torch.Tensor]], WrittenFile
]
"""Function that writes a safetensors file: (path, dtype and shape by name, function name -> tensor)
-> size and SHA-256. `write_tensors` writes in this process."""


class _UnusedHooks:
    """Methods of `dcp.StorageWriter` and `dcp.StorageReader` that do nothing in dtron."""

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: there is no state between saves or loads."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Accept any path."""
        return True


class ShardWriter(_UnusedHooks, dcp.StorageWriter):
    """Writes the files of one checkpoint into an existing folder.

    Args:
        write: function that writes this rank's file.
        run_limited: calls the function it gets, which accesses the disk, with a time limit; raises
            OSError if the call exceeds the limit.
    Raises:
        OSError: from its methods; `dcp.save` turns it into a CheckpointException on all ranks.
    """

    def __init__(
        self,
        folder: Location,
        write: WriteFile = write_tensors,
        run_limited: Callable[[Callable[[], None]], None] = lambda act: act(),
    ) -> None:
        self.folder, self._write_file, self._limited = folder, write, run_limited

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the name of each rank's file to the rank's plan."""
        return [replace(plan, storage_data=name_of_file(r)) for r, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        items = {_part_name(item.index): item for item in plan.items}
        results: list[WriteResult] = []
        if items:
            self._limited(lambda: results.extend(self._write(plan.storage_data, items, planner)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(
        self, name: str, items: Mapping[str, WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        tensors = {key: _spec_of(item) for key, item in items.items()}

        def get(key: str) -> torch.Tensor:
            data = planner.resolve_data(items[key])
            assert isinstance(data, torch.Tensor), f"{key} is not a tensor"
            return data

        place = _WrittenPart(name, self._write_file(self.folder / name, tensors, get))
        return [WriteResult(item.index, tensors[k].nbytes, place) for k, item in items.items()]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called by the coordinator when all files are complete."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        files = {place.file: place.written for place in places.values()}
        table = {
            "format": _FORMAT,
            "files": {n: {"bytes": w.bytes, "sha256": w.sha256} for n, w in files.items()},
            "tensors": {
                fqn: _index_entry(fqn, tensor, places)
                for fqn, tensor in metadata.state_dict_metadata.items()
            },
        }
        text = json.dumps(table, separators=(",", ":")) + "\n"
        self._limited(lambda: write_atomically(self.folder / INDEX, text))


def name_of_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def _part_name(index: MetadataIndex) -> str:
    """Return the name of a part in its file: NAME@OFFSETS, or NAME if all offsets are 0."""
    offsets = index.offset or ()
    return f"{index.fqn}@{','.join(map(str, offsets))}" if any(offsets) else index.fqn


def _spec_of(item: WriteItem) -> TensorSpec:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is not a tensor; checkpoints hold only tensors"
    return TensorSpec(data.properties.dtype, tuple(data.chunk.sizes))


def _index_entry(
    fqn: str, tensor: Any, places: Mapping[MetadataIndex, _WrittenPart]
) -> dict[str, Any]:
    assert isinstance(tensor, TensorStorageMetadata), f"{fqn} is not a tensor"
    parts = []
    for chunk in tensor.chunks:
        place = places[MetadataIndex(fqn, chunk.offsets)]
        parts.append([list(chunk.offsets), list(chunk.sizes), place.file])
    dtype = DTYPE_NAMES[tensor.properties.dtype]
    return {"dtype": dtype, "shape": list(tensor.size), "parts": parts}


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    files: dict[str, WrittenFile]
    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, str]
    """Name of the file that holds each part."""
    sizes: dict[MetadataIndex, torch.Size]
    """The shape of each part."""


def read_index(folder: Location) -> Index:
    """Read index.json.

    Raises:
        CheckpointError: the index is damaged, names files outside of the folder, or lists parts of
            a tensor that overlap or leave gaps.
    """
    path = folder / INDEX
    table = _table(path)
    files = _files(table, path)
    try:
        tensors, places, extents = {}, {}, {}
        for fqn, entry in table["tensors"].items():
            chunks = []
            shape = parse_shape(entry["shape"])
            for offsets, sizes, file in entry["parts"]:
                begin, extent = torch.Size(parse_sizes(offsets)), torch.Size(parse_shape(sizes))
                chunk = ChunkStorageMetadata(begin, extent)
                chunks.append(chunk)
                at = MetadataIndex(fqn, chunk.offsets)
                places[at], extents[at] = files[file] and file, chunk.sizes
            properties = TensorProperties(dtype=DTYPES_BY_NAME[entry["dtype"]])
            tensors[fqn] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None
    for fqn, tensor in tensors.items():
        if wrong := tiling_error(tensor.size, tensor.chunks):
            raise CheckpointError(f"{path} is damaged: {fqn} of shape {list(tensor.size)} {wrong}")
    return Index(files, tensors, places, extents)


def read_files(folder: Location) -> dict[str, WrittenFile]:
    """Read only the table of files in index.json. Raises CheckpointError: the file is damaged."""
    return _files(_table(folder / INDEX), folder / INDEX)


def _table(path: Location) -> dict[str, Any]:
    table = read_json(path, INDEX_BYTES)
    if table.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {table.get('format')!r}; this version of dtron reads {_FORMAT}"
        )
    return table


def _files(table: dict[str, Any], path: Location) -> dict[str, WrittenFile]:
    try:
        return {
            plain_name(name, path): WrittenFile(parse_sizes([f["bytes"]])[0], str(f["sha256"]))
            for name, f in table["files"].items()
        }
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from None


def tiling_error(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """Return an error if the parts of a tensor exceed its shape, overlap or leave gaps."""
    boxes = []
    for chunk in chunks:
        box = [(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=False)]
        same_rank = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not same_rank or any(
            a < 0 or b < a or b > n for (a, b), n in zip(box, shape, strict=True)
        ):
            return f"has a part outside of it, {list(chunk.sizes)} at {list(chunk.offsets)}"
        if math.prod(chunk.sizes):
            boxes.append(box)
    if (overlap := _overlap(boxes)) is not None:
        return f"has parts that overlap, at {[a for a, _ in overlap]}"
    missing = math.prod(shape) - sum(math.prod(b - a for a, b in box) for box in boxes)
    return f"lacks {missing} elements" if missing else None


def _overlap(boxes: list[list[tuple[int, int]]]) -> list[tuple[int, int]] | None:
    """Return a box that overlaps with another box; None: no boxes overlap.

    Sweep along the dim with the most distinct starts, so that few pairs are compared. Also return a
    box if there are more than _MAX_COMPARED pairs to compare.
    """
    if not boxes or not boxes[0]:
        return boxes[1] if len(boxes) > 1 else None
    along = max(range(len(boxes[0])), key=lambda dim: len({box[dim][0] for box in boxes}))
    active: list[list[tuple[int, int]]] = []
    left = _MAX_COMPARED
    for box in sorted(boxes, key=lambda box: box[along]):
        active = [other for other in active if other[along][1] > box[along][0]]
        if (left := left - len(active)) < 0:
            return box
        for other in active:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return box
        active.append(box)
    return None


def missing_or_short(folder: Location, files: Mapping[str, WrittenFile]) -> str | None:
    """Return an error for the first file that is missing or has the wrong size; None: all complete.

    Raises UnreachableError: the object store does not answer or denies access.
    """
    for name, written in files.items():
        try:
            size = size_of(folder / name)
        except UnreachableError:
            raise
        except OSError as error:
            return f"{name} is missing ({error.strerror or error})"
        if size != written.bytes:
            return f"{name} has {size} bytes, not {written.bytes}"
    return None


def corrupt(
    folder: Location, files: Mapping[str, WrittenFile], group: dist.ProcessGroup
) -> list[str]:
    """Compare the content of a checkpoint's files with their SHA-256; return one message per error.

    All ranks call it together. Each rank reads some of the files; all ranks return all messages.

    Raises:
        UnreachableError: on all ranks, if one rank cannot reach the object store.
    """
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    mine, wrong, unreachable = sorted(files)[rank::n_ranks], list[str](), ""
    try:
        wrong = [why for name in mine if (why := _content_error(folder / name, files[name]))]
    except UnreachableError as error:
        unreachable = str(error)
    gathered: list[tuple[list[str], str]] = [([], "")] * n_ranks
    dist.all_gather_object(gathered, (wrong, unreachable), group=group)
    for other, (_, reason) in enumerate(gathered):
        if reason:  # the checkpoint is not necessarily damaged
            raise UnreachableError(f"rank {other}: {reason}")
    return [why for rank_wrong, _ in gathered for why in rank_wrong]


def _content_error(path: Location, written: WrittenFile) -> str | None:
    try:
        found = _sha256(path)
    except UnreachableError:
        raise
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or error})"
    return None if found == written.sha256 else f"{path.name} is corrupt: its SHA-256 differs"


def _sha256(path: Location) -> str:
    if isinstance(path, Remote):
        content = hashlib.sha256()
        for block in path.blocks():
            content.update(block)
        return content.hexdigest()
    return sha256_of(path)


class StoredReader(_UnusedHooks, dcp.StorageReader):
    """Base class of the readers for `dcp.load`; a reader reads regions of stored parts."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned regions into this rank's tensors, converted to the tensors' dtypes.

        Raises CheckpointError: a float tensor is not stored as floats (`check_float`).
        """
        for item in plan.items:
            target = planner.resolve_tensor(item)
            part = self.part(item.storage_index, region_of(item))
            check_float(item.storage_index.fqn, part.dtype, target.dtype)
            target.detach().copy_(part)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def part(self, index: MetadataIndex, region: Region) -> torch.Tensor:
        """Read a region of one stored part."""
        raise NotImplementedError


def check_float(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    """Raise CheckpointError if a tensor must be stored as floats and is not.

    Other dtypes, such as float8 without its scales, would silently be converted to wrong values.
    """
    if wanted in _FLOATS and stored not in _FLOATS:
        raise CheckpointError(
            f"{name} is stored as {DTYPE_NAMES[stored]}; it has to be one of "
            f"{', '.join(DTYPE_NAMES[dtype] for dtype in _FLOATS)}"
        )


def region_of(item: ReadItem) -> Region:
    """Return the region of the stored part that `item` reads."""
    pairs = zip(item.storage_offsets, item.lengths, strict=True)
    return tuple(slice(start, start + n) for start, n in pairs)


class ShardReader(StoredReader):
    """Reads the files of a ShardWriter into tensors of any parallel layout.

    Args:
        average: read the averages of weights (`optim.ema`) under the names of weights. Buffers,
            which have none, are those of the model.

    Attributes:
        index: content of index.json.
    Raises:
        CheckpointError: the index is damaged, or has no averages.
    """

    def __init__(self, folder: Location, average: bool = False) -> None:
        self.folder, self.index = folder, read_index(folder)
        self._open: dict[str, StoredTensors] = {}
        self._names = _averages(self.index) if average else {}
        """Names in the files of tensors that are read under other names."""
        if average and not self._names:
            raise CheckpointError(
                f"{folder} has no average of weights: its run had optim.ema = 0; leave out --ema"
            )
        for alias, name in self._names.items():
            self.index.tensors[alias] = self.index.tensors[name]
            for chunk in self.index.tensors[name].chunks:
                old, new = (MetadataIndex(each, chunk.offsets) for each in (name, alias))
                self.index.places[new] = self.index.places[old]
                self.index.sizes[new] = self.index.sizes[old]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of all tensors."""
        return Metadata(dict(self.index.tensors))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises CheckpointError: the tensor is missing."""
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self.index.tensors[name].properties.dtype

    def region(self, name: str, region: Region) -> torch.Tensor:
        """Read a region of a tensor, assembled from the parts that overlap with it."""
        out = torch.empty([s.stop - s.start for s in region], dtype=self.dtype(name))
        for chunk in self.index.tensors[name].chunks:
            inside, target = [], []
            for want, first, size in zip(region, chunk.offsets, chunk.sizes, strict=True):
                low, high = max(want.start, first), min(want.stop, first + size)
                inside.append(slice(low - first, max(low, high) - first))
                target.append(slice(low - want.start, max(low, high) - want.start))
            if all(s.stop > s.start for s in inside):
                part = self.part(MetadataIndex(name, chunk.offsets), tuple(inside))
                out[tuple(target)] = part
        return out

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned regions into this rank's tensors; read each file from start to end."""
        files: dict[str, list[tuple[ReadItem, StoredTensor, Region]]] = {}
        for item in plan.items:
            part = item, self._stored(item.storage_index), region_of(item)
            files.setdefault(self.index.places[item.storage_index], []).append(part)
        for name, parts in files.items():
            parts.sort(key=lambda part: part[1].extent(part[2]))
            self._open[name].plan([(stored, region) for _, stored, region in parts])
        items = [item for parts in files.values() for item, _, _ in parts]
        return super().read_data(replace(plan, items=items), planner)

    def part(self, index: MetadataIndex, region: Region) -> torch.Tensor:
        """Read a region of one stored part.

        Raises CheckpointError: the part's dtype or shape in the file differs from the index.
        """
        stored = self._stored(index)
        with reading(stored.path):
            return stored[region]

    def _stored(self, index: MetadataIndex) -> StoredTensor:
        name = self.index.places[index]
        with reading(self.folder / name):
            if name not in self._open:
                self._open[name] = StoredTensors(self.folder / name)
            own = replace(index, fqn=self._names.get(index.fqn, index.fqn))
            stored = self._open[name].get_slice(_part_name(own))
            dtype = DTYPE_NAMES[self.index.tensors[index.fqn].properties.dtype]
            wanted = (dtype, list(self.index.sizes[index]))
            if (found := (DTYPE_NAMES[stored.dtype], stored.shape)) != wanted:
                raise ValueError(f"{index.fqn} is {found[0]} {found[1]} in {name}, not {wanted}")
            return stored


def _averages(index: Index) -> dict[str, str]:
    """Return the name of each weight's average by the name of the weight."""
    weights = [name.removeprefix("model.") for name in index.tensors if name.startswith("model.")]
    names = {f"model.{fqn}": f"optimizer.state.{fqn}.ema" for fqn in weights}
    return {weight: name for weight, name in names.items() if name in index.tensors}


def tensor_metadata(dtype: torch.dtype, shape: Sequence[int]) -> TensorStorageMetadata:
    """Return the metadata of a tensor that is stored in one part."""
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [whole])
