"""Validation loss and sample text of a run.

All ranks run every forward pass, since collectives gather the parameters. Rank 0 draws the tokens.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.config import RunConfig
from dtron.data import Batch, Tokenizer, ValidationSource, validation_batches
from dtron.data.images.prompt import encode_image_prompt, image_index
from dtron.data.objectives.spans import START, decode_spans, encode_prompt
from dtron.errors import ConfigError
from dtron.parallelisms.mesh import BATCH_AXES
from dtron.training.batches import RankTokens
from dtron.training.step import ParallelModel, as_micro_batch, evaluate

log = logging.getLogger("dtron")


class Evaluation:
    """Evaluates the model with its current weights; all ranks call every method together.

    Args:
        tokens: selects this rank's tokens.
        validation: validation sets by name, as in `DataSetup`.
        compiling: function that is called after the experts' capacity was raised, which compiles
            blocks again.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ParallelModel,
        tokens: RankTokens,
        tokenizer: Tokenizer,
        validation: Mapping[str, ValidationSource],
        compiling: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.model, self.tokens = config, model, tokens
        self.tokenizer, self.validation, self.compiling = tokenizer, validation, compiling

    def losses(self) -> dict[str, float]:
        """Return the mean loss of each validation set, as metrics; empty: validation is off.

        The set "" is `validation_loss`, others are `validation_loss/NAME`. With a mixture,
        `validation_loss` is the mean of its sources, and if none holds documents out, of all sets.
        Waits for the device.
        """
        sets = self.validation if self.config.train.eval_sequences else {}
        losses = {name: self._loss(each) for name, each in sets.items()}
        named = {f"validation_loss/{name}": loss for name, loss in losses.items() if name}
        if not losses:
            return {}
        own = [losses[name] for name in self.config.data.parts if name in losses]
        own = own or list(losses.values())
        return {"validation_loss": sum(own) / len(own), **named}

    def _loss(self, source: ValidationSource) -> float:
        train = self.config.train
        batches = validation_batches(
            source,
            sequences=train.eval_sequences,
            micro_batch=train.micro_batch,
            dp_rank=self.model.mesh.rank(*BATCH_AXES),
            dp_size=self.model.mesh.size(*BATCH_AXES),
        )
        prepared = [self.tokens.prepare(batch) for batch in batches]
        return self.repeated(lambda: evaluate(self.model, prepared)).item()

    def repeated(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of a forward, which is repeated while experts drop tokens."""
        result = compute()
        while self._dropped():
            result = compute()
        return result

    def _dropped(self) -> bool:
        """Return whether experts dropped tokens; then the capacity has been raised. A collective.

        Raises: as `Dispatcher.grow`.
        """
        dispatcher = self.model.applied.dispatcher
        message = dispatcher.grow(self.tokens.device) if dispatcher is not None else ""
        if message:
            log.warning("%s; the evaluation is repeated", message)
            self.compiling()
        return bool(message)

    def sample(self) -> str:
        """Continue `train.sample_prompt` by `train.sample_tokens` tokens; return the text."""
        train = self.config.train
        # The shape of training, so that compiled blocks are reused.
        shape = (train.micro_batch, train.seq_len)
        return self.generate(train.sample_prompt, train.sample_tokens, shape, train.seed)

    def generate(
        self,
        prompt: str,
        n_tokens: int,
        shape: tuple[int, int],
        seed: int,
        temperature: float = 0.8,
        until: Sequence[str] = (),
        images: Sequence[str] = (),
    ) -> str:
        """Continue a prompt; return the text. Arguments as of `sample_text`.

        Args:
            shape: (B, T).
            images: paths of the images that the prompt has as `<image>`.
        Raises:
            ConfigError: the model does not predict next tokens, or reads no images.
        """
        if not self.tokens.model.config.causal:
            raise ConfigError(
                f"model.name = {self.config.model.name} restores masked tokens and generates no "
                "text; use dtron eval, or a model that predicts next tokens"
            )
        if images and not self.tokens.model.config.vision_layers:
            raise ConfigError(
                f"model.name = {self.config.model.name} reads no images; leave out --image"
            )
        if self.tokens.model.config.encoder_layers:
            return self._restore(prompt, n_tokens, shape[0], seed, temperature)
        if images:
            return self._describe(prompt, images, n_tokens, shape, seed, temperature)
        with self.model.applied.evaluating():
            return sample_text(
                self._next_logits,
                self.tokenizer,
                prompt=prompt,
                n_tokens=n_tokens,
                batch_shape=shape,
                device=self.tokens.device,
                seed=seed,
                temperature=temperature,
                until=until,
            )

    def _restore(
        self, prompt: str, n_tokens: int, n_rows: int, seed: int, temperature: float
    ) -> str:
        """Return a decoder's text for a prompt that its encoder reads.

        Raises:
            ConfigError: tp ranks split the sequence.
        """
        mesh, data = self.model.mesh, self.config.data
        vocab_size, tokenizer = self.tokens.model.config.vocab_size, self.tokenizer
        if mesh.size("tp") > 1 and self.config.parallel.sequence_parallel:
            raise ConfigError(
                f"parallel.tp = {mesh.size('tp')} cannot split a prompt of any length; use "
                "parallel.sequence_parallel = false"
            )
        read = torch.tensor([encode_prompt(prompt, data, tokenizer, vocab_size)] * n_rows)
        drawn = (n_rows, n_tokens), vocab_size, seed, temperature
        ids = self._drawn({"encoder_tokens": read}, [START], n_tokens, *drawn)
        return decode_spans(ids[1:], data, tokenizer, vocab_size)

    def _describe(
        self,
        prompt: str,
        paths: Sequence[str],
        n_tokens: int,
        shape: tuple[int, int],
        seed: int,
        temperature: float,
    ) -> str:
        """Continue a prompt with images; return the text.

        Raises:
            ConfigError: an image cannot be read, or prompt and images do not fit.
        """
        config, tokenizer = self.tokens.model.config, self.tokenizer
        sizes = {"image_token": config.image_token, "image_tokens": config.image_tokens}
        sizes["image_size"] = config.vision_image_size
        data = self.config.data.model_copy(update=sizes)  # weights alone have no `data` of theirs
        first, images = encode_image_prompt(prompt, paths, data, tokenizer)
        inputs = {"images": images, "image_index": image_index(first, shape, data)}
        drawn = shape, tokenizer.vocab_size, seed, temperature
        ids = self._drawn(inputs, first, n_tokens, *drawn)
        return prompt + tokenizer.decode(ids[len(first) :])

    def _drawn(
        self,
        inputs: Mapping[str, Tensor],
        first: list[int],
        n_tokens: int,
        shape: tuple[int, int],
        vocab_size: int,
        seed: int,
        temperature: float,
    ) -> list[int]:
        """Return the ids of `first` and those that continue them, below `vocab_size`."""
        with self.model.applied.evaluating():
            return draw_tokens(
                lambda tokens, index: self._next_logits(tokens, index, inputs)[:vocab_size],
                first,
                n_tokens=n_tokens,
                batch_shape=shape,
                device=self.tokens.device,
                seed=seed,
                temperature=temperature,
                end=self.tokenizer.eos_id,
            )

    def _next_logits(
        self, tokens: Tensor, index: int, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        vocabulary = self.tokens.model.config.vocab_size
        arguments = (self.model, self.tokens.prepare, vocabulary, tokens, index, inputs or {})
        return self.repeated(lambda: next_logits(*arguments))


@torch.no_grad()
def sample_text(
    next_logits: Callable[[Tensor, int], Tensor],
    tokenizer: Tokenizer,
    *,
    prompt: str,
    n_tokens: int,
    batch_shape: tuple[int, int],
    device: torch.device,
    seed: int,
    temperature: float,
    until: Sequence[str] = (),
) -> str:
    """Continue `prompt` by `n_tokens` tokens, or until the end of the document; return the text.

    Args:
        next_logits: function that all ranks call with tokens (B sequences, T tokens) and an index;
            it returns the logits (vocabulary size,) at this index of the first sequence.
        batch_shape: (B, T) of all batches; only the last T tokens of a longer text are read.
        temperature: divides the logits; 0: always the most likely token.
        until: texts that end the continuation, which then has one of them.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    first = [*begin, *tokenizer.encode(prompt)] or [tokenizer.eos_id]
    start = len(first)
    ids = draw_tokens(
        lambda tokens, index: next_logits(tokens, index)[: tokenizer.vocab_size],
        first,
        n_tokens=n_tokens,
        batch_shape=batch_shape,
        device=device,
        seed=seed,
        temperature=temperature,
        end=tokenizer.eos_id,
        stops=lambda ids: any(each in tokenizer.decode(ids[start:]) for each in until),
    )
    text = tokenizer.decode(ids)  # some decoders drop spaces or invalid bytes of the whole text
    return text if text.startswith(prompt) else prompt + tokenizer.decode(ids[start:])


def draw_tokens(
    next_logits: Callable[[Tensor, int], Tensor],
    first: Sequence[int],
    *,
    n_tokens: int,
    batch_shape: tuple[int, int],
    device: torch.device,
    seed: int,
    temperature: float,
    end: int,
    stops: Callable[[list[int]], bool] = lambda ids: False,
) -> list[int]:
    """Append at most `n_tokens` ids to `first`, one by one; return all of them.

    Args:
        next_logits, batch_shape, device, seed, temperature: as of `sample_text`; the logits are of
            the ids that may be drawn.
        end: id that ends the text and is left out.
        stops: whether ids are complete.
    """
    generator, ids = torch.Generator(device).manual_seed(seed), list(first)
    for _ in range(n_tokens):
        window = ids[-batch_shape[1] :]
        tokens = torch.zeros(batch_shape, dtype=torch.int64, device=device)
        tokens[:, : len(window)] = torch.tensor(window, device=device)
        logits = next_logits(tokens, len(window) - 1).float()
        if temperature:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            drawn = logits.argmax(keepdim=True)
        dist.broadcast(drawn, src=0)
        if (token := int(drawn)) == end:
            break
        ids.append(token)
        if stops(ids):
            break
    return ids


def next_logits(
    model: ParallelModel,
    prepare: Callable[[Batch], Batch],
    vocab_size: int,
    tokens: Tensor,
    index: int,
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """Compute the logits at `index` of the first sequence; all ranks call it together.

    Args:
        prepare: function that selects this rank's tokens of a batch and moves them to the device.
        vocab_size: size of the vocabulary, V, without padding for tp.
        tokens: int64 (B, T), whole sequences.
        inputs: other fields of `Batch`, such as `encoder_tokens`.
    Returns:
        float32 (V + padding,), equal on all pp, cp and tp ranks of a data-parallel rank.
    """
    tp, mesh = model.mesh.size("tp"), model.mesh
    local = torch.zeros(-(-vocab_size // tp), device=tokens.device)
    tokens = tokens.cpu()
    batch = prepare(replace(Batch(tokens, tokens, tokens[:, 0], None, None), **inputs))
    here = slice(index, index + 1) if batch.index is None else batch.index[0] == index

    def keep(logits: Tensor, _i: int) -> None:
        local.copy_(logits[0, here].sum(0))

    model.execution.evaluate([as_micro_batch(batch)], keep)
    # Nonzero only on the last stage and on the cp rank that has the token.
    dist.all_reduce(local, group=mesh.group("pp"))
    dist.all_reduce(local, group=mesh.group("cp"))
    columns = [torch.empty_like(local) for _ in range(tp)]
    dist.all_gather(columns, local, group=mesh.group("tp"))
    return torch.cat(columns)
