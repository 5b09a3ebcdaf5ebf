"""`dtron serve-check`: compare a checkpoint's logits with those of its export in transformers.

The checkpoint's weights run in dtron's unsharded model, the export in transformers. It runs in one
process, which holds one of the two models at a time.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtron.checkpoint.convert import to_hf_folder
from dtron.checkpoint.dcp_storage import ShardReader
from dtron.checkpoint.find import find_weights
from dtron.checkpoint.initial_weights import InitialWeights, check_named, open_initial
from dtron.errors import ArgumentParser, CheckpointError, ConfigError
from dtron.io.filesystem import Location, is_file, read_json
from dtron.io.safetensors_file import Region, full_region
from dtron.lora.adapters import is_adapter, merging
from dtron.models import AttentionNeeds, build_model, choose_backend, fill_model, model_spec
from dtron.models.hf_weights import CONFIG
from dtron.run.process import Place, process_group
from dtron.run.rendezvous import meet

_TIMEOUT_SECONDS = 24 * 3600
_RANGES = 8
"""Rows of the table by position."""


@dataclass(frozen=True)
class Bound:
    """Largest difference that a dtype explains.

    The difference of a position is the norm of the difference of its logits over the norm of the
    logits of transformers.
    """

    dtype: torch.dtype
    largest: float
    """Of any position. Infinite in bfloat16: a router may choose another expert for a token."""
    mean: float
    """Over all positions."""


BOUNDS = {
    "float32": Bound(torch.float32, largest=1e-4, mean=1e-5),
    "bfloat16": Bound(torch.bfloat16, largest=float("inf"), mean=0.05),
}


def main(arguments: Sequence[str]) -> int:
    """Run `dtron serve-check`; return 1 if a difference exceeds its bound."""
    given = _parser().parse_args(arguments)
    place = Place.of_environment()
    if place.world_size > 1:
        raise ConfigError("dtron serve-check runs in one process; start it without torchrun")
    with process_group(place, _TIMEOUT_SECONDS, meet(place, _TIMEOUT_SECONDS).store):
        initial = open_initial(find_weights(given.checkpoint))
        check_named(initial.path, initial.name, given.model, "add --model ")
        if initial.config.encoder_layers:
            raise ConfigError(
                f"{given.checkpoint}: dtron serve-check does not compare encoder-decoders; use "
                "dtron convert to-hf"
            )
        with _exported(initial.path, given) as folder:
            tokens = _tokens(given, initial)
            passed = [_compare(name, initial, folder, tokens, place.device) for name in BOUNDS]
    return 0 if all(passed) else 1


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="dtron serve-check", description=__doc__)
    parser.add_argument("checkpoint", help="path or URL of a checkpoint, or a run with checkpoints")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="folder of dtron convert to-hf; default: export to a temporary folder",
    )
    parser.add_argument(
        "--tokens",
        default="",
        metavar="IDS",
        help="token ids, separated by commas; default: random",
    )
    parser.add_argument("--length", type=int, default=64, help="random tokens; default: 64")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens; default: 0")
    custom = "model.name of a custom model, MODULE:NAME, whose code runs"
    parser.add_argument("--model", default="", metavar="NAME", help=custom)
    return parser


@contextmanager
def _exported(checkpoint: Location, given: argparse.Namespace) -> Iterator[Path]:
    """Context manager: the folder to check."""
    if given.export is not None:
        if not is_file(given.export / CONFIG):
            raise CheckpointError(
                f"--export {given.export} has no {CONFIG}; give an export's folder"
            )
        yield given.export
        return
    with tempfile.TemporaryDirectory(prefix="dtron-serve-check-") as folder:
        to_hf_folder(checkpoint, Path(folder) / "export", name=given.model)
        yield Path(folder) / "export"


def _tokens(given: argparse.Namespace, initial: InitialWeights) -> Tensor:
    """Return the tokens to compare at, int64 (1, T)."""
    size, most = initial.config.vocab_size, initial.config.max_seq_len
    if not given.tokens:
        if not 1 <= given.length <= most:
            raise ConfigError(f"--length {given.length} is not between 1 and max_seq_len = {most}")
        generator = torch.Generator().manual_seed(given.seed)
        return torch.randint(0, size, (1, given.length), generator=generator)
    words = given.tokens.split(",")
    ids = [int(word) for word in words if word.strip().isdigit()]
    if len(ids) != len(words) or max(ids) >= size or len(ids) > most:
        raise ConfigError(
            f"--tokens {given.tokens}: give at most {most} ids from 0 to {size - 1}, such as 1,2,3"
        )
    return torch.tensor([ids])


def _compare(
    name: str, initial: InitialWeights, folder: Path, tokens: Tensor, device: torch.device
) -> bool:
    """Print the differences in one dtype; return whether they are within its bound."""
    bound = BOUNDS[name]
    stored = getattr(torch, str(read_json(folder / CONFIG).get("dtype", "float32")))
    ours = _logits(_own(initial, stored, bound.dtype, device), tokens.to(device))
    theirs = _logits(_of_transformers(folder, bound.dtype, device), tokens.to(device))
    different = differences(ours, theirs)
    largest, at = different.max(0)
    passed = bool(largest <= bound.largest and different.mean() <= bound.mean)
    print(
        f"{name}: largest difference {largest:.2e} at position {at}, mean {different.mean():.2e}; "
        f"bounds {bound.largest:g} and {bound.mean:g}: {'passed' if passed else 'FAILED'}"
    )
    width = -(-len(different) // _RANGES)
    for first in range(0, len(different), width):
        rows = different[first : first + width]
        print(f"  positions {first:5} to {first + len(rows) - 1:5}  largest {rows.max():.2e}")
    return passed


def differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the relative difference of the logits (1, T, V) by position: float64 (T,).

    NaN counts as infinite.
    """
    ours, theirs = ours[0].double(), theirs[0].double()
    relative = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-30)
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf)


@torch.no_grad()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return getattr(output, "logits", output).cpu()


def _own(
    initial: InitialWeights, stored: torch.dtype, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Return dtron's unsharded model with a checkpoint's weights and its adapters in them.

    Args:
        stored: dtype of the export, to which the weights are rounded first.
        dtype: dtype of the parameters; saved buffers stay float32.
    """
    config, reader = initial.config, ShardReader(initial.path)
    backend = choose_backend("math", AttentionNeeds.of(config, device.type, dtype))
    with torch.device("meta"):
        model = build_model(initial.name, config, backend)
    buffers = dict(model.named_buffers())

    def read(fqn: str, region: Region) -> Tensor:
        return reader.region(f"model.{fqn}", region)

    get = merging(read, model, model_spec(initial.name), initial.lora)

    def values() -> Iterator[tuple[str, Tensor]]:
        for key, tensor in reader.index.tensors.items():
            fqn = key.removeprefix("model.")
            if fqn != key and not is_adapter(fqn):
                value = get(fqn, full_region(tensor.size))
                yield fqn, value if fqn in buffers else value.to(stored).to(dtype)

    return fill_model(model, config, values(), device)


def _of_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"dtron serve-check needs transformers ({error}); run pip install 'dtron[hf]'"
        ) from None
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        cause = " ".join(str(error).split())
        raise CheckpointError(f"transformers cannot load {folder}: {cause}") from error
    return model.to(device).eval()
