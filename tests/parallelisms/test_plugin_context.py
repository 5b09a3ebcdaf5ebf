"""Context parallelism of modules that dtron did not write: gradients equal one process."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.config import CpMethod
from dtron.errors import ConfigError, PlacementError
from dtron.parallelisms import Context, Mesh, Split, global_norm, parallelize, pipeline
from examples import context as example
from tests.harness import run_ranks
from tests.parallelisms.test_plugin import assert_close

ROOT = Path(__file__).parents[2]
ROWS, LENGTH = 4, 32


def batch(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels (ROWS, LENGTH) of all ranks together."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (2, ROWS, LENGTH), generator=generator)
    return tokens[0], tokens[1]


def local(x: Tensor, mesh: Mesh) -> Tensor:
    """This data-parallel rank's rows."""
    return x.chunk(mesh.size("dp_shard"))[mesh.rank("dp_shard")]


def found_by(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    gradients = {k: p.grad.full_tensor() for k, p in model.named_parameters()}  # type: ignore[union-attr]
    return {"gradients": gradients, "norm": global_norm(list(model.parameters()), mesh).item()}


def wanted_of(model: nn.Module) -> dict[str, Any]:
    gradients = {k: p.grad for k, p in model.named_parameters()}
    return {"gradients": gradients, "norm": nn.utils.clip_grad_norm_(model.parameters(), 1e9)}


def compare(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for found in ranks:
        assert found["gradients"].keys() == wanted["gradients"].keys()
        assert_close(found["gradients"], wanted["gradients"])
        assert found["norm"] == pytest.approx(float(wanted["norm"]), rel=1e-5)


# -- the example ----------------------------------------------------------------------------------


def build() -> nn.Module:
    """The example's model, its matrices large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model = example.Model()
    for block in model.blocks:
        block.qkv.weight.data.mul_(4)  # type: ignore[union-attr, operator]
        block.core.scale = 7.0  # type: ignore[union-attr]  # its own, by which nothing is scored
    return model


def run_example(cp: int, method: CpMethod) -> dict[str, Any]:
    mesh = Mesh(cp=cp)
    context = Context("blocks.*.core", (method,))
    model = parallelize(build(), mesh, units="blocks.*", dtype="float32", context=context)
    tokens, labels = (local(x, mesh) for x in batch(64))
    index = Split(None, (len(tokens), LENGTH), cp).index(mesh.rank("cp"))
    loss = example.loss(model(tokens.gather(1, index), index), labels.gather(1, index))
    (loss / mesh.size("dp_shard", "cp")).backward()
    return found_by(model, mesh)


CASES: list[tuple[int, int, CpMethod]] = [
    (2, 2, "ring"),
    (2, 2, "all_gather"),
    (2, 2, "ulysses"),
    (4, 4, "hierarchical"),
    (4, 2, "ring"),
]


@pytest.mark.parametrize(("world", "cp", "method"), CASES, ids=str)
def test_the_example_equals_one_process(world: int, cp: int, method: CpMethod) -> None:
    torch.set_num_threads(1)
    model, (tokens, labels) = build(), batch(64)
    example.loss(model(tokens, torch.arange(LENGTH).expand(ROWS, -1)), labels).backward()
    compare(run_ranks(world, run_example, cp, method), wanted_of(model))


def test_the_parallel_part_of_the_example_is_ten_lines_at_most() -> None:
    text = (ROOT / "examples" / "context.py").read_text()
    part = re.findall(r"# -- parallel\n(.*?)# -- end", text, re.DOTALL)[0]
    assert "parallelize(" in part
    assert len(part.strip().splitlines()) <= 10


# -- the documentation ----------------------------------------------------------------------------


def page() -> tuple[str, str]:
    """The first script of docs/context-plug-in.md: its module, and what makes it parallel."""
    text = (ROOT / "docs" / "context-plug-in.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    module, rest = code.split("dist.init_process_group()\n")
    return module, rest


def run_page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for part in page():
        exec(part, names)
    model = names["model"]
    weights = {k: p.full_tensor() for k, p in model.named_parameters()}
    return {**found_by(model, names["mesh"]), "weights": weights, "whole": names["whole"]}


def test_the_module_of_the_documentation_equals_one_process() -> None:
    names: dict[str, Any] = {}
    module, _ = page()
    exec(module, names)
    assert len(module.split("class Core")[1].strip().splitlines()) < 15
    ranks = run_ranks(4, run_page)
    model = nn.Sequential(*(names["Block"]() for _ in range(4)))
    model.load_state_dict(ranks[0]["weights"])
    whole = ranks[0]["whole"]
    (model(whole).square().sum() / whole.numel()).backward()
    compare(ranks, wanted_of(model))


# -- packed documents, sinks and windows, in a model of one's own ---------------------------------


class Core(nn.Module):
    """Causal attention within documents, with a sink; mask: documents (B, T)."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sink: Tensor) -> Tensor:
        ahead = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (ahead >= 0) & (ahead < (self.window or LENGTH))
        seen = seen & (mask.unsqueeze(2) == mask.unsqueeze(1))
        scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhts,bshk->bthk", weights, v)


class Block(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(16, 48), Core(window), nn.Linear(16, 16)
        self.sink = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 4)).chunk(3, dim=2)
        return x + self.out(self.core(q, k, v, mask, self.sink).flatten(2))


class Packed(nn.Module):
    """Logits of packed sequences."""

    def __init__(self, window: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList(Block(window) for _ in range(2))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def documents() -> Tensor:
    """Three documents in each sequence, other ones in each."""
    ends = torch.tensor([[1, 20], [9, 10], [16, 31], [7, 15]])
    return (torch.arange(LENGTH).view(1, 1, -1) >= ends.unsqueeze(-1)).sum(1)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def run_packed(methods: tuple[CpMethod, ...], window: int) -> dict[str, Any]:
    mesh = Mesh(cp=2)
    context = Context("blocks.*.core", methods, window=window)
    model = Packed(window)
    parallelize(model, mesh, units="blocks.*", dtype="float32", context=context)
    tokens, labels = batch(11)
    split = Split(documents(), (ROWS, LENGTH), 2)
    index = split.index(mesh.rank("cp"))
    mask = split.tables(context.layouts(2), mesh.rank("cp"))
    logits = model(tokens.gather(1, index), mask)
    (summed(logits, labels.gather(1, index)) / labels.numel()).backward()
    return found_by(model, mesh)


@pytest.mark.parametrize(
    ("methods", "window"),
    [
        (("ring",), 0),
        (("ring", "ulysses"), 0),
        (("all_gather", "ulysses"), 6),
        (("ring",), 6),
        (("ring", "all_gather"), 20),
    ],
    ids=str,
)
def test_packed_documents_equal_one_process(methods: tuple[CpMethod, ...], window: int) -> None:
    torch.set_num_threads(1)
    model, (tokens, labels) = Packed(window), batch(11)
    (summed(model(tokens, documents()), labels) / labels.numel()).backward()
    compare(run_ranks(2, run_packed, methods, window), wanted_of(model))


# -- a pipeline -----------------------------------------------------------------------------------


class Staged(nn.Module):
    """The example without positions, which every stage would add."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.blocks = nn.Sequential(*(example.Block() for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def run_pipeline() -> dict[str, Any]:
    mesh = Mesh(pp=2, cp=2)
    model = pipeline(
        Staged(),
        mesh,
        stages=[["embed", "blocks.[01]"], ["blocks.[23]", "head"]],
        units="blocks.*",
        dtype="float32",
        context=Context("blocks.*.core"),
    )
    index = Split(None, (ROWS, LENGTH), 2).index(mesh.rank("cp"))
    tokens, labels = (x.gather(1, index) for x in batch(64))
    loss = model.step(tokens, labels, summed, micro_batches=2, divide_by=ROWS * LENGTH)
    gradients = {k: p.grad.full_tensor() for k, p in model.named_parameters()}  # type: ignore[union-attr]
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "norm": model.clip_gradients(1e9).item(),
    }


def test_a_pipeline_equals_one_process() -> None:
    torch.set_num_threads(1)
    model, (tokens, labels) = Staged(), batch(64)
    loss = summed(model(tokens), labels) / labels.numel()
    loss.backward()
    wanted = wanted_of(model)
    seen: set[str] = set()
    for found in run_ranks(4, run_pipeline):
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert found["norm"] == pytest.approx(float(wanted["norm"]), rel=1e-5)
        assert_close(found["gradients"], wanted["gradients"])
        seen |= found["gradients"].keys()
    assert seen == wanted["gradients"].keys()


# -- what is refused ------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    mesh = Mesh(cp=2)

    def messages(context: Context | None) -> str:
        with pytest.raises((ConfigError, PlacementError)) as error:
            parallelize(Staged(), mesh, units="blocks.*", dtype="float32", context=context)
        return str(error.value)

    with pytest.raises(ConfigError) as split:
        Split(None, (1, 30), 4)
    model = parallelize(
        Staged(), mesh, units="blocks.*", dtype="float32", context=Context("blocks.*.core")
    )
    core = next(m for name, m in model.named_modules() if name.endswith(".core"))

    def called(keys: Tensor, mask: Any = None) -> str:
        with pytest.raises(ConfigError) as error:
            core(torch.zeros(1, 8, 4, 16), keys, keys, mask)
        return str(error.value)

    keys = torch.zeros(1, 8, 2, 16)
    shape, tables = core.forward.shape, Split(torch.zeros(1, 16), (1, 16), 2)  # type: ignore[union-attr]
    windowed = replace(core.forward, window=5)  # type: ignore[type-var]
    with pytest.raises(ConfigError) as unnamed:
        windowed(torch.zeros(1, 8, 4, 16), keys, keys, tables.tables({"ring": shape}, 0))
    return {
        "window": str(unnamed.value),
        "heads": called(keys.transpose(1, 2)),
        "row": called(keys, (torch.zeros(2, 2, 2),)),
        "documents": called(keys, torch.zeros(1, 16)),
        "kernel": messages(Context("blocks.*.core", kernel="flash")),
        "not causal": messages(Context("blocks.*.core", window=5, causal=False)),
        "none": messages(None),
        "pattern": messages(Context("blocks.*.cores")),
        "methods": messages(Context("blocks.*.core", ("ring", "ulysses"))),
        "composite": messages(Context("blocks.*.core", ("hierarchical",))),
        "length": str(split.value),
    }


def test_what_is_refused() -> None:
    messages = run_ranks(2, refusals)[0]
    assert "cp = 2 needs `context`, which names the attention modules" in messages["none"]
    assert "'blocks.*.cores' matches no module; did you mean blocks." in messages["pattern"]
    assert "Context.methods has 2 methods for 4 attention modules" in messages["methods"]
    assert 'use "ring" or "ulysses"' in messages["composite"]
    assert "use a multiple such as 24" in messages["length"]
    assert "takes q (B, t, H, K) and k (B, t, G, K), not (1, 8, 4, 16)" in messages["heads"]
    assert "mask has no tables for method 'ring'; pass the whole dict" in messages["row"]
    assert messages["documents"] == messages["row"]
    assert messages["window"].endswith("name 5 in Context.window or Context.windows")
    assert "kernel 'flash' needs GPUs; on a cpu use \"math\"" in messages["kernel"]
    assert "window = 5 with causal = False: windows need a causal mask" in messages["not causal"]
