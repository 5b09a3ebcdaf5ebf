"""The floor of benchmarks/bare.py computes what dtron's models compute, and trains."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import bare
from dtron.models import BACKENDS, build_model, model_config
from dtron.models.flops import n_parameters
from dtron.training.loss import sequence_losses

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt", "125m", {"max_seq_len": 1024}),
    "qwen3-0.6b": ("qwen3", "0.6b", {}),
    "llama-1.5b": ("llama", "1b", {"tied": False}),
    "llama3-8b": ("llama", "8b", {}),
}
"""Size of bare.py -> model, size and overrides of dtron, as in docs/benchmarking.md."""


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_dtron(name: str) -> None:
    with torch.device("meta"):
        model = bare.Model(bare.SIZES[name], 1024, SDPBackend.MATH, 1)
    assert sum(p.numel() for p in model.parameters()) == n_parameters(model_config(*MODELS[name]))


def theirs(name: str) -> str:
    """The FQN in dtron of a parameter of bare.py."""
    *path, module, kind = name.split(".")
    if path[:1] == ["head"]:
        return f"{'norm' if module == 'norm' else 'head'}.{kind}"
    group = {"w": "attn.", "q": "attn.", "k": "attn.", "u": "ffn.", "d": "ffn.", "g": "ffn."}
    inside = "" if not path or module in ("attn_norm", "ffn_norm") else group[module[0]]
    return ".".join([*path, f"{inside}{module}", kind])


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(
    ("name", "qk_norm", "tied"),
    [("llama", False, False), ("qwen3", True, True), ("gpt", False, True)],
)
def test_loss_and_gradients_are_those_of_dtron(
    name: str, qk_norm: bool, tied: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare, "COMPUTE", torch.float32)
    config = model_config(name, "debug", {"n_layers": 2, "dim": 32})
    gpt, shape = name == "gpt", (config.n_heads, config.n_kv_heads, config.rope_size)
    sizes = (config.vocab_size, config.dim, config.n_layers, *shape, config.ffn_dim)
    rates = {"theta": config.rope_theta, "eps": config.norm_eps}
    size = bare.Size(*sizes, tied=tied, gpt=gpt, qk_norm=qk_norm, **rates)
    torch.manual_seed(0)
    own = bare.Model(size, config.max_seq_len if gpt else 16, SDPBackend.MATH, chunks)
    model = build_model(name, config, BACKENDS["math"])
    state = {theirs(fqn): p.detach() for fqn, p in own.named_parameters(remove_duplicate=False)}
    model.load_state_dict(state, strict=True)
    tokens, labels = torch.randint(config.vocab_size, (2, 2, 16))
    loss = own(tokens, labels)
    loss.backward()
    wanted = sequence_losses(model(tokens), labels).sum() / labels.numel()
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    gradients = {fqn: p.grad for fqn, p in model.named_parameters(remove_duplicate=False)}
    for fqn, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[theirs(fqn)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["none", "inductor"])
def test_it_trains(backend: str) -> None:
    words = ["--backend", backend, "--steps", "2", "--warmup", "1", "--loss-chunks", "2"]
    command = [sys.executable, "benchmarks/bare.py", *words]
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("debug on 1 ranks: ")
    assert float(run.stdout.rpartition("loss ")[2]) == pytest.approx(5.5, abs=0.1)  # near ln(256)
