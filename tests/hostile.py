"""Hostile cases: every file format with mutations, every key with extreme values, special files.

A case is a name: `format/what/seed`. It is made of the name alone, in a folder of its own, and
ends in success or a DtronError, within CPU seconds and memory that a worker bounds.
"""

import contextlib
import gzip
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dtron.bench.trace import read_trace
from dtron.checkpoint.dcp_storage import ShardReader, ShardWriter
from dtron.checkpoint.find import find
from dtron.checkpoint.initial_weights import open_initial
from dtron.checkpoint.metadata import CheckpointMetadata, read_metadata, write_metadata
from dtron.config import RunConfig, fields
from dtron.data import load_tokenizer, open_data, prepare
from dtron.data.tokenizer import encode_documents
from dtron.errors import DtronError
from dtron.float8.compare import read_curve
from dtron.models import BACKENDS, build_model, from_hf, model_config, to_hf
from dtron.parallelisms.pipeline.schedules import read_csv
from dtron.plan.hardware import hardware
from dtron.run.directory import RunDir
from dtron.run.lock import RunLock
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous
from dtron.setup.preflight import preflight
from dtron.setup.rules import resolve
from tests.data.corpus.test_data_megatron import write_megatron
from tests.training.test_trainer import tiny

CPU_SECONDS = 20
WALL_SECONDS = 300
MEMORY = 4 * 2**30
"""Bytes of address space that a case may add."""

SHAPE = {"n_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 24, "vocab_size": 264}
SENTENCE = "In the beginning God created the heaven and the earth. "


def _model() -> tuple[Any, torch.nn.Module]:
    config = model_config("llama", "debug", SHAPE)
    model = build_model("llama", config, BACKENDS["math"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return config, model


# --- what is there before it is attacked


def make_toml(folder: Path) -> Path:
    (folder / "run.toml").write_text(tiny(folder / "run").to_toml())
    return folder / "run.toml"


def make_jsonl(folder: Path) -> Path:
    rows = [json.dumps({"text": SENTENCE * 3, "id": i, "of": [1.5, None]}) for i in range(20)]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "data.jsonl"


def make_gz(folder: Path) -> Path:
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(make_jsonl(folder).read_bytes(), mtime=0))
    return folder / "data.jsonl.gz"


def make_txt(folder: Path) -> Path:
    (folder / "data.txt").write_text(SENTENCE * 60)
    return folder / "data.txt"


def make_tokens(folder: Path) -> Path:
    """Of Megatron-Core."""
    ids = list(SENTENCE.encode())
    return write_megatron(folder / "data.idx", [[ids], [ids, ids]] * 9).with_suffix(".idx")


def make_tokenizer(folder: Path) -> Path:
    letters = {letter: i for i, letter in enumerate(sorted(set(SENTENCE)))}
    vocabulary = {**letters, "</s>": len(letters), "he": len(letters) + 1}
    added = {"id": len(letters), "content": "</s>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    table = {
        "version": "1.0",
        "added_tokens": [{**added, **flags}],
        "normalizer": {"type": "Replace", "pattern": {"String": "I"}, "content": "I"},
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["h e"], "unk_token": "</s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return folder / "tokenizer.json"


def make_checkpoint(folder: Path) -> Path:
    config, model = _model()
    step = folder / "checkpoints/step-1"
    step.mkdir(parents=True)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    dcp.save(state, storage_writer=ShardWriter(step), no_dist=True)
    kept = {"name": "llama", **config.model_dump(mode="json")}
    write_metadata(step, CheckpointMetadata(1, 256, 0, 1, 0, {}, kept, {"sequence": 8}))
    return step


def make_hf(folder: Path) -> Path:
    _, model = _model()
    to_hf(model, folder / "hf", name="llama", file_bytes=8000)
    return folder / "hf"


def make_cache(folder: Path) -> Path:
    prepare(_data(make_jsonl(folder)))
    (tokens,) = (folder / "cache").glob("*/00000.tokens")
    return tokens.parent


def make_cached_index(folder: Path) -> Path:
    prepare(_data(make_jsonl(folder)))
    (documents,) = (folder / "cache").glob("*/documents.bin")
    return documents.parent


def make_run(folder: Path) -> Path:
    run = folder / "run"
    run.mkdir()
    rows = [{"step": i, "loss": 5.0 - i / 10, "tokens": i * 256} for i in range(1, 30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "committed.json").write_text(json.dumps({"checkpoint": str(run / "step-1")}))
    (run / "config.toml").write_text(tiny(run).to_toml())
    (run / "begun").write_text("job")
    (run / "lock").write_text(json.dumps({"host": "a", "pid": 1, "job": "7", "since": "then"}))
    return run


def make_csv(folder: Path) -> Path:
    (folder / "order.csv").write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    return folder / "order.csv"


def make_hardware(folder: Path) -> Path:
    lines = [
        f"{k} = {json.dumps(v)}" for k, v in vars(hardware("h100")).items() if type(v) in KINDS
    ]
    (folder / "machine.toml").write_text("\n".join(lines) + "\n")
    return folder / "machine.toml"


def make_trace(folder: Path) -> Path:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 5, "args": {}}
    marks = [{**event, "name": f"ProfilerStep#{i}", "ts": 10 * i, "dur": 9} for i in range(3)]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [event, *marks]}))
    return folder / "trace.json"


# --- what reads it


def _data(path: Path, **changes: Any) -> Any:
    values = {"paths": [str(path)], "cache_dir": str(path.parent / "cache"), **changes}
    values = {"max_document_mb": 1.0, **values}
    return RunConfig.of({"data": values}).data


def read_toml(path: Path) -> None:
    config = RunConfig.load(path)
    resolve(config, 1)
    again = path.with_name("again.toml")
    again.write_text(config.to_toml())
    assert RunConfig.load(again) == config, "a config that is written differs when it is read"


def read_data(path: Path) -> None:
    train, validation = open_data(_data(path), seq_len=16, seed=0)
    for k in range(20):
        train.sequence(k)
    if validation is not None:
        for k in range(len(validation)):
            validation.sequence(k)


def read_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(_data(path, tokenizer=str(path)))
    (ids,) = encode_documents(tokenizer, [SENTENCE])
    tokenizer.decode(ids)


def read_checkpoint(step: Path) -> None:
    find("latest", [step.parent])
    found = find(str(step), [])
    assert found is not None
    reader = ShardReader(found)
    for name, tensor in reader.index.tensors.items():
        reader.region(name, tuple(slice(0, min(n, 4)) for n in tensor.size))
    open_initial(found)


def read_hf(path: Path) -> None:
    from_hf(path)


def read_cache(cache: Path) -> None:
    read_data(cache.parent.parent / "data.jsonl")


def read_run(run: Path) -> None:
    place = Place(rank=0, local_rank=0, world_size=1, job="job", attempt=1)
    lock = RunLock(run, Rendezvous(place, None), 0.2)
    lock.release()
    read_curve(run)
    preflight(tiny(run, checkpoint__resume="latest", train__seq_len=32), place)


def reopen_run(run: Path) -> None:
    rundir = RunDir(run)
    rundir.noted_checkpoint()
    rundir.open("x = 1\n", 5)


def read_order(path: Path) -> None:
    read_csv(path, 2, 1, 2, "loop")


def read_hardware(path: Path) -> None:
    hardware(str(path))


@dataclass(frozen=True)
class Format:
    """A format: what makes it, which of its files are attacked, what reads it."""

    make: Callable[[Path], Path]
    read: Callable[[Path], None]
    files: tuple[str, ...] = ("",)
    """Patterns inside a folder; empty: the file itself."""


KINDS = (int, float, str, bool)
RUN_FILES = ("metrics.jsonl", "committed.json", "config.toml", "begun", "lock")
FORMATS: dict[str, Format] = {
    "toml": Format(make_toml, read_toml),
    "jsonl": Format(make_jsonl, read_data),
    "gz": Format(make_gz, read_data),
    "txt": Format(make_txt, read_data),
    "idx": Format(make_tokens, read_data),
    "bin": Format(lambda folder: make_tokens(folder).with_suffix(".bin"), read_data),
    "tokenizer": Format(make_tokenizer, read_tokenizer),
    "index": Format(make_checkpoint, read_checkpoint, ("index.json",)),
    "facts": Format(make_checkpoint, read_checkpoint, ("dtron.json",)),
    "shard": Format(make_checkpoint, read_checkpoint, ("rank-0.safetensors",)),
    "hf-config": Format(make_hf, read_hf, ("config.json",)),
    "hf-index": Format(make_hf, read_hf, ("model.safetensors.index.json",)),
    "hf-shard": Format(make_hf, read_hf, ("model-00001-of-*.safetensors",)),
    "cache": Format(make_cache, read_cache, ("00000.tokens", "00000.documents", "corpus.json")),
    "cached index": Format(
        make_cached_index, read_cache, ("documents.bin", "groups.bin", "index.json")
    ),
    "run": Format(make_run, read_run, RUN_FILES),
    "reopened": Format(make_run, reopen_run, RUN_FILES),
    "csv": Format(make_csv, read_order),
    "hardware": Format(make_hardware, read_hardware),
    "trace": Format(make_trace, lambda path: void(read_trace(path))),
}


def void(_: object) -> None:
    """Drop a value."""


# --- attacks

DEEP = "[" * 100_000
BIG = str(2**64)
EXTREME: tuple[Any, ...] = (
    *(0, -1, 1, 2, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**4000),
    *(0.5, -0.0, 1e-9, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), True, False),
    *("", " ", "a", "\0", "\x1b]0;x\x07", "\x7f", "\n", "a" * 5000, "é" * 3000, "\U0001f600"),
    *("~nosuchuser/x", "~", "..", "../" * 60, "/", "/dev/zero", "/dev/full", "/proc/self/mem"),
    *("//", "file://", "s3://", "memory://", "nosuch://x", "http://[", "t*99999999999", "%s{}"),
    *([], [[]], {}, [0], [""], {"a": {"b": 1}}, ["a"] * 5000, [[[[[]]]]], None),
)


def as_toml(value: Any) -> str:
    """An extreme value as TOML, or something near to it."""
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    if value is None:
        return '""'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value) if abs(value) > 2**1000 and value > 0 else str(value)
    return json.dumps(value).replace("\x7f", "\\u007f")


def special(kind: str, path: Path) -> None:
    """Put something else in the place of a file."""
    size = path.stat().st_size
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind in ("zero", "full", "random", "tty"):
        path.symlink_to({"random": "/dev/urandom"}.get(kind, f"/dev/{kind}"))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(path.with_name("nothing"))
    elif kind == "proc":
        path.symlink_to("/proc/self/environ")
    elif kind == "socket":
        os.mknod(path, 0o140600)
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        with path.open("wb") as file:
            file.truncate({"sparse": 2**41, "zeros": size, "sparse-gb": 2**30}[kind])


SPECIAL = (
    *("fifo", "directory", "zero", "full", "random", "tty", "loop", "dangling", "proc", "socket"),
    *("empty", "sparse", "zeros", "sparse-gb"),
)


def deep(draw: random.Random, content: bytes) -> bytes:
    where = draw.randrange(len(content) + 1)
    bracket = draw.choice([b"[", b"{", b'{"a":', b"(", b'"', b"'", b"[[", b"a."])
    return content[:where] + bracket * 100_000 + content[where:]


def flipped(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 3, 30])):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def spliced(draw: random.Random, content: bytes) -> bytes:
    a, b, c = sorted(draw.randrange(len(content) + 1) for _ in range(3))
    return content[:b] + content[a:c] * draw.choice([1, 2, 500]) + content[c:]


def numbers(draw: random.Random, content: bytes) -> bytes:
    """One number, or one word, becomes an extreme one."""
    text = content.decode("latin-1")
    starts = [i for i, c in enumerate(text) if c.isdigit() and not text[i - 1 : i].isdigit()]
    if not starts:
        return flipped(draw, content)
    start = draw.choice(starts)
    end = next((i for i in range(start, len(text)) if not text[i].isdigit()), len(text))
    extreme = draw.choice([BIG, "-1", "1e999", "9" * 5000, "0", "2147483648", "NaN", '"x"', "null"])
    return (text[:start] + extreme + text[end:]).encode("latin-1")


def values(draw: random.Random, content: bytes) -> bytes:
    """One value anywhere in JSON, or in the header of safetensors, becomes an extreme one."""
    header = b""
    if content[:1] != b"{" and content[8:9] == b"{":
        length = int.from_bytes(content[:8], "little")
        header, content, rest = content[:8], content[8 : 8 + length], content[8 + length :]
    try:
        table = json.loads(content)
    except ValueError:
        return numbers(draw, header + content)
    places = list(_places(table))
    holder, key = draw.choice(places)
    action = draw.randrange(4)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[draw.choice([*holder, "", "x" * 5000, "\x1b[31m", "\ud800"])] = holder[key]
    else:
        holder[key] = draw.choice(EXTREME)
    try:
        text = json.dumps(table).encode()
    except ValueError:  # more digits than Python prints
        text = content
    return len(text).to_bytes(8, "little") + text + rest if header else text


def _places(table: Any) -> Iterator[tuple[Any, Any]]:
    keys = table if isinstance(table, dict) else range(len(table))
    for key in keys:
        yield table, key
        if isinstance(table[key], dict | list):
            yield from _places(table[key])


MUTATIONS = {m.__name__: m for m in (deep, flipped, cut, spliced, numbers, values, values, values)}


def signed(step: Path) -> None:
    """Make the checksums of a checkpoint fit, as who plants something would; as far as it can be
    read."""
    unreadable = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with contextlib.suppress(*unreadable, DtronError):
        content = json.loads((step / "dtron.json").read_text())
        content.pop("sha256")
        (step / "dtron.json").write_text(json.dumps(content))
        for_facts = CheckpointMetadata(**content)
        write_metadata(step, for_facts)


def extreme_key(key: str, draw: random.Random, folder: Path) -> None:
    """Set a key of a run to an extreme value, on the command line or in the file, and check it as a
    start does."""
    text = as_toml(draw.choice(EXTREME))
    path = make_toml(folder)
    if draw.random() < 0.5:
        section, _, name = key.partition(".")
        lines = path.read_text().replace(f"[{section}]\n", f"[{section}]\n{name} = {text}\n", 1)
        rest = lines.split(f"{name} = {text}\n", 1)[1]
        path.write_text(lines.replace(rest, "\n".join(_without(name, rest))))
        config = RunConfig.load(path)
    else:
        config = RunConfig.load(path, [f"{key}={text}"])
    read_toml(path)
    again = folder / "resolved.toml"
    again.write_text(config.to_toml())
    assert RunConfig.load(again) == config, "a config that is written differs when it is read"
    small = {"seq_len": min(config.train.seq_len, 4096)}
    train = config.train.model_copy(update=small)
    preflight(config.model_copy(update={"train": train}), Place(0, 0, 1), starts=False)


def _without(name: str, text: str) -> Iterator[str]:
    """Lines up to the next section without the key's own value, and all behind."""
    inside = True
    for line in text.split("\n"):
        inside = inside and not line.startswith("[")
        if not (inside and line.startswith(f"{name} = ")):
            yield line


def run_case(case: str, folder: Path) -> None:
    """Make an attack and let it be read, in a folder of its own; raises whatever is raised."""
    kind, what, *_ = case.split("/")
    draw = random.Random(case)
    if kind == "key":
        return extreme_key(what, draw, folder)
    if kind == "attack":
        ATTACKS[what](folder)
        return None
    form = FORMATS[kind]
    made = form.make(folder)
    files = (
        sorted(f for pattern in form.files for f in made.glob(pattern)) if made.is_dir() else [made]
    )
    file = draw.choice(files)
    if what in SPECIAL:
        special(what, file)
    else:
        file.write_bytes(MUTATIONS[what](draw, file.read_bytes()))
        if (made / "dtron.json").exists() and draw.random() < 0.8:
            signed(made)
    return form.read(made)


# --- attacks that no mutation draws


def written(folder: Path, name: str, content: bytes | str) -> Path:
    """A file with this content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def toml(text: str) -> Callable[[Path], None]:
    return lambda folder: read_toml(written(folder, "run.toml", text))


def given(*overrides: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        config = RunConfig.load(make_toml(folder), overrides)
        preflight(config, Place(0, 0, config.parallel.pp), starts=False)

    return act


def data(name: str, content: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda folder: read_data(written(folder, name, content()))


def tokenizer(**changes: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = make_tokenizer(folder)
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        read_tokenizer(path)

    return act


def checkpoint(change: Callable[[Path, dict[str, Any]], None]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        step = make_checkpoint(folder)
        index = json.loads((step / "index.json").read_text())
        change(step, index)
        (step / "index.json").write_text(json.dumps(index))
        signed(step)
        read_checkpoint(step)

    return act


def tiled(make: Callable[[int], list[Any]], n: int, shape: list[int]) -> Callable[[Path], None]:
    """A checkpoint with one more tensor, of n parts."""

    def change(step: Path, index: dict[str, Any]) -> None:
        parts = [[*make(i), "rank-0.safetensors"] for i in range(n)]
        index["tensors"]["x"] = {"dtype": "F32", "shape": shape, "parts": parts}

    return checkpoint(change)


def facts(**changes: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        step = make_checkpoint(folder)
        write_metadata(step, CheckpointMetadata(**{**vars(read_metadata(step)), **changes}))
        read_checkpoint(step)

    return act


def shard(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = make_checkpoint(folder) / "rank-0.safetensors"
        file.write_bytes(make(file.read_bytes()))
        signed(file.parent)
        read_checkpoint(file.parent)

    return act


def header(table: Any) -> Callable[[bytes], bytes]:
    text = json.dumps(table).encode()
    return lambda content: len(text).to_bytes(8, "little") + text + content[-4096:]


def hf(**changes: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = make_hf(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        read_hf(path.parent)

    return act


def hf_index(weights: Callable[[dict[str, str]], dict[str, Any]]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = make_hf(folder) / "model.safetensors.index.json"
        table = json.loads(path.read_text())
        path.write_text(json.dumps({"weight_map": weights(table["weight_map"])}))
        os.mkfifo(path.with_name("pipe.safetensors"))
        read_hf(path.parent)

    return act


def truncated_checkpoint(folder: Path) -> None:
    """Behind the back of who has it open."""
    step = make_checkpoint(folder)
    reader = ShardReader(step)
    name, tensor = next(iter(reader.index.tensors.items()))
    region = tuple(slice(0, n) for n in tensor.size)
    reader.region(name, region)
    os.truncate(step / "rank-0.safetensors", 16)
    with must_fail():
        reader.region(name, region)


def truncated_hf(folder: Path) -> None:
    path = make_hf(folder)
    opened = open_initial(path).folder
    assert opened is not None
    for file in path.glob("*.safetensors"):
        os.truncate(file, 16)
    with must_fail():
        opened.read("embed.weight", (slice(0, 264), slice(0, 16)))


def changed_cache(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        cache = make_cache(folder)
        train, _ = open_data(_data(folder / "data.jsonl"), seq_len=16, seed=0)
        train.sequence(0)
        change(cache / "00000.tokens")
        with must_fail():
            for k in range(100):
                train.sequence(k)

    return act


@contextlib.contextmanager
def must_fail() -> Iterator[None]:
    with contextlib.suppress(DtronError):
        yield
        raise AssertionError("nothing was noticed")


def order(text: str) -> Callable[[Path], None]:
    return lambda folder: read_order(written(folder, "order.csv", text))


def resumed(name: str) -> Callable[[Path], None]:
    """A folder of checkpoints in which one has a strange name."""

    def act(folder: Path) -> None:
        step = make_checkpoint(folder)
        shutil.copytree(step, step.with_name(name))
        read_checkpoint(step)

    return act


def layout(text: str) -> Callable[[Path], None]:
    return given("parallel.pp=2", f"parallel.pp_layout={text}")


def staggered(i: int) -> list[Any]:
    return [[i, i], [10**6, 1]]


def many_keys() -> bytes:
    return json.dumps({f"tex{i}": 1 for i in range(300_000)}).encode()


def entry(**of: Any) -> Callable[[bytes], bytes]:
    return header({"model.norm.weight": of})


def all_ones(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def escape(step: Path, index: dict[str, Any]) -> None:
    index["files"]["\x1b]0;owned\x07/x"] = {"bytes": 1, "sha256": ""}


def linked(step: Path, index: dict[str, Any]) -> None:
    """A file of the checkpoint is a device."""
    (step / "rank-0.safetensors").rename(step / "away")
    (step / "rank-0.safetensors").symlink_to("/dev/zero")
    index["files"]["rank-0.safetensors"]["bytes"] = 0


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
SPLIT |= {"pattern": {"Regex": "([a-z ]+)+$b"}}
DOUBLING = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
DOUBLINGS = {"type": "Sequence", "normalizers": [DOUBLING] * 60}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}
WIDE = {"type": "BPE", "vocab": {"I": 2**32 - 1, "</s>": 0}, "merges": []}
HUGE = [["</s>", 1e308], ["I", 1e308]]
UNIGRAM = {"type": "Unigram", "vocab": [["</s>", 0.0]], "byte_fallback": False}
INFINITE = {"rope_type": "llama3", "factor": float("inf")}
ROW = json.dumps({"text": SENTENCE * 3}).encode() + b"\n"
MEMBER = gzip.compress(ROW * 9)
ATTACKS: dict[str, Callable[[Path], object]] = {
    "a key of 100,000 parts": toml("a" + ".a" * 100_000 + " = 1"),
    "a header of 100,000 quoted parts": toml("[" + '"a" . ' * 100_000 + "a]"),
    "strings that do not end": toml('x = """' + '\\"' * 400_000),
    "quotes alone": toml('"' * 900_000),
    "many arrays of tables": toml("[[a]]\n" * 100_000),
    "a number of a million hex digits": toml("[train]\nsteps = 0x" + "f" * 900_000),
    "a date as a number": toml("[train]\nsteps = 2020-01-01T00:00:00Z"),
    "NUL in a key": toml('["tr\\u0000ain"]\nsteps = 1'),
    "an override of bytes that are no text": given("train.sample_prompt=\udcff", "run.dir=\udc80"),
    "an override nested 50,000 deep": given("train.steps=" + "[" * 50_000),
    "an override of an attribute": given("model.override.__class__=1", "run.__dict__={}"),
    "a layout of 10^11 layers": layout("(" * 9 + "t" + "*2)" * 9),
    "a layout of 5,000 groups": layout("(" * 5000),
    "a layout of 2^62 layers": layout(f"[{2**62},0]"),
    "a pattern that takes exponential time": given(
        "float8.recipe=rowwise", 'float8.filter=["' + "*a" * 40 + 'b"]'
    ),
    "a URL of URLs": given("checkpoint.resume=simplecache::zip::file:///nothing.zip"),
    "a store that needs a password": given("checkpoint.dir=ftp://nobody@localhost:1/x"),
    "a run in a file": given("run.dir=run.toml"),
    "a size of another kind": given("model.override.dim=1e400", "model.override.n_layers=true"),
    "heads beyond memory": given("model.override.n_heads=65536", "model.override.dim=1048576"),
    "inflates to 200 times": data(
        "x.jsonl.gz", lambda: gzip.compress((b" " * 999 + b"\n") * 20_000, 1)
    ),
    "a line of 2 MB": data("x.jsonl.gz", lambda: gzip.compress(b"a" * 2_000_000, 1)),
    "a document of 2 MB": data("x.txt.gz", lambda: gzip.compress(b"a" * 2_000_000, 1)),
    "100,000 empty streams": data("x.jsonl.gz", lambda: gzip.compress(b"") * 10**5 + MEMBER),
    "another text behind a stream": data("x.jsonl.gz", lambda: gzip.compress(ROW) + b"garbage"),
    "an object of 300,000 keys": data("x.jsonl", many_keys),
    "a number of 5,000 digits": data(
        "x.jsonl", lambda: b'{"text": "a", "n": ' + b"9" * 5000 + b"}"
    ),
    "half a surrogate pair": data("x.jsonl", lambda: b'{"text": "\\ud800"}'),
    "an escape in a key": data("x.jsonl", lambda: b'{"\\u001b]0;owned": 1}'),
    "a regex of exponential time": tokenizer(pre_tokenizer=SPLIT),
    "a text that doubles 60 times": tokenizer(normalizer=DOUBLINGS),
    "a replacement of 10 MB": tokenizer(normalizer={**DOUBLING, "content": "e" * 10_000_000}),
    "a broken charsmap": tokenizer(normalizer=CHARSMAP),
    "no unknown token": tokenizer(model={**UNIGRAM, "unk_id": None}),
    "a token of 4 billion": tokenizer(model=WIDE),
    "scores beyond float64": tokenizer(model={**UNIGRAM, "unk_id": 0, "vocab": HUGE}),
    "parts that are compared for hours": tiled(staggered, 20_000, [2 * 10**6] * 2),
    "100,000 empty parts": tiled(lambda i: [[0], [0]], 100_000, [0]),
    "a shape of 1,000 dims": tiled(lambda i: [[0] * 1000, [1] * 1000], 1, [1] * 1000),
    "a part of 2^62 elements": tiled(lambda i: [[0], [2**62]], 1, [2**62]),
    "a part at True": tiled(lambda i: [[False], [True]], 1, [True]),
    "an escape in a file's name": checkpoint(escape),
    "a device as a shard": checkpoint(linked),
    "a step below 0": facts(step=-5),
    "a step of 2^70": facts(step=2**70),
    "a model of a billion layers": facts(model={**SHAPE, "name": "llama", "n_layers": 10**9}),
    "a model that is none": facts(model={"name": "../llama", "dim": "wide"}),
    "a step of 200 digits": resumed("step-" + "9" * 200),
    "a step of other digits": resumed("step-\u0663"),
    "a header of 2^64 bytes": shard(lambda content: b"\xff" * 8 + content[8:]),
    "a header that is a list": shard(header([1, 2])),
    "offsets below 0": shard(entry(dtype="F32", shape=[16], data_offsets=[-64, 0])),
    "a tensor without dtype": shard(entry(shape=[16], data_offsets=[0, 64])),
    "a shard cut while it is open": truncated_checkpoint,
    "Hugging Face files cut while they are open": truncated_hf,
    "a cache cut while it is open": changed_cache(lambda path: os.truncate(path, 10)),
    "a cache changed while it is open": changed_cache(all_ones),
    "a billion layers of Hugging Face": hf(num_hidden_layers=10**9),
    "9,999 layers of Hugging Face": hf(num_hidden_layers=9999),
    "no heads": hf(num_attention_heads=0, num_key_value_heads=0),
    "a width of 2^62": hf(hidden_size=2**62),
    "NaN as a base": hf(rope_theta=float("nan")),
    "a list as a model": hf(model_type=["llama"], num_hidden_layers=[1]),
    "a scaling of infinite factor": hf(rope_scaling=INFINITE),
    "a pipe as a shard": hf_index(lambda weights: dict.fromkeys(weights, "pipe.safetensors")),
    "half a million tensors": hf_index(
        lambda weights: dict.fromkeys(map(str, range(500_000)), "x")
    ),
    "a shard of no name": hf_index(lambda weights: dict.fromkeys(weights, None)),
    "a cell of a megabyte": order("0F0," + "a" * 10**6),
    "a micro-batch of 5,000 digits": order("0F" + "9" * 5000 + "\n1F0\n"),
    "a micro-batch of 999,999,999": order("0F999999999,0B0\n1F0,1B0\n"),
    "digits of other scripts": order("\u0660F0,\u0660B0\n1F0,1B0\n"),
}

KEYS = tuple(key for key, _, _ in fields(RunConfig))


def cases(n: int) -> list[str]:
    """All attacks and special files, and as many mutations and extreme keys as make n cases."""
    named = [f"attack/{name}" for name in ATTACKS]
    named += [f"{kind}/{what}" for kind in FORMATS for what in SPECIAL]
    mutations = [
        f"{kind}/{what}/{seed}" for seed in range(20) for kind in FORMATS for what in MUTATIONS
    ]
    keys = [f"key/{key}/{seed}" for seed in range(20) for key in KEYS]
    half = max(n - len(named), 0) // 2
    return named + mutations[:half] + keys[: n - len(named) - half]


def serve(pipe: Connection, folder: str) -> None:
    """Run the cases that come through a pipe; of each, what went wrong, or None."""
    for case in iter(pipe.recv, None):
        pipe.send(_bounded(case, Path(folder)))


class _TooLong(BaseException):
    """A case takes more CPU seconds than it may."""


def _stop(*_: Any) -> None:
    raise _TooLong


def _bounded(case: str, above: Path) -> str | None:
    folder = Path(tempfile.mkdtemp(prefix="case", dir=above))  # one that was killed left its own
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    os.chdir(folder)
    try:
        run_case(case, folder)
    except DtronError as error:
        said = str(error)
        printable = all(c.isprintable() or c in "\n\t" or ord(c) > 255 for c in said)
        return None if len(said) < 12_000 and printable else f"an error that shows {said[:200]!r}"
    except _TooLong:
        return f"more than {CPU_SECONDS} CPU seconds\n{traceback.format_exc()[-3000:]}"
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.chdir(above)
        shutil.rmtree(folder, ignore_errors=True)
    return None
