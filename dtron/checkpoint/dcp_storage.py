"""Files of a checkpoint: safetensors and a JSON index, without pickle.

    rank-R.safetensors   written by rank R; NAME@4,0 is the part of tensor NAME that starts at 4, 0
    index.json           size and SHA-256 of each file; dtype, shape and parts of each tensor

`torch.distributed.checkpoint` plans which rank writes and reads which parts of DTensors; this is
its storage. A file is written tensor by tensor, hashed while it is written, and synced. If several
ranks hold the same part, one of them writes it."""

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
from dtron.io.untrusted import INDEX_BYTES, open_regular

INDEX = "index.json"
_MAX_COMPARED = 4 * 10**6
"""Most pairs of parts of one tensor that are compared; a malicious index may have more."""
_FORMAT = 1
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _WrittenPart(NamedTuple):
    """The file of a part of a tensor."""

    file: str
    written: WrittenFile


WriteFile = Callable[
    [Location, Mapping[str, TensorSpec], Callable[[str], torch.Tensor]], WrittenFile
]
"""Writes a safetensors file: (path, dtype and shape by name, function name -> tensor);
`write_tensors` does so in this process."""


def run_unlimited(act: Callable[[], None]) -> None:
    """Call a function without a time limit."""
    act()


class ShardWriter(dcp.StorageWriter):
    """Writes the files of one checkpoint into an existing folder.

    Args:
        write: writes this rank's file.
        run_limited: calls a disk access, and raises OSError if it takes too long.
    Raises:
        OSError: within `dcp.save`, which raises a CheckpointException on all ranks.
    """

    def __init__(
        self,
        folder: Location,
        write: WriteFile = write_tensors,
        run_limited: Callable[[Callable[[], None]], None] = run_unlimited,
    ) -> None:
        self.folder, self._write_file, self._limited = folder, write, run_limited

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: there is no state between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank its file."""
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

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Accept any path."""
        return True


def name_of_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def _part_name(index: MetadataIndex) -> str:
    """Return the name of a part in its file; a whole tensor has its own name."""
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
    """The file of each part."""
    sizes: dict[MetadataIndex, torch.Size]
    """The shape of each part."""


def read_index(folder: Location) -> Index:
    """Read index.json.

    Raises:
        CheckpointError: it is damaged, names files outside of the folder, or the parts of a tensor
            do not cover it exactly once.
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
    """Read only the table of files in index.json. Raises CheckpointError: it is damaged."""
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
    """Return why the parts of a tensor do not cover each element exactly once; None: they do."""
    boxes = []
    for chunk in chunks:
        box = [(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=False)]
        same_rank = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not same_rank or any(
            a < 0 or b < a or b > n for (a, b), n in zip(box, shape, strict=True)
        ):
            return f"has a part that is not inside it, {list(chunk.sizes)} at {list(chunk.offsets)}"
        if math.prod(chunk.sizes):
            boxes.append(box)
    if (overlap := _overlap(boxes)) is not None:
        return f"has parts that overlap, at {[a for a, _ in overlap]}"
    missing = math.prod(shape) - sum(math.prod(b - a for a, b in box) for box in boxes)
    return f"lacks {missing} elements" if missing else None


def _overlap(boxes: list[list[tuple[int, int]]]) -> list[tuple[int, int]] | None:
    """Return a box that overlaps with another one; None: there is none.

    The boxes are swept along the dim with the most different starts, so that few are compared.
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
    """Return the first missing file, or file of a wrong size; None: there is none.

    Raises UnreachableError.
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

    All ranks call it together; each reads some of the files, and all return the same.

    Raises:
        UnreachableError: on all ranks; one of them cannot reach the store.
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
        if reason:  # this does not show that the checkpoint is damaged
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
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


class StoredReader(dcp.StorageReader):
    """Base class of readers, which know all tensors from their construction on."""

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: there is no state between loads."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plan unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Accept any path."""
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned regions into this rank's tensors, converted to their dtype.

        Raises CheckpointError: a tensor that has to be of floats is not.
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
    """Check that a tensor of floats is stored as one: values of other dtypes, or without their
    scales, would be converted silently. Raises CheckpointError."""
    if wanted in _FLOATS and stored not in _FLOATS:
        raise CheckpointError(
            f"{name} is stored as {DTYPE_NAMES[stored]}; it has to be one of "
            f"{', '.join(DTYPE_NAMES[dtype] for dtype in _FLOATS)}"
        )


def region_of(item: ReadItem) -> Region:
    """Return the region of a stored part that is read."""
    pairs = zip(item.storage_offsets, item.lengths, strict=True)
    return tuple(slice(start, start + n) for start, n in pairs)


class ShardReader(StoredReader):
    """Reads the files of a ShardWriter, in any layout.

    Attributes:
        index: content of index.json.
    Raises:
        CheckpointError: the index is damaged.
    """

    def __init__(self, folder: Location) -> None:
        self.folder, self.index = folder, read_index(folder)
        self._open: dict[str, StoredTensors] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of all tensors."""
        return Metadata(dict(self.index.tensors))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises CheckpointError: it is missing."""
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
        """Copy the planned regions into this rank's tensors, in the order of the files."""
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
        """Read a region of one stored part. Raises CheckpointError: file and index differ."""
        stored = self._stored(index)
        with reading(stored.path):
            return stored[region]

    def _stored(self, index: MetadataIndex) -> StoredTensor:
        name = self.index.places[index]
        with reading(self.folder / name):
            if name not in self._open:
                self._open[name] = StoredTensors(self.folder / name)
            stored = self._open[name].get_slice(_part_name(index))
            dtype = DTYPE_NAMES[self.index.tensors[index.fqn].properties.dtype]
            wanted = (dtype, list(self.index.sizes[index]))
            if (found := (DTYPE_NAMES[stored.dtype], stored.shape)) != wanted:
                raise ValueError(f"{index.fqn} is {found[0]} {found[1]} in {name}, not {wanted}")
            return stored


def tensor_metadata(dtype: torch.dtype, shape: Sequence[int]) -> TensorStorageMetadata:
    """Return the metadata of a tensor that is stored in one part."""
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [whole])
