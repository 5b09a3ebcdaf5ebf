"""Text from the model in training: a look at what it has learned, not an inference engine.

Every rank runs every forward pass, because parameters are gathered together; rank 0 draws.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.data import Batch, Tokenizer
from dtron.training.step import ParallelModel, as_micro_batch


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
    temperature: float = 0.8,
) -> str:
    """Continue `prompt` by `n_tokens` tokens, or until the end of the document.

    Args:
        next_logits: tokens (B, T) and an index -> logits (V,) of the first sequence's token there;
            a collective.
        batch_shape: (B, T) of training's micro-batches, so that compiled blocks are reused.
    """
    generator = torch.Generator(device).manual_seed(seed)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    for _ in range(n_tokens):
        window = ids[-batch_shape[1] :]
        tokens = torch.zeros(batch_shape, dtype=torch.int64, device=device)
        tokens[:, : len(window)] = torch.tensor(window, device=device)
        logits = next_logits(tokens, len(window) - 1)[: tokenizer.vocab_size].float()
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        dist.broadcast(drawn, src=0)
        if (token := int(drawn)) == tokenizer.eos_id:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def next_logits(
    model: ParallelModel,
    prepare: Callable[[Batch], Batch],
    vocab_size: int,
    tokens: Tensor,
    index: int,
) -> Tensor:
    """Logits float32 (V,) of the first sequence's token at `index`, the same on all ranks of its
    pipeline: a collective.

    Args:
        prepare: takes this rank's tokens of a batch and moves them to the device.
        vocab_size: without padded rows, which the result has.
        tokens: int64 (B, T), whole sequences.
    """
    tp, mesh = model.mesh.size("tp"), model.mesh
    local = torch.zeros(-(-vocab_size // tp), device=tokens.device)
    tokens = tokens.cpu()
    batch = prepare(Batch(tokens, tokens, tokens[:, 0], None, None))
    here = slice(index, index + 1) if batch.index is None else batch.index[0] == index

    def keep(logits: Tensor, _i: int) -> None:
        local.copy_(logits[0, here].sum(0))

    model.execution.evaluate([as_micro_batch(batch)], keep)
    # zero but on the last stage, where the token is
    dist.all_reduce(local, group=mesh.group("pp"))
    dist.all_reduce(local, group=mesh.group("cp"))
    columns = [torch.empty_like(local) for _ in range(tp)]
    dist.all_gather(columns, local, group=mesh.group("tp"))
    return torch.cat(columns)
