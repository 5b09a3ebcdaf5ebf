"""dtron.json, the metadata of a checkpoint: type, writing and reading.

dtron.json has a checksum of itself and of the index; the index has checksums of all files.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field, TypeAdapter, ValidationError

from dtron.checkpoint.dcp_storage import INDEX
from dtron.errors import CheckpointError, first_failure
from dtron.io.filesystem import Location, read, read_json, sync_directory, write_atomically
from dtron.io.remote_path import Remote, UnreachableError
from dtron.io.untrusted import INDEX_BYTES

METADATA = "dtron.json"
_STEP = re.compile(r"[0-9]{1,18}")
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Key = Annotated[str, Field(pattern=r"^\w+\.\w+$")]
_ENTRIES: dict[str, dict[str, Any]] = {
    "data": {"sequence": _Count},
    "settings": {"train.seq_len": Annotated[int, Field(gt=0, le=2**31)]},
    "schedule": {"train.steps": _Count, "warmup_steps": _Count, "optim.lr": float},
    "best": {"metric": str, "loss": float, "step": _Count, "since": _Count},
    "faults": {"rollbacks": _Count, "spikes": dict[str, float]},
}
"""Types of entries in the dicts of dtron.json, by field and key; checked by `_entry_error`."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint, the content of dtron.json."""

    step: _Count
    """Number of completed steps."""
    tokens: _Count
    """Number of tokens trained on."""
    skipped: _Count
    """Number of steps skipped because of non-finite gradients."""
    world_size: _Count
    skipped_in_a_row: _Count
    """Number of consecutive skipped steps, up to this step."""
    settings: dict[str, Any]
    """Keys of the run's config that the saved state depends on, with their values."""
    model: dict[str, Any]
    """Name and resolved config of the model."""
    data: dict[str, int | str]
    """State of the data loader."""
    faults: dict[str, Any] = field(default_factory=dict)
    """State of the run's guards: means of the loss, number of rollbacks."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Keys of the run's config that learning rates depend on, and `warmup_steps`."""
    best: dict[str, Any] = field(default_factory=dict)
    """State of `BestLoss`: metric, loss and step of the best validation, and the number of
    validations since."""
    automatic: dict[_Key, Any] = field(default_factory=dict)
    """Keys of the run's config that were chosen automatically, with their values."""

    @classmethod
    def of_weights(cls, model: dict[str, Any], world_size: int) -> "CheckpointMetadata":
        """Make the metadata of a checkpoint of weights only."""
        return cls(0, 0, 0, world_size, 0, {}, model, {})

    @property
    def weights_only(self) -> bool:
        """Whether the checkpoint has weights only, so that training cannot resume from it."""
        return not self.data


def _entry_error(metadata: CheckpointMetadata) -> str | None:
    """Return an error for the first invalid entry of _ENTRIES; None: all are valid.

    Entries may be missing, except those of a non-empty `schedule` or `best`.
    """
    for name, kinds in _ENTRIES.items():
        found = getattr(metadata, name)
        for key, kind in kinds.items():
            if key not in found and not (found and name in ("schedule", "best")):
                continue
            try:
                TypeAdapter(kind).validate_python(found.get(key), strict=True)
            except ValidationError as error:
                return f"{name}: {key} = {found.get(key)!r}: {error.errors()[0]['msg']}"
    return None


def share(path: Location, group: dist.ProcessGroup) -> Location:
    """Broadcast rank 0's listing and small files of a checkpoint in an object store.

    All ranks call it together.

    Returns:
        The path with rank 0's answers, so that other ranks send no requests for them. A local path
        is returned unchanged.
    """
    if not isinstance(path, Remote):
        return path
    known = [path.snapshot()]
    dist.broadcast_object_list(known, src=0, group=group)
    return path.with_snapshot(known[0])


def write_metadata(path: Location, metadata: CheckpointMetadata) -> None:
    """Write dtron.json, which marks the folder as a complete checkpoint.

    Raises OSError: the file cannot be written.
    """
    content = asdict(metadata)
    content["sha256"] = _checksum(path, content)
    sync_directory(path)
    write_atomically(path / METADATA, json.dumps(content, indent=1) + "\n")


def read_metadata(path: Location) -> CheckpointMetadata:
    """Read dtron.json of a checkpoint.

    Raises:
        CheckpointError: dtron.json or the index cannot be read, their checksum is wrong, or the
            folder's name has a different step.
        UnreachableError: the object store does not answer.
    """
    content = read_json(path / METADATA)
    checksum = content.pop("sha256", None)
    try:
        if checksum != _checksum(path, content):
            raise CheckpointError(
                f"{path}: {METADATA} or {INDEX} is corrupt: their SHA-256 differs"
            )
        found = TypeAdapter(CheckpointMetadata).validate_python(content)
        if wrong := _entry_error(found):
            raise CheckpointError(f"{path / METADATA} is damaged: {wrong}")
    except UnreachableError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{path / METADATA} is damaged: {first_failure(error)}") from None
    if step_of(path) not in (0, found.step) and not found.weights_only:
        raise CheckpointError(
            f"{path}: {METADATA} is of step {found.step}; rename the folder to step-{found.step}"
        )
    return found


def _checksum(path: Location, metadata: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's metadata and index.

    The index has the SHA-256 of each file.
    """
    text = json.dumps(metadata, sort_keys=True).encode()
    return hashlib.sha256(text + read(path / INDEX, INDEX_BYTES)).hexdigest()


def check_model(path: Location, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that a checkpoint is of this model. Raises CheckpointError with the differences."""
    keys = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    if keys:
        shown = ", ".join(f"{k}: {saved.get(k)!r}, not {wanted.get(k)!r}" for k in keys[:4])
        raise CheckpointError(f"{path} is of another model ({shown}); set the same model")


def identity(path: Location) -> tuple[str, str]:
    """Return the name of a checkpoint and the SHA-256 of its metadata."""
    file = path / METADATA
    return path.name, hashlib.sha256(read(file)).hexdigest() if file.exists() else ""


def step_of(path: Location) -> int:
    """Return N for a folder step-N; 0 for any other name."""
    number = path.name.removeprefix("step-")
    return int(number) if _STEP.fullmatch(number) and number != path.name else 0
