"""Speed and memory of the data path at the size of the web, with sparse files of tokens.

    python -m benchmarks.data_scale documents 100000000 [--folder DIR]
    python -m benchmarks.data_scale tokenize --megabytes 400 --tokenizer FILE [--folder DIR]
    python -m benchmarks.data_scale stream --ranks 64 [--folder DIR]

`documents` makes a corpus of N documents of 770 tokens on average, whose tokens are a sparse file,
builds its index, and measures in new processes the first sequence, the next epoch, and random
sequences. `tokenize` repeats the embedded corpus to a JSONL file and compares `dtron data prepare`
with the tokenizers library alone, then one worker with several: the shards must have equal bytes.
`stream` counts what each rank of a stream of as many files tokenizes.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from dtron.config import Data
from dtron.data import Loader, open_data, stream
from dtron.data.corpus.cache import cache_folder, open_or_build_index
from dtron.data.corpus.documents import Reading, files_corpus
from dtron.data.corpus.shards import Shard, write_corpus
from dtron.data.corpus.token_corpus import open_corpus
from dtron.data.shuffle import hash64
from dtron.data.tokenizer import ByteTokenizer
from dtron.io.untrusted import sha256_of

SEQ_LEN = 4096
SHARD_DOCUMENTS = 10**7
CHUNK = 10**6


def make_documents(folder: Path, n: int) -> None:
    """Write shards of n documents with log-normal lengths; the tokens are zeros in sparse files."""
    random, shards = np.random.default_rng(0), []
    some = np.minimum(random.lognormal(6.0, 1.14, CHUNK) + 2, 10**6).astype("<u4")
    for number, first in enumerate(range(0, n, SHARD_DOCUMENTS)):
        name, count, tokens = f"{number:05d}", min(SHARD_DOCUMENTS, n - first), 0
        with open(folder / f"{name}.documents", "wb") as file:
            for start in range(first, first + count, CHUNK):
                stop = min(start + CHUNK, first + count)
                file.write(hash64(np.arange(start, stop, dtype=np.uint64)).tobytes())
            for start in range(first, first + count, CHUNK):
                size = min(CHUNK, first + count - start)
                lengths = np.roll(some, start // CHUNK * 7919)[:size]
                file.write(lengths.tobytes())
                tokens += int(lengths.sum(dtype=np.int64))
        with open(folder / f"{name}.tokens", "wb") as file:
            file.truncate(2 * tokens)
        content = sha256_of(folder / f"{name}.documents")
        shards.append(Shard(name, count, tokens, documents_sha256=content))
    write_corpus(folder, shards, f"{n} documents", ByteTokenizer())


def section(folder: Path) -> Data:
    """The data section of a run on the corpus."""
    values = {"source": "prepared", "paths": [str(folder)], "cache_dir": str(folder / "cache")}
    return Data.model_validate(values)


def anonymous_mb() -> float:
    """Anonymous memory of this process, in MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no RssAnon")


def measure_rank(folder: Path) -> None:
    """Print what one rank needs: seconds and anonymous memory, as JSON."""
    data = section(folder)
    open_data(Data.model_validate({"validation_fraction": 0.0}), seq_len=SEQ_LEN, seed=0)
    before, begin = anonymous_mb(), time.perf_counter()
    training, _ = open_data(data, seq_len=SEQ_LEN, seed=0)
    training.sequence(0)
    first, memory = time.perf_counter() - begin, anonymous_mb() - before
    waste = training.waste()
    assert waste is not None
    begin = time.perf_counter()
    training.sequence(waste.sequences)
    epoch = time.perf_counter() - begin
    begin, count = time.perf_counter(), 20_000
    for k in range(count):
        training.sequence(k)
    rate = count * SEQ_LEN / (time.perf_counter() - begin)
    memory = max(memory, anonymous_mb() - before)
    print(
        json.dumps(
            {"first sequence s": first, "next epoch s": epoch, "MB": memory, "tokens/s": rate}
        )
    )


def measure_documents(n: int, folder: Path) -> None:
    """Make a corpus and its index, and measure a rank."""
    if not (folder / "corpus.json").exists():
        begin = time.perf_counter()
        make_documents(folder, n)
        print(f"corpus of {n:,} documents: {time.perf_counter() - begin:.0f} s")
    corpus = open_corpus(folder, ByteTokenizer())
    assert corpus is not None
    print(f"{len(corpus.tokens):,} tokens")
    data = section(folder)
    before, begin = anonymous_mb(), time.perf_counter()
    index = open_or_build_index(corpus, data.validation_fraction, cache_folder(data.cache_dir))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6 - before
    size = sum(file.stat().st_size for file in index.folder.iterdir())
    print(
        f"index: {time.perf_counter() - begin:.1f} s, {peak:.0f} MB more at the peak, "
        f"{size / 1e9:.2f} GB on disk, {len(index.group_sizes):,} groups"
    )
    for _ in range(2):
        command = [sys.executable, "-m", "benchmarks.data_scale", "rank", str(folder)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


def measure_tokenize(megabytes: int, tokenizer: str, folder: Path) -> None:
    """Compare with the tokenizers library alone, and one worker with several."""
    texts = list(files_corpus(Data()).documents(Reading(Data())))
    path, written = folder / "corpus.jsonl", 0
    with open(path, "w") as file:
        number = 0
        while written < megabytes * 10**6:
            line = json.dumps({"text": f"{number} {texts[number % len(texts)]}"}) + "\n"
            written, number = written + file.write(line), number + 1
    library = tokenizers.Tokenizer.from_file(tokenizer)
    begin = time.perf_counter()
    total, batch = 0, []
    with open(path) as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            if len(batch) == 1024:
                total += sum(len(each.ids) for each in library.encode_batch_fast(batch))
                batch = []
    total += sum(len(each.ids) for each in library.encode_batch_fast(batch))
    alone = time.perf_counter() - begin
    print(f"library alone: {alone:.1f} s, {total:,} tokens in {number:,} documents")
    outputs = []
    for workers in (os.cpu_count() or 1, 1):
        out = folder / f"workers-{workers}"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "dtron", "data", "prepare", "--paths", str(path)]
        command += ["--tokenizer", tokenizer, "--out", str(out), "--workers", str(workers)]
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - begin
        print(f"dtron data prepare, {workers} workers: {seconds:.1f} s, {alone / seconds:.2f} x")
        files = sorted([*out.glob("*.tokens"), *out.glob("*.documents")])
        outputs.append([(file.name, file.read_bytes()) for file in files])
    print("equal bytes" if outputs[0] == outputs[1] else "DIFFERENT BYTES")


def measure_stream(ranks: int, folder: Path) -> None:
    """Read 400 steps, in one process, on a stream of a file per rank; print what each tokenizes."""
    files = folder / "stream"
    files.mkdir(parents=True, exist_ok=True)
    for number in range(ranks):
        lines = [json.dumps({"text": f"{number} {i} " + "word " * 400}) for i in range(1000)]
        (files / f"{number:04d}.jsonl").write_text("\n".join(lines))
    settings = {"source": "hf", "hf_path": str(files), "hf_streaming": True, "substreams": ranks}
    data = Data.model_validate({**settings, "validation_fraction": 0.0})
    encode, counted = stream.encode_documents, [0]

    def counting(tokenizer: Any, texts: list[str]) -> Any:
        found = encode(tokenizer, texts)
        counted[0] += sum(map(len, found))
        return found

    stream.encode_documents = counting
    found, steps = [], 400
    for rank in range(ranks):
        counted[0] = 0
        source, _ = open_data(data, seq_len=SEQ_LEN, seed=0)
        loader = Loader(source, global_batch=ranks, micro_batch=1, dp_rank=rank, dp_size=ranks)
        for _ in range(steps):
            loader.step()
        found.append(counted[0] / (steps * ranks * SEQ_LEN))
    print(
        f"{ranks} ranks, {steps} steps of {SEQ_LEN} tokens: each tokenizes {min(found):.2%} to "
        f"{max(found):.2%} of the tokens of all; 1 / {ranks} = {1 / ranks:.2%}"
    )


def main(arguments: Sequence[str]) -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    documents = commands.add_parser("documents")
    documents.add_argument("n", type=int)
    documents.add_argument("--folder", type=Path, default=Path("/tmp/dtron-data-scale"))
    tokenize = commands.add_parser("tokenize")
    tokenize.add_argument("--megabytes", type=int, default=400)
    tokenize.add_argument("--tokenizer", required=True)
    tokenize.add_argument("--folder", type=Path, default=Path("/tmp/dtron-data-tokenize"))
    divided = commands.add_parser("stream")
    divided.add_argument("--ranks", type=int, default=64)
    divided.add_argument("--folder", type=Path, default=Path("/tmp/dtron-data-stream"))
    commands.add_parser("rank").add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "rank":
        measure_rank(options.folder)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.command == "documents":
        measure_documents(options.n, options.folder)
    elif options.command == "stream":
        measure_stream(options.ranks, options.folder)
    else:
        measure_tokenize(options.megabytes, options.tokenizer, options.folder)


if __name__ == "__main__":
    main(sys.argv[1:])
