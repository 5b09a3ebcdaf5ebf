"""The floor of benchmarks/bare.py computes what dtron's models compute, and trains."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import bare
from dtron.bench.command import bench_parser
from dtron.bench.run import Options, bench_config
from dtron.bench.sweep import points
from dtron.models import BACKENDS, build_model, model_config
from dtron.models.flops import n_parameters
from dtron.setup.rules import check_layout
from dtron.training.loss import sequence_losses

ROOT = Path(__file__).resolve().parents[2]
PAIRS = re.findall(
    r"^\| .* \| `(--size [^`]*)`.* \| `(configs/[^`]*)` \|$",
    (ROOT / "docs/benchmarking.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
"""Arguments of bare.py and of `dtron bench` that are to be compared."""


@pytest.mark.parametrize("pair", PAIRS, ids=[pair[0] for pair in PAIRS])
def test_both_sides_of_a_pair_are_equal(pair: tuple[str, str]) -> None:
    own = bare.parse(pair[0].split())
    given = bench_parser().parse_intermixed_args(pair[1].split())
    (point,) = points(given.axes)
    options = Options(ranks=given.nproc_per_node)
    config, _ = bench_config(ROOT / given.config, point.overrides, options, Path())
    check_layout(config, options.ranks)
    with torch.device("meta"):
        model = bare.Model(bare.size_of(own), own.length, SDPBackend.MATH, 1)
    n = n_parameters(model_config(config.model.name, config.model.size, config.model.override))
    assert sum(p.numel() for p in model.parameters()) == n
    train, ranks = config.train, given.nproc_per_node
    assert (train.seq_len, train.micro_batch) == (own.length, own.sequences)
    assert (train.global_batch, train.loss_chunks) == (own.sequences * ranks, own.loss_chunks)
    assert (config.optim.moments, train.dtype, config.compile.enable) == (
        "float32",
        "bfloat16",
        True,
    )
    assert config.model.attention == "cudnn"


def test_every_size_has_a_pair() -> None:
    sizes = {bare.parse(own.split()).size for own, _ in PAIRS}
    assert sizes == {name for name in bare.SIZES if not name.startswith("debug")}


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
