"""`dtron convert`: convert a Hugging Face folder to a checkpoint, and back.

It runs in one process or under torchrun, where each rank writes some of the files. A rank holds one
tensor in memory at a time. The output folder appears only when it is complete.
"""

import argparse
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from dtron.checkpoint.dcp_storage import ShardReader, ShardWriter, check_float
from dtron.checkpoint.find import check_agreement, check_content, find_weights
from dtron.checkpoint.initial_weights import (
    check_named,
    config_of_run,
    model_settings,
    open_initial,
)
from dtron.checkpoint.metadata import CheckpointMetadata, read_metadata, write_metadata
from dtron.checkpoint.save import first_cause
from dtron.config import Data, RunConfig
from dtron.data.corpus.chat import TEMPLATE_FILE, stated_template
from dtron.data.tokenizer import ByteTokenizer, load_tokenizer, tokenizer_file
from dtron.errors import ArgumentParser, CheckpointError, ConfigError, DataError, cause_of, counted
from dtron.io.filesystem import Location, read_json, sync_directory, write_atomically
from dtron.io.remote_path import Remote
from dtron.io.safetensors_file import Region, TensorSpec, full_region, write_tensors
from dtron.io.untrusted import TEXT_BYTES, read_bytes
from dtron.lora import peft
from dtron.lora.adapters import adapters, merging
from dtron.lora.peft import tensor_names
from dtron.models import BACKENDS, MODELS, build_model, hf_folder, hf_of, model_spec
from dtron.models.hf_export import HFExport
from dtron.models.hf_weights import CONFIG, HFFolder
from dtron.run.process import Place, process_group, set_up_logging
from dtron.run.rendezvous import meet

log = logging.getLogger("dtron")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE_FILE,
    "generation_config.json",
)
"""Files of a model, other than its weights, that are copied unchanged."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A tokenizer has at least one of these files."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TIMEOUT_SECONDS = 24 * 3600
_GB = 10**9


def main(arguments: Sequence[str]) -> int:
    """Run `dtron convert`; return the exit status. Raises DtronError: the conversion fails."""
    given = convert_parser().parse_args(arguments)
    place = Place.of_environment()
    set_up_logging(place, Console())
    store = meet(place, _TIMEOUT_SECONDS).store
    with process_group(place, _TIMEOUT_SECONDS, store):
        try:
            given.run(given)
        except OSError as error:
            raise CheckpointError(f"{given.out} cannot be written: {error}") from error
    return 0


def convert_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `dtron convert`."""
    parser = ArgumentParser(prog="dtron convert", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    summary = "convert a Hugging Face folder to a checkpoint for checkpoint.initial"
    one = commands.add_parser("from-hf", help=summary, description=summary)
    one.add_argument("folder", type=Path, help="folder with config.json and safetensors files")
    one.add_argument("out", type=Path, help="output folder, which must not exist")
    one.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the checkpoint; default: dtype of the files"
    )
    custom = "model.name of a custom model, MODULE:NAME, whose code runs"
    one.add_argument("--model", default="", metavar="NAME", help=custom)
    one.set_defaults(
        run=lambda given: from_hf_folder(given.folder, given.out, given.dtype, given.model)
    )
    summary = "convert a checkpoint to a folder that transformers loads; adapters are merged"
    two = commands.add_parser("to-hf", help=summary, description=summary)
    trained = "path or URL of a checkpoint, or of a run with checkpoints"
    two.add_argument("checkpoint", help=trained)
    two.add_argument("out", type=Path, help="output folder, which must not exist")
    two.add_argument(
        "--dtype", choices=_DTYPES, help="dtype of the files; default: dtype of the checkpoint"
    )
    two.add_argument(
        "--tokenizer",
        type=Path,
        help='folder of tokenizer files to copy, or "byte"; default: the tokenizer of the run',
    )
    two.add_argument(
        "--file-gb", type=float, default=5.0, help="size limit of each file, in GB; default: 5"
    )
    two.add_argument("--model", default="", metavar="NAME", help=custom)
    average = "write the averages of the weights (optim.ema)"
    two.add_argument("--ema", action="store_true", help=average)
    two.set_defaults(run=to_hf_from)
    summary = "convert the adapters of a checkpoint of LoRA to a folder that PEFT loads"
    three = commands.add_parser("to-peft", help=summary, description=summary)
    three.add_argument("checkpoint", help=trained)
    three.add_argument("out", type=Path, help="output folder, which must not exist")
    three.add_argument("--model", default="", metavar="NAME", help=custom)
    three.set_defaults(run=to_peft_from)
    return parser


class _StreamingPlanner(DefaultSavePlanner):
    """Plans the save of meta tensors; reads the data of each tensor only when it is written."""

    def __init__(self, folder: HFFolder, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._folder, self._dtype = folder, dtype

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Read a whole tensor from the Hugging Face folder, converted to the stored dtype."""
        fqn = index.fqn.removeprefix("model.")
        return self._folder.read(fqn).to(self._folder.dtype(fqn, self._dtype))


def from_hf_folder(folder: Path, out: Path, dtype: str | None = None, name: str = "") -> None:
    """Convert a Hugging Face folder to a checkpoint of weights; all ranks call it together.

    Args:
        name: `model.name` of a custom model; empty: a model of dtron.
    Raises:
        CheckpointError: the folder is incomplete, dtron does not support its model, or `out`
            exists.
        OSError: the disk is full.
    """
    source = hf_folder(folder, name=name)
    _check_effect(name, source.family, folder)
    stored = _DTYPES[dtype] if dtype else None
    state = {
        f"model.{fqn}": torch.empty(each.shape, dtype=source.dtype(fqn, stored), device="meta")
        for fqn, each in source.ours.items()
    }
    with _new_folder(out) as partial:
        planner = _StreamingPlanner(source, stored)
        try:
            dcp.save(state, storage_writer=ShardWriter(partial), planner=planner)
        except dcp.CheckpointException as error:
            raise first_cause(error) from error
        if dist.get_rank() == 0:
            _copy_model_files(source.path, partial)
            model = {"name": source.family, **source.config.model_dump(mode="json")}
            write_metadata(partial, CheckpointMetadata.of_weights(model, dist.get_world_size()))
    log.info("%s has the weights of %s; to train, add:", out, source.path)
    log.info("  checkpoint.initial=%s %s", out, model_settings(source.family, source.config))


def _check_effect(name: str, family: str, path: Location) -> None:
    """Raise ConfigError if --model is given for a model of dtron, or names another custom model."""
    if name and (name in MODELS or name != family):
        raise ConfigError(f"--model {name} has no effect: {path} is a {family}; leave it out")


def to_hf_from(given: argparse.Namespace) -> None:
    """Run `dtron convert to-hf`; all ranks call it together."""
    if not 0 < given.file_gb < math.inf:
        raise ConfigError(
            f"--file-gb {given.file_gb:g} is not a positive number of GB; use a size such as 5"
        )
    path = find_weights(given.checkpoint)
    everyone = dist.group.WORLD
    assert everyone is not None
    check_agreement(path, everyone)
    check_content(path, everyone)
    data = data_of_run(path)
    tokenizer = _named_tokenizer(given.tokenizer) if given.tokenizer else None
    tokenizer = tokenizer or trained_tokenizer(path, data)
    template = trained_template(data)
    size = round(given.file_gb * _GB)
    to_hf_folder(path, given.out, given.dtype, tokenizer, size, given.model, template, given.ema)


def to_peft_from(given: argparse.Namespace) -> None:
    """Run `dtron convert to-peft`; all ranks call it together, and rank 0 writes."""
    path = find_weights(given.checkpoint)
    everyone = dist.group.WORLD
    assert everyone is not None
    check_agreement(path, everyone)
    check_content(path, everyone)
    to_peft_folder(path, given.out, given.model)


def to_peft_folder(checkpoint: Location, out: Path, name: str = "") -> None:
    """Convert the adapters of a checkpoint to a folder for PEFT; all ranks call it together.

    Args:
        name: the custom model of the checkpoint, MODULE:NAME; empty: a model of dtron.
    Raises:
        ConfigError: the checkpoint is of another model than `name`.
        CheckpointError: the checkpoint has no adapters, PEFT has no name for one of them, a file
            cannot be read, or `out` exists.
    """
    initial = open_initial(checkpoint)
    check_named(initial.path, initial.name, name, "add --model ")
    _check_effect(name, initial.name, checkpoint)
    if not initial.lora.rank:
        raise CheckpointError(
            f"{checkpoint} has no adapters: its run had lora.rank = 0; use dtron convert to-hf"
        )
    hf, reader = hf_of(initial.name), ShardReader(initial.path)
    model = initial.config
    found = adapters(initial.name, model, initial.lora)
    names = tensor_names(hf, model, found, initial.lora)
    sources = {theirs: f"model.{fqn}" for fqn, theirs in names.items()}
    specs = {
        theirs: TensorSpec(reader.dtype(ours), tuple(reader.index.tensors[ours].size))
        for theirs, ours in sources.items()
    }

    def get(theirs: str) -> Tensor:
        return reader.region(sources[theirs], full_region(specs[theirs].shape))

    run = config_of_run(checkpoint)
    base = RunConfig.load(run).checkpoint.initial if run else ""
    with _new_folder(out) as partial:
        if dist.get_rank() == 0:
            write_tensors(partial / peft.WEIGHTS, specs, get, {"format": "pt"})
            content = json.dumps(peft.config_json(hf, model, found, initial.lora, base), indent=2)
            write_atomically(partial / peft.CONFIG, content + "\n")
    log.info("wrote %s of %s to %s", counted(len(found), "adapter"), checkpoint, out)


def _named_tokenizer(named: Path | str) -> Path | str:
    """Return the folder of tokenizer files that --tokenizer names, or "byte".

    Raises:
        ConfigError: the folder has no tokenizer files.
    """
    if str(named) == "byte":
        return "byte"
    folder = tokenizer_file(str(named)).parent
    files = any((folder / name).is_file() for name in _VOCABULARIES)
    if not Path(named).expanduser().exists() or not files:
        raise ConfigError(
            f"--tokenizer {named} has no tokenizer files; give a folder with one of "
            f'{", ".join(_VOCABULARIES)}, or "byte"'
        )
    return folder


def data_of_run(checkpoint: Location) -> Data | None:
    """Return the section [data] of a checkpoint's run; None: its config is missing."""
    run = config_of_run(checkpoint)
    return None if run is None else RunConfig.load(run).data


def trained_template(data: Data | None) -> str:
    """Return the chat template that a run set, which tokenizer files lack; empty: none.

    Args:
        data: from `data_of_run`.
    Raises:
        ConfigError: the template's file cannot be read.
    """
    return stated_template(data) if data is not None and data.has_chats else ""


def trained_tokenizer(checkpoint: Location, data: Data | None) -> Path | str | None:
    """Return the folder of a checkpoint's tokenizer files, or "byte"; None: unknown.

    Args:
        data: from `data_of_run`.
    Raises:
        CheckpointError: the run's tokenizer is missing, or was changed after training.
    """
    if isinstance(checkpoint, Remote):
        return None
    if (checkpoint / "tokenizer.json").is_file():
        return checkpoint
    if data is None:
        return None
    if data.tokenizer == "byte":
        return "byte"
    folder = tokenizer_file(data.tokenizer).parent
    try:
        found = load_tokenizer(data).fingerprint
    except DataError as error:
        raise CheckpointError(f"{error}; or name its folder with --tokenizer FOLDER") from None
    if found != read_metadata(checkpoint).data.get("tokenizer", found):
        raise CheckpointError(
            f"{folder} (data.tokenizer in {config_of_run(checkpoint)}) is no longer the tokenizer "
            "that the run was trained with; name the folder of that tokenizer with --tokenizer "
            "FOLDER"
        )
    log.info("tokenizer files are copied from %s (data.tokenizer of its run)", folder)
    return folder


def to_hf_folder(
    checkpoint: Location,
    out: Path,
    dtype: str | None = None,
    tokenizer: Path | str | None = None,
    file_bytes: int = 5 * _GB,
    name: str = "",
    template: str = "",
    average: bool = False,
) -> None:
    """Convert a checkpoint to a folder for transformers; all ranks call it together.

    Adapters are merged into the weights.

    Args:
        checkpoint: a folder step-N.
        dtype: dtype of the files; None: dtype of the checkpoint.
        tokenizer: a folder whose tokenizer files are copied, or "byte"; None: no tokenizer files.
        file_bytes: maximum size of each file.
        name: the custom model of the checkpoint, MODULE:NAME; empty: a model of dtron.
        template: text of chat_template.jinja; empty: that of the tokenizer files, if they have one.
        average: write the averages of the weights (`optim.ema`).
    Raises:
        ConfigError: the checkpoint is of another model than `name`.
        CheckpointError: transformers has no such model, a file cannot be read, or `out` exists.
        OSError: the disk is full.
    """
    initial, metadata = open_initial(checkpoint), read_metadata(checkpoint)
    check_named(initial.path, initial.name, name, "add --model ")
    _check_effect(name, initial.name, checkpoint)
    seq_len = metadata.settings.get("train.seq_len", 1)
    config = initial.config
    if config.positions != "learned":
        config = config.model_copy(update={"max_seq_len": max(config.max_seq_len, seq_len)})
    with torch.device("meta"):
        model = build_model(initial.name, config, BACKENDS["math"])
    hf, reader = hf_of(initial.name), ShardReader(initial.path, average)
    spec = model_spec(initial.name)
    for fqn, parameter in model.named_parameters():
        check_float(fqn, reader.dtype(f"model.{fqn}"), parameter.dtype)

    def read(fqn: str, region: Region) -> Tensor:
        return reader.region(f"model.{fqn}", region)

    get = merging(read, model, spec, initial.lora)

    def dtype_of(fqn: str) -> torch.dtype:
        return _DTYPES[dtype] if dtype else reader.dtype(f"model.{fqn}")

    export = HFExport(hf, config, model, dtype_of, get, file_bytes)
    with _new_folder(out) as partial:
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
        export.write(partial, range(rank, len(export.files), n_ranks))
        if rank == 0:
            if tokenizer is not None:
                export.config_json |= _add_tokenizer(tokenizer, partial)
                if template:
                    (partial / TEMPLATE_FILE).write_text(template, encoding="utf-8")
            export.write_json(partial)
    written = counted(len(export.files), "file")
    log.info("wrote %s for %s to %s", written, hf.architecture, out)
    if tokenizer is None:
        log.info("no tokenizer files were copied; name their folder with --tokenizer FOLDER")


def _add_tokenizer(tokenizer: Path | str, out: Path) -> dict[str, Any]:
    """Write tokenizer files to `out`; return the ids of special tokens for config.json."""
    if tokenizer == "byte":
        return _write_byte_tokenizer(out)
    _copy_model_files(Path(tokenizer), out)
    config = Path(tokenizer) / CONFIG
    there = read_json(config) if config.is_file() else {}
    return {key: there[key] for key in _TOKENS if key in there}


def _write_byte_tokenizer(out: Path) -> dict[str, Any]:
    """Write dtron's byte tokenizer for transformers; return the id of EOS for config.json."""
    eos, eos_id = "<|endoftext|>", ByteTokenizer.eos_id
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {eos: eos_id}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)
    )
    fallback, fuse = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    tokenizer.decoder = tokenizers.decoders.Sequence([fallback, fuse])  # type: ignore[assignment]
    tokenizer.add_special_tokens([eos])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    write_atomically(out / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    return {"eos_token_id": eos_id}


def _copy_model_files(folder: Path, out: Path) -> None:
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            continue
        try:
            content = read_bytes(folder / name, TEXT_BYTES)
        except OSError as error:
            cause = cause_of(error, folder / name)
            raise CheckpointError(f"{folder / name} cannot be copied: {cause}") from None
        (out / name).write_bytes(content)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Context manager: make a temporary folder for the files of all ranks.

    At the end, rename the folder to `out`; after an error, remove it.

    Raises:
        CheckpointError: `out` or the temporary folder exists.
    """
    out = out.expanduser()
    partial, first = out.with_name(out.name + ".partial"), dist.get_rank() == 0
    if out.exists():
        raise CheckpointError(f"{out} exists already; give another folder")
    if os.path.lexists(partial):
        raise CheckpointError(
            f"{partial} exists already: another conversion is writing it, or was killed; remove it "
            "if no conversion runs, or give another folder"
        )
    dist.barrier()
    if first:
        partial.mkdir(parents=True)
    try:
        dist.barrier()
        yield partial
        dist.barrier()
        if first:
            sync_directory(partial)
            os.replace(partial, out)
            sync_directory(out.parent)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    dist.barrier()
