"""The command lines of `dtron eval` and `dtron generate`.

Both run in one process or under torchrun.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtron.data.images.rows import PLACEHOLDER
from dtron.errors import ArgumentParser, ConfigError, check_words
from dtron.inference.loaded_model import config_of, load
from dtron.inference.scores import padded_length
from dtron.run.process import Place, process_group
from dtron.run.rendezvous import meet
from dtron.training.evaluation import Evaluation


def evaluate(arguments: Sequence[str]) -> int:
    """Run `dtron eval`; return the exit status."""
    parser = _parser("eval", "Print the loss of trained weights on the run's validation sets.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    tasks = parser.add_argument_group("lm-evaluation-harness, in place of the validation sets")
    tasks.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval, separated by commas")
    tasks.add_argument("--include-path", metavar="FOLDER", help="folder with more task files")
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="examples in the prompt")
    tasks.add_argument("--limit", type=int, metavar="N", help="most documents of each task")
    given = _parsed(parser, arguments)
    if given.tasks:
        return _run_tasks(given)
    for name in ("include_path", "num_fewshot", "limit"):
        if getattr(given, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --tasks; add it")
    with _loaded(given, validation=True) as loaded:
        losses = loaded.losses()
    if not losses:
        raise ConfigError(
            "nothing to evaluate: set train.eval_sequences above 0, and data.validation or "
            "data.paths with more than one document"
        )
    if Place.of_environment().rank == 0:
        print(json.dumps(losses) if given.json else _table(losses))
    return 0


def _run_tasks(given: argparse.Namespace) -> int:
    try:
        from dtron.inference import harness  # needs lm-eval
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-eval ({error}); run pip install 'dtron[eval]'"
        ) from None
    names = given.tasks.split(",")
    manager = harness.find_tasks(names, given.include_path or "")
    first = Place.of_environment().rank == 0
    errors = sys.stderr if first else io.StringIO()  # lm-eval prints progress on both streams
    quiet = contextlib.redirect_stdout(errors), contextlib.redirect_stderr(errors)
    with _loaded(given, validation=False) as loaded, quiet[0], quiet[1]:
        found = harness.run_tasks(loaded, names, manager, given.num_fewshot, given.limit)
    if first:
        print(json.dumps(found["results"]) if given.json else harness.table(found))
    return 0


def _table(losses: dict[str, float]) -> str:
    width = max(map(len, losses))
    rows = losses.items()
    return "\n".join(f"{name:{width}}  {x:.4f}  perplexity {math.exp(x):.5g}" for name, x in rows)


def generate(arguments: Sequence[str]) -> int:
    """Run `dtron generate`; return the exit status."""
    parser = _parser("generate", "Continue a text with trained weights.")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image; once for each <image> in the prompt",
    )
    parser.add_argument("--tokens", type=int, default=128, help="most tokens; default: 128")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: the most likely token; default: 0.8"
    )
    parser.add_argument("--seed", type=int, help="of the drawn tokens; default: train.seed")
    given = _parsed(parser, arguments)
    if given.tokens < 1:
        raise ConfigError(f"--tokens {given.tokens} is not positive; use 1 or more")
    if not 0 <= given.temperature < math.inf:
        raise ConfigError(
            f"--temperature {given.temperature:g} is not a temperature; use 0 or more, such as 0.8"
        )
    with _loaded(given, validation=False) as loaded:
        text = _continued(loaded, given)
    if Place.of_environment().rank == 0:
        print(text)
    return 0


def _continued(loaded: Evaluation, given: argparse.Namespace) -> str:
    train, model, images = loaded.config.train, loaded.tokens.model.config, given.image
    if model.vision_layers and given.prompt.count(PLACEHOLDER) != len(images):
        raise ConfigError(
            f"--prompt has {given.prompt.count(PLACEHOLDER)} times {PLACEHOLDER}, but --image was "
            f"given {len(images)} times; write one {PLACEHOLDER} per --image"
        )
    of_images = len(images) * model.image_tokens
    needed = len(loaded.tokenizer.encode(given.prompt)) + of_images + given.tokens
    window = padded_length(needed, train.seq_len)
    seed = train.seed if given.seed is None else given.seed
    how = given.tokens, (1, window), seed, given.temperature
    return loaded.generate(given.prompt, *how, images=images)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=f"dtron {command}", description=description)
    parser.add_argument(
        "weights",
        help="path or URL of a checkpoint, a run with checkpoints, or a Hugging Face folder",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config with [model], [data] and [train]; default: that of the run",
    )
    parser.add_argument(
        "--ema", action="store_true", help="use the averages of the weights (optim.ema)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    check_words(arguments)
    return parser.parse_intermixed_args(arguments)


@contextlib.contextmanager
def _loaded(given: argparse.Namespace, validation: bool) -> Iterator[Evaluation]:
    """Context manager: the ranks' process group, and the model with its weights."""
    place = Place.of_environment()
    logging.getLogger("dtron").setLevel(logging.WARNING if place.rank == 0 else logging.ERROR)
    config = config_of(given.weights, given.config, given.overrides, place.world_size)
    seconds = config.parallel.timeout_seconds
    with process_group(place, seconds, meet(place, seconds).store):
        yield load(config, place, validation, given.ema)
