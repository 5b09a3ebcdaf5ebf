"""lm-evaluation-harness over dtron's own model: `dtron eval WEIGHTS --tasks NAMES`.

Every rank runs the harness on the same requests; only the forward passes are divided among ranks.
Texts are tokenized as in training: without special tokens, an empty context is EOS.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
    make_table,
)

from dtron.errors import ConfigError, shorten
from dtron.inference.scores import Continuation, padded_length, score
from dtron.training.evaluation import Evaluation

_MOST_GENERATED = 256
"""Tokens that a task generates if it does not say how many, as in lm-eval's model `hf`."""


class HarnessModel(TemplateLM):
    """A loaded model as lm-eval's language model; all ranks call every method together."""

    def __init__(self, loaded: Evaluation) -> None:
        super().__init__()
        self.loaded = loaded

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a document."""
        return self.loaded.tokenizer.eos_id

    def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self.loaded.tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Score (texts, context, continuation); texts over `seq_len` lose their beginning."""
        most = self.loaded.config.train.seq_len
        texts = []
        for _texts, context, continuation in requests:
            tokens = [*context, *continuation][-(most + 1) :]
            texts.append(Continuation(tokens, min(len(continuation), len(tokens) - 1)))
        return score(self.loaded, texts)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-likelihood of whole texts, which are cut into windows of `seq_len`."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens, length = self.tok_encode(request.args[0]), self.loaded.config.train.seq_len
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (likelihood, _greedy) in zip(
            owners, self._loglikelihood_tokens(windows), strict=True
        ):
            totals[number] += likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continue texts by the most likely tokens until one of `until` appears, which is cut."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") and settings.get("temperature"):
            raise ConfigError(
                "the task draws tokens (do_sample); dtron eval takes the most likely token only: "
                "use another task, or dtron convert to-hf and lm_eval --model hf"
            )
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        n_tokens = int(settings.get("max_gen_toks", _MOST_GENERATED))
        train = self.loaded.config.train
        window = padded_length(len(self.tok_encode(context)) + n_tokens, train.seq_len)
        text = self.loaded.generate(context, n_tokens, (1, window), 0, 0.0, stops)
        text = text.removeprefix(context)
        return min((text.split(stop)[0] for stop in stops if stop), key=len, default=text)


def find_tasks(tasks: Sequence[str], folder: str) -> TaskManager:
    """Find tasks by name.

    Args:
        tasks: names of tasks or groups.
        folder: a folder with task files of the user; empty: none.
    Raises:
        ConfigError: a task is unknown.
    """
    manager = TaskManager(include_path=folder or None)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise ConfigError(
            f"--tasks {','.join(unknown)}: lm-eval has no such task; lm_eval ls tasks lists them, "
            "and --include-path names a folder of your own"
        )
    return manager


def run_tasks(
    loaded: Evaluation,
    tasks: Sequence[str],
    manager: TaskManager,
    shots: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness; all ranks call it together.

    Standard errors that need a bootstrap, such as that of perplexity, are not computed.

    Args:
        manager: from `find_tasks` of the same tasks.
        shots: number of examples in the prompt; None: that of each task.
        limit: most documents of each task; None: all.
    Returns:
        Results of lm-eval (`results`, `configs`, `versions`, ...); on ranks other than the first
        of a host, an empty dict.
    Raises:
        ConfigError: the data of a task cannot be loaded, or the model has an encoder.
    """
    if loaded.tokens.model.config.encoder_layers:
        raise ConfigError(
            f"--tasks with model.name = {loaded.config.model.name}: dtron eval runs tasks on "
            "decoders only; use dtron convert to-hf and lm_eval --model hf"
        )
    run: Any = simple_evaluate  # its decorator hides the arguments
    try:
        found = run(
            HarnessModel(loaded),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,  # it starts processes on each rank
        )
    except (OSError, ValueError) as error:
        cause = shorten(" ".join(str(error).split()), 300)
        raise ConfigError(
            f"--tasks {','.join(tasks)}: {cause}; fix the task or its data"
        ) from error
    return dict(found or {})


def table(results: dict[str, Any]) -> str:
    """Return the results as lm-eval prints them."""
    return make_table(results).rstrip()
