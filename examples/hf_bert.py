"""BERT of Hugging Face transformers, whose head and embedding share a weight, over any mesh.

torchrun --nproc-per-node 2 examples/hf_bert.py --tp 2
torchrun --nproc-per-node 2 examples/hf_bert.py --pp 2
torchrun --nproc-per-node 4 examples/hf_bert.py --tp 2     # dp_shard takes the other 2
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from dtron.parallelisms import Mesh, Replicate, colwise, pipeline, prepare_input, replicate, rowwise

# -- parallel
LAYER = "bert.encoder.layer.*"
PLACEMENTS = {
    f"{LAYER}.attention.self": prepare_input(Replicate()),
    (f"{LAYER}.attention.self.[qkv]*", f"{LAYER}.intermediate.dense"): colwise(),
    (f"{LAYER}.attention.output.dense", f"{LAYER}.output.dense"): rowwise(),
    (f"{LAYER}.*.LayerNorm", f"{LAYER}.*.*.LayerNorm", "bert.embeddings", "cls"): replicate(),
}
STAGES = ["bert.embeddings", "bert.encoder.layer.[01]"], ["bert.encoder.layer.[23]", "cls"]
# -- end


def build() -> BertForMaskedLM:
    """A small model with random weights."""
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**sizes))


def loss(output: Any, labels: Tensor) -> Tensor:
    """Sum over the masked tokens of a micro-batch; the others have the label -100."""
    return F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def main() -> None:
    """A few steps of filling gaps in sequences that count upwards."""
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    # -- parallel
    mesh = Mesh(tp=args.tp, pp=args.pp)
    model = pipeline(build(), mesh, stages=STAGES, units=LAYER, placements=PLACEMENTS)
    # -- end
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(mesh.rank("dp_shard"))  # other data and dropout on each data-parallel rank
    for step in range(args.steps):
        tokens = 2 + (torch.randint(126, (8, 1)) + torch.arange(32)) % 126
        gaps = torch.rand(8, 32) < 0.15
        inputs = tokens.masked_fill(gaps, 1).to(mesh.device_type)
        labels = tokens.masked_fill(~gaps, -100).to(mesh.device_type)
        count = (labels != -100).sum()  # ranks mask different numbers of tokens
        dist.all_reduce(count, group=mesh.group("dp_shard"))
        mean = model.step(inputs, labels, loss, micro_batches=4, divide_by=count)
        norm = model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.4f} grad norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
