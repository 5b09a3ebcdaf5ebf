"""Llama of Hugging Face transformers, trained over any mesh by patterns alone.

torchrun --nproc-per-node 2 examples/hf_llama.py --tp 2
torchrun --nproc-per-node 2 examples/hf_llama.py --pp 2
torchrun --nproc-per-node 4 examples/hf_llama.py --tp 2     # dp_shard takes the other 2
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dtron.parallelisms import Mesh, Replicate, colwise, pipeline, prepare_input, replicate, rowwise

# -- parallel
PLACEMENTS = {
    ("model.layers.*.self_attn", "model.layers.*.mlp"): prepare_input(Replicate()),
    ("model.layers.*.self_attn.[qkv]_proj", "model.layers.*.mlp.[gu]*_proj"): colwise(),
    ("model.embed_tokens", "model.layers.*.*.[od]*_proj"): rowwise(),
    ("model.layers.*.*norm", "model.norm"): replicate(),
    "lm_head": colwise(output=Replicate()),
}
STAGES = ["model.embed_tokens", "model.layers.[01]"], ["model.layers.[23]", "model.norm", "lm_head"]
# -- end


def build() -> LlamaForCausalLM:
    """A small model with random weights."""
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def loss(output: Any, labels: Tensor) -> Tensor:
    """Mean over the tokens of a micro-batch."""
    return F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten())


def main() -> None:
    """A few steps on sequences that count upwards."""
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    # -- parallel
    mesh = Mesh(tp=args.tp, pp=args.pp)
    model = pipeline(build(), mesh, stages=STAGES, units="model.layers.*", placements=PLACEMENTS)
    # -- end
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(mesh.rank("dp_shard"))  # other data on each data-parallel rank
    for step in range(args.steps):
        tokens = (torch.randint(128, (8, 1)) + torch.arange(33)) % 128
        tokens = tokens.to(mesh.device_type)
        mean = model.step(tokens[:, :-1], tokens[:, 1:], loss, micro_batches=4)
        norm = model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.4f} grad norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
