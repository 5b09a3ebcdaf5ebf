"""What the planner says that blocks keep is what the compiler's partitioner keeps."""

import pytest
import torch

from dtron.config import Recompute
from dtron.models import MODELS, build_model, choose_backend, model_config
from dtron.models.rope import rope_table
from dtron.parallelisms.recompute import recompute
from dtron.plan.activations import block

B, T = 2, 64
MIXTURES = 0.025
"""Vectors of a router's size, which do not grow with the model's width, are not all listed."""


def saved_bytes(name: str, layer: int, mode: str) -> float:
    """A token, by torch's own partitioner, without generating code."""
    config = model_config(name, "debug")
    backend = choose_backend(
        "sdpa" if not config.window else "math",
        device_type="cpu",
        dtype=torch.bfloat16,
        head_dim=config.head_size,
        documents=False,
        dropout=False,
        deterministic=False,
        window=config.window,
        softcap=config.softcap,
        sinks=config.sinks,
    )
    torch.manual_seed(0)
    model = build_model(name, config, backend).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    unit = model.get_submodule(f"blocks.{layer}")
    positions = torch.arange(T).unsqueeze(0)
    rope = rope_table(config, positions) if config.positions == "rope" else None
    mask = model.backend.prepare(None, positions)  # type: ignore[union-attr, operator]
    recompute([(0, unit)], Recompute(mode=mode))  # type: ignore[arg-type]
    shared = [*model.parameters(), *([rope] if rope is not None else [])]
    others = {tensor.untyped_storage().data_ptr() for tensor in shared}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in others:
            found[at] = tensor
        return tensor

    x = torch.randn(B, T, config.dim, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(unit, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(x, rope, mask, None)
    # Constants, such as a cast copy of a router's weight, do not grow with the tokens.
    of_tokens = [
        t for t in found.values() if t.numel() >= B * T and t.shape[0] in (1, B, B * T, 4 * B * T)
    ]
    return sum(t.untyped_storage().nbytes() for t in of_tokens) / (B * T)


ROWS = [
    *[("llama", 0, mode) for mode in ("none", "selective", "attention")],
    *[(name, 0, "none") for name in ("gpt", "qwen3", "deepseek_v3")],
    *[("deepseek_v3", 3, mode) for mode in ("none", "selective", "attention")],
    ("qwen3_moe", 0, "none"),
]


@pytest.mark.parametrize(("name", "layer", "mode"), ROWS)
def test_bytes_that_a_compiled_block_keeps(name: str, layer: int, mode: str) -> None:
    torch._dynamo.reset()
    config = model_config(name, "debug")
    mixture = layer >= config.n_dense_layers
    saved = block(config, "mixture" if mixture else "dense")
    rows = [row for row in saved if row.eager is not True and mode in row.modes]
    told = sum(row.width * (4 if row.wide else 2) for row in rows)
    real = saved_bytes(name, layer, mode)
    assert told == pytest.approx(real, rel=MIXTURES if mixture else 0)


def test_every_family_has_rows() -> None:
    for name, spec in MODELS.items():
        config = spec.sizes["debug"]
        kind = "mixture" if config.n_experts else "dense"
        assert sum(row.width for row in block(config, kind)) > 0, name
