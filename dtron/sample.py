"""Text from the model in training: a look at what it has learned, not an inference engine.

Every rank runs every forward pass, because parameters are gathered together; rank 0 draws.
"""

import torch
import torch.distributed as dist
from torch import nn

from dtron.data import Tokenizer


@torch.no_grad()
def sample_text(
    model: nn.Module,
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
        batch_shape: (B, T) of training's micro-batches, so that compiled blocks are reused.
    """
    model.eval()
    generator = torch.Generator(device).manual_seed(seed)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    for _ in range(n_tokens):
        window = ids[-batch_shape[1] :]
        tokens = torch.zeros(batch_shape, dtype=torch.int64, device=device)
        tokens[:, : len(window)] = torch.tensor(window, device=device)
        logits = model(tokens)[0, len(window) - 1, : tokenizer.vocab_size].float()
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        dist.broadcast(drawn, src=0)
        if (token := int(drawn)) == tokenizer.eos_id:
            break
        ids.append(token)
    model.train()
    return tokenizer.decode(ids)
