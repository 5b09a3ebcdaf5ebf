"""The command line of `dtron data`."""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from dtron.config import RunConfig
from dtron.data.corpus.cache import cache_folder
from dtron.data.corpus.executors import EXECUTORS, prepare_on
from dtron.data.corpus.files import absolute
from dtron.data.corpus.prepare import prepare_folder
from dtron.data.corpus.tokenize import cores
from dtron.data.inspection import Piece, as_page, as_text, pieces_of, statistics
from dtron.data.loader import sequences_of_step
from dtron.data.mixture import Mixture
from dtron.data.sources import corpus_of, is_stream, open_all, open_corpus_and_index, prepare
from dtron.data.tokenizer import load_tokenizer
from dtron.errors import ArgumentParser, ConfigError, DataError, check_words, counted, nearest
from dtron.io.filesystem import location, read, write_atomically

_TEXT_CHARACTERS = 400


def data_parser(command: str) -> argparse.ArgumentParser:
    """Build the argument parser of `dtron data COMMAND`, a key of COMMANDS."""
    text, add = COMMANDS[command]
    parser = ArgumentParser(
        prog=f"dtron data {command}", description=f"{text[0].upper()}{text[1:]}."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    add(parser)
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="a new folder, or a URL such as s3://bucket/prepared; default: data.cache_dir",
    )
    parser.add_argument("--paths", nargs="+", metavar="PATH", help="data.paths")
    parser.add_argument("--tokenizer", metavar="PATH", help="data.tokenizer")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: all cores")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a document that cannot be read; skip lists it in summary.log",
    )
    parser.add_argument(
        "--on",
        choices=("local", *EXECUTORS),
        default="local",
        help="where: local uses this machine; others use datatrove's executors",
    )
    parser.add_argument(
        "--on-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of datatrove's executor, such as partition=cpu or time=4:00:00",
    )


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, default=1, metavar="S", help="from 1; default 1")
    parser.add_argument("--dp-size", type=int, default=1, metavar="N", help="data-parallel ranks")
    parser.add_argument("--dp-rank", type=int, metavar="R", help="one of them; default: all")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page instead")


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "prepare": ("tokenize a corpus before the run, on this machine or on many", _add_prepare),
    "show": ("print the sequences that a step trains on, with their documents", _add_show),
    "stats": ("count documents and tokens, and what each packing costs", lambda parser: None),
}
"""Command -> summary, and function that adds its arguments to those of all commands."""


def main(arguments: Sequence[str]) -> int:
    """Run `dtron data COMMAND ...`; return the exit status.

    Raises:
        ConfigError: an argument or the config is invalid.
        DataError: the data cannot be read or written.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:8} {text}" for name, (text, _) in COMMANDS.items()]
        print("\n".join(["usage: dtron data COMMAND ...; dtron data COMMAND --help", "", *lines]))
        return 0 if arguments else 2
    command, words = arguments[0], list(arguments[1:])
    if command not in COMMANDS:
        raise ConfigError(
            f"dtron data {command}: no such command{nearest(command, COMMANDS)}; use "
            f"{', '.join(COMMANDS)}"
        )
    check_words(words)
    options = data_parser(command).parse_intermixed_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    overrides = list(options.overrides)
    for key in ("paths", "tokenizer"):
        if (value := getattr(options, key, None)) is not None:
            overrides.append(f"data.{key}={json.dumps(value)}")
    config = RunConfig.load(options.config, overrides)
    {"prepare": _prepare, "show": _show, "stats": _stats}[command](config, options)
    return 0


def _stats(config: RunConfig, options: argparse.Namespace) -> None:
    data = config.data
    if is_stream(data):
        raise ConfigError("data.hf_streaming = true: a stream is not counted; set it to false")
    prepare(data)
    shown = []
    for name, part in (data.parts | data.validation_parts).items():
        corpus, index = open_corpus_and_index(part)
        found = statistics(corpus, index, load_tokenizer(part), config.train.seq_len)
        shown.append(f"{name}:\n{found}" if name else found)
    print("\n\n".join(shown))


def _prepare(config: RunConfig, options: argparse.Namespace) -> None:
    data = config.data
    if options.paths:  # one corpus, whatever the config mixes
        data = data.model_copy(update={"mixture": (), "mixture_steps": (), "validation": ()})
    if data.source == "prepared" or is_stream(data):
        raise ConfigError(
            f"data.source = {data.source!r}, data.hf_streaming = {data.hf_streaming}: nothing to "
            "prepare; use files, or hf without streaming"
        )
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers {options.workers} is below 1; use 1 or more")
    if options.out is None:
        given = [options.on != "local", options.on_error != "stop", options.workers]
        if any(given) or options.on_option:
            raise ConfigError(
                "--on, --on-error and --workers need --out DIR; name a folder for the shards"
            )
        prepare(data, config.train.seq_len)
        print(f"the cache in {cache_folder(data.cache_dir)} is complete")
        return
    if data.mixture or data.validation:
        raise ConfigError(
            "--out writes one corpus, but data.mixture or data.validation has several; prepare "
            "each by its --paths, then set data.source=prepared and their folders as paths"
        )
    if options.on_option and options.on == "local":
        raise ConfigError("--on-option has no effect with --on local; leave it out")
    corpus, tokenizer = corpus_of(data), load_tokenizer(data)
    skip, out = options.on_error == "skip", location(absolute(options.out))
    if options.on != "local":
        prepare_on(options.on, corpus, tokenizer, out, skip, options.workers, options.on_option)
        return
    workers = options.workers or cores()
    prepare_folder(corpus, tokenizer, out, workers, skip)
    print(read(out / "summary.log").decode(), end="")
    words = [f"data.source=prepared data.paths='[\"{out}\"]'", f"data.tokenizer={data.tokenizer}"]
    named = {"eos_token": data.eos_token, "bos_token": data.bos_token}
    words += [f"data.{key}='{token}'" for key, token in named.items() if token]
    print(f"train on it with {' '.join(words)}")


def _show(config: RunConfig, options: argparse.Namespace) -> None:
    if options.dp_size < 1:
        raise ConfigError(f"--dp-size {options.dp_size} is below 1; use 1 or more")
    if options.step < 1:
        raise ConfigError(f"--step {options.step} is below 1; the first step is 1")
    if options.dp_rank is not None and not 0 <= options.dp_rank < options.dp_size:
        raise ConfigError(
            f"--dp-rank {options.dp_rank} is not below --dp-size {options.dp_size}; ranks count "
            "from 0"
        )
    each = options.dp_size * config.train.micro_batch
    if config.train.global_batch % each:
        raise ConfigError(
            f"train.global_batch = {config.train.global_batch} is not a multiple of {each} = "
            f"--dp-size {options.dp_size} x train.micro_batch = {config.train.micro_batch}"
        )
    data, tokenizer = config.data, load_tokenizer(config.data)
    prepare(data, config.train.seq_len)
    source, _ = open_all(
        data,
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        global_batch=config.train.global_batch,
    )
    corpora = {
        name: None if is_stream(data) else open_corpus_and_index(part)[0]
        for name, part in data.parts.items()
    }
    ranks = range(options.dp_size) if options.dp_rank is None else [options.dp_rank]
    first = (options.step - 1) * config.train.global_batch
    if isinstance(source, Mixture):
        source.seek(first, source.state(first))  # ranks go back to this sequence
    shown: list[tuple[str, list[Piece]]] = []
    for rank in ranks:
        rows = sequences_of_step(
            first, config.train.global_batch, config.train.micro_batch, rank, options.dp_size
        )
        for batch, numbers in enumerate(rows):
            for row, number in enumerate(numbers):
                heading = (
                    f"sequence {number:,}: step {options.step}, data-parallel rank {rank} of "
                    f"{options.dp_size}, micro-batch {batch}, row {row}"
                )
                name, place, own = "", number, source
                if isinstance(source, Mixture):
                    name, place = source.place(number)
                    own = source.sources[name].sequences
                    heading += f", sequence {place:,} of {name}"
                shown.append((heading, list(pieces_of(own.sequence(place), corpora[name]))))
    if options.page is not None:
        title = f"Step {options.step}"
        try:
            write_atomically(options.page, as_page(title, shown, tokenizer), synced=False)
        except OSError as error:
            raise DataError(f"--page {options.page}: {error.strerror}") from None
        print(f"{counted(len(shown), 'sequence')} in {options.page}")
        return
    for heading, pieces in shown:
        print(f"{heading}\n{as_text(pieces, tokenizer, _TEXT_CHARACTERS)}\n")
