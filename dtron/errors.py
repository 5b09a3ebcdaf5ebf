"""Errors that a user can cause; each message names key, value, rule and fix.

A DtronError is printed without a traceback. Any other exception is a bug of dtron.
"""

import argparse
import difflib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError

_MOST_CHARACTERS = 10_000
_CONTROL = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\t\n"}


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 rank" or "2,000 ranks".

    Args:
        plural: the plural of `noun`, if it is not `noun` with an s.
    """
    return f"{n:,} {noun if n == 1 else plural or f'{noun}s'}"


class DtronError(Exception):
    """A user error; the message says how to fix it.

    A message may quote an untrusted file. So a message of more than 10,000 characters is cut in the
    middle, and control characters, which a terminal would execute, are escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(shorten(str(message), _MOST_CHARACTERS)))


class ConfigError(DtronError, ValueError):
    """A setting is unknown, has the wrong type, or is incompatible with other settings."""


class PlacementError(DtronError, ValueError):
    """Modules, parameters or tensors do not match the placements, FSDP units or stages."""


class DataError(DtronError, ValueError):
    """A data or tokenizer file is missing or unreadable; the message names the file."""


class CheckpointError(DtronError, ValueError):
    """A checkpoint is missing, incomplete, or of another model."""


class TrainingError(DtronError, RuntimeError):
    """Training cannot continue, for example after too many non-finite gradients in a row."""


class RankError(TrainingError):
    """One rank has failed: it prints this error at once. The other ranks end without a message."""


class OutOfMemoryError(RankError):
    """An allocation failed.

    Args:
        needed: bytes that this rank needs: maximum of the peak and of (in use + requested).
        room: bytes that this rank can have in use.
    """

    def __init__(self, message: str, needed: float, room: float) -> None:
        super().__init__(message)
        self.needed, self.room = needed, room


class NoProgressError(RankError):
    """Too many restarts in a row have ended without a new checkpoint; the job ends."""


class PeerError(TrainingError):
    """Another rank has failed; that rank prints the reason.

    Args:
        stopped: whether torchrun has sent SIGTERM to this rank and so knows of the failure.
    """

    def __init__(self, message: str, stopped: bool = False) -> None:
        super().__init__(message)
        self.stopped = stopped


def note(message: str, kind: str = "note") -> None:
    """Print a line to stderr on rank 0, before logging is set up."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{kind}: {message}", file=sys.stderr, flush=True)


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser that raises a ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def check_words(words: Sequence[str]) -> None:
    """Check a command line of --config FILE and section.key=value for common mistakes.

    Raises:
        ConfigError: a second --config, a file without --config, or a key with "--".
    """
    pairs = list(itertools.zip_longest(words, words[1:], fillvalue=""))
    files = [
        after if word == "--config" else word.removeprefix("--config=")
        for word, after in pairs
        if word == "--config" or word.startswith("--config=")
    ]
    if len(files) > 1:
        raise ConfigError(
            f"--config is given twice, {' and '.join(files)}; use one file, and override its keys "
            "with section.key=value"
        )
    for word, after in pairs:
        if key := re.fullmatch(r"--(\w+\.[\w.]+)(=.*)?", word, re.DOTALL):
            value = key[2] or f"={after if after and '=' not in after else 'VALUE'}"
            raise ConfigError(f"{word}: keys have no dashes; write {key[1]}{value}, without --")
    alone = [
        word
        for before, word in itertools.pairwise(["", *words])
        if word.endswith(".toml") and "=" not in word and not before.startswith("--")
    ]
    if not files and alone:
        raise ConfigError(f"{alone[0]}: a config file follows --config; write --config {alone[0]}")


_MOST_WORDS, _WORD = 300_000, 100  # limits, since words may come from untrusted files


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean X?` with the known word X that is most similar to `word`.

    If no word is similar, X is a word that starts with `word`; without one, return an empty string.

    X may also start with `word`. Without such a word, return an empty string.
    """
    words = [name for name in itertools.islice(known, _MOST_WORDS) if len(name) <= _WORD]
    if len(word) > _WORD:
        return ""
    begun = [name for name in words if word and name.lower().startswith(word.lower())]
    close = difflib.get_close_matches(word, words, n=1, cutoff=cutoff) or begun
    return f"; did you mean {close[0]}?" if close else ""


ALIASES = {
    "train.steps": "max_steps train_steps num_steps iterations train_iters max_iters",
    "train.seq_len": "seq_length sequence_length max_length max_seq_length block_size context_len",
    "train.global_batch": "batch_size global_batch_size gradient_accumulation_steps grad_accum",
    "train.micro_batch": "micro_batch_size local_batch_size per_device_train_batch_size",
    "train.dtype": "precision bf16 fp16 param_dtype mixed_precision",
    "train.max_grad_norm": "grad_clip clip_grad max_norm gradient_clipping",
    "optim.lr": "learning_rate max_lr",
    "optim.beta1": "adam_beta1 betas",
    "optim.beta2": "adam_beta2",
    "schedule.warmup": "warmup_steps warmup_ratio lr_warmup_iters",
    "recompute.mode": "activation_checkpointing gradient_checkpointing ac_mode",
    "parallel.tp": "tensor_parallel_degree tensor_model_parallel_size tp_size tensor_parallel",
    "parallel.pp": "pipeline_parallel_degree pipeline_model_parallel_size pp_size",
    "parallel.cp": "context_parallel_degree context_parallel_size cp_size",
    "parallel.ep": "expert_parallel_degree expert_model_parallel_size ep_size",
    "parallel.dp_shard": "data_parallel_shard_degree fsdp dp dp_size",
    "parallel.dp_replicate": "data_parallel_replicate_degree ddp",
    "data.paths": "dataset dataset_path data_path train_files path files",
    "data.tokenizer": "tokenizer_path tokenizer_model tokenizer_file",
    "checkpoint.dir": "save_dir save",
    "checkpoint.initial": "pretrained init_from load_from model_path",
    "checkpoint.interval": "save_interval save_steps",
    "checkpoint.resume": "load resume_from_checkpoint",
    "metrics.log_interval": "logging_steps log_freq",
    "run.dir": "output_dir out_dir dump_folder",
    "model.name": "architecture model_type",
    "model.override.dim": "hidden_size d_model n_embd embed_dim",
    "model.override.n_layers": "num_hidden_layers num_layers n_layer layers",
    "model.override.n_heads": "num_attention_heads n_head num_heads heads",
    "model.override.n_kv_heads": "num_key_value_heads num_query_groups kv_heads",
    "model.override.ffn_dim": "intermediate_size ffn_hidden_size d_ff hidden_dim mlp_dim",
    "model.override.max_seq_len": "max_position_embeddings n_positions",
    "model.override.norm_eps": "rms_norm_eps layer_norm_eps",
    "model.override.tied": "tie_word_embeddings tie_embeddings",
    "model.override.rope_local_theta": "rope_local_base_freq",
    "model.override.softcap": "attn_logit_softcapping",
    "model.override.logit_softcap": "final_logit_softcapping",
    "model.override.window": "sliding_window window_size",
    "model.override.n_experts": "num_experts num_local_experts n_routed_experts",
    "model.override.experts_per_token": "top_k topk num_experts_per_tok moe_router_topk",
    "model.override.expert_dim": "moe_intermediate_size moe_ffn_hidden_size",
    "model.override.capacity_factor": "moe_expert_capacity_factor",
    "model.override.activation": "hidden_act act_fn",
    "model.override.bias": "attention_bias qkv_bias",
}
"""Key -> its names in transformers, Megatron-LM and torchtitan."""


_UNITS = {"schedule.warmup": " It is a fraction of train.steps: N steps are N / train.steps"}
"""Key -> note on its unit, for keys that have another unit in other frameworks."""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Return `; did you mean KEY?` for an unknown dotted key.

    KEY is found from the last part of the unknown key: as a name in another framework, as a key of
    another section, then as a similar key of its section.
    """
    known = list(known)
    section, _, name = key.rpartition(".")
    split = [k.rpartition(".") for k in known]
    for ours, theirs in ALIASES.items():
        if name.lower() in theirs.split():
            return f"; did you mean {ours}?{_UNITS.get(ours, '')}"
    elsewhere = [f"{own}.{last}" for own, _, last in split if last == name]
    if elsewhere and section != "model":
        return f"; did you mean {elsewhere[0]}?{_UNITS.get(elsewhere[0], '')}"
    cutoff = 0.75 if section == "model" else 0.5  # most wrong keys belong to model.override
    if hint := nearest(name, [last for own, _, last in split if own == section], cutoff):
        return hint.replace("mean ", f"mean {section}.", 1)
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    if section == "model":
        return f"; fields of the model are model.override.KEY, such as model.override.{name}"
    return nearest(key, known)


def config_error(
    error: ValidationError,
    prefix: str,
    known: Iterable[str],
    automatic: Iterable[str] = (),
    values: Any = None,
) -> ConfigError:
    """Convert a pydantic error to a ConfigError: one line per key, named as in the config.

    Args:
        error: the error from pydantic.
        prefix: key of the model's section (`model.override`), or "" for the whole config.
        known: every legal key, fully dotted, for the nearest-key hint.
        automatic: keys that may also be "auto".
        values: the nested values; tables of a list are named by their `name` instead of an index.
    """
    names, by_key = list(known), dict[str, list[Any]]()
    for failure in error.errors():
        failure["loc"] = _named(failure["loc"], values)
        parts = [*([prefix] if prefix else []), *_key_parts(failure)]
        by_key.setdefault(".".join(parts[: prefix.count(".") + 2]), []).append(failure)
    also = set(automatic)
    return ConfigError("\n".join(_key_error(each, prefix, names, also) for each in by_key.values()))


def _named(location: Sequence[str | int], values: Any) -> tuple[str | int, ...]:
    """Return a failure's location, with names of tables instead of indices where they are known."""
    found: list[str | int] = []
    for part, below in itertools.zip_longest(location, location[1:]):
        inside = isinstance(values, Mapping) or isinstance(part, int)
        try:
            values = values[part] if inside else None
        except (KeyError, IndexError, TypeError):
            values = None
        name = values.get("name") if isinstance(part, int) and isinstance(values, Mapping) else None
        found.append(name if isinstance(name, str) and below not in (None, "name") else part)
    return tuple(found)


def _key_parts(failure: Any) -> list[str]:
    """Return the parts of a failure's key, without the names of types that pydantic has tried."""
    types = ("str", "float")
    return [str(part) for part in failure["loc"] if part not in types and "[" not in str(part)]


def _key_error(
    failures: list[Any], prefix: str, known: Iterable[str], automatic: Iterable[str]
) -> str:
    """Return the message for the failures of one key."""
    # For a list, the last failure is about an entry of the list.
    first = failures[-1] if isinstance(failures[0]["input"], list) else failures[0]
    key = ".".join([*([prefix] if prefix else []), *_key_parts(first)])
    if first["type"] == "extra_forbidden" and "." not in key:
        sections = {name.split(".")[0] for name in known}
        return f"unknown section [{key}]{nearest(key, sections)}"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{nearest_key(key, known)}"
    if first["type"] == "missing":
        return f"{key} is required and has no default; set it"
    shown = shorten(repr(first["input"]))
    if first["type"] in ("tuple_type", "list_type"):
        return f"{key} = {shown} is not a list; write {_as_list(key, first['input'])}"
    if first["type"] in ("model_type", "model_attributes_type") and "." not in key:
        return f"{key} = {shown}: {key} is a section; write [{key}]"
    rule = first["msg"].removeprefix("Value error, ")
    if key in automatic and "expected" in first.get("ctx", {}) and "'auto'" not in rule:
        rule = f'{rule.replace(" or ", ", ")} or "auto"'
    absent = first["input"] == "auto" and key not in automatic
    hint = '; it has no "auto"' if absent else _hint_of_value(key, first)
    return f"{key} = {shown}: {rule}{hint}"


def _as_list(key: str, value: Any) -> str:
    """Return how to write a list of one value: in TOML for tables, else for the command line."""
    if isinstance(value, dict):
        return f"[[{key}]]"
    listed, parts = json.dumps([value], default=str), key.split(".")
    in_table = len(parts) > 3  # such as data.mixture.NAME.paths
    return f"{parts[-1]} = {listed}" if in_table else f"{key}='{listed}'"


_NUMBERS = {"int_type": r"[+-]?\d+", "float_type": r"(?i)[+-]?\d+(\.\d*)?(e[+-]?\d+)?"}
"""Type of a pydantic failure -> pattern of strings that are numbers of this type."""


def _hint_of_value(key: str, failure: Any) -> str:
    """Return `; write VALUE` or `; did you mean VALUE?` for a wrong value; else an empty string."""
    kind, value = failure["type"], failure["input"]
    if kind == "bool_type":
        return "; write true or false"
    if key == "checkpoint.resume" and value is True:
        return '; write "latest", or the path of a run or checkpoint'
    if kind == "int_type" and isinstance(value, float):
        return f"; write {round(value)}" if value.is_integer() else ""
    if kind in _NUMBERS and isinstance(value, str) and re.fullmatch(_NUMBERS[kind], value):
        return f"; write {value}, without quotes"
    expected = str(failure.get("ctx", {}).get("expected", ""))
    quoted = [value for value in re.findall("'([^']*)'", expected) if value]
    return nearest(str(value), quoted or re.findall(r"\d+", expected), 0.5 if quoted else 0.3)


def first_failure(error: ValidationError) -> str:
    """Return the first failure of a pydantic validation, in one line."""
    failure = error.errors()[0]
    where = ".".join(map(str, failure["loc"]))
    return f"{where} = {shorten(repr(failure['input']))}: {failure['msg']}"


def cause_of(error: Exception, path: object) -> str:
    """Return the text of a file error without the path, which the caller's message names."""
    if isinstance(error, OSError) and error.strerror and str(error.filename) == str(path):
        return error.strerror
    return str(error)


_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def hint_of_weights(path: str) -> str:
    """Return a fix for a path to weights that dtron cannot read; empty: no fix is known.

    Such a path is a pickle, a name on the Hugging Face Hub, or does not exist.
    """
    if path.lower().endswith(_PICKLES):
        return (
            "; dtron does not read pickles, which can run any code: save the model as safetensors, "
            "as save_pretrained(FOLDER) of transformers does, and name that folder"
        )
    if "://" in path or os.path.exists(path):
        return ""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not os.path.isdir(os.path.dirname(path)):
        return (
            f"; dtron does not download: run hf download {path} --local-dir FOLDER and name FOLDER"
        )
    return "; it does not exist"


def printable(text: str) -> str:
    """Escape control characters, except tabs and line breaks."""
    return text.translate(_CONTROL)


def shorten(text: str, most: int = 80) -> str:
    """Shorten a text to at most `most` characters; the middle is cut out."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
