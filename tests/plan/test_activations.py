"""What the planner says that blocks keep is what the compiler's partitioner keeps, and the products
that it says are computed again are those of the backward's graph."""

import contextlib
import fnmatch
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from dtron.config import Recompute, RunConfig
from dtron.float8 import RECIPES, convert
from dtron.float8.convert import fuse
from dtron.models import (
    BACKENDS,
    MODELS,
    AttentionNeeds,
    build_model,
    choose_backend,
    model_config,
)
from dtron.models.config import LayerKind
from dtron.models.layers import ACTIVATIONS
from dtron.models.rope import rope_table
from dtron.parallelisms.pipeline.split_backward import defer
from dtron.parallelisms.recompute import recompute
from dtron.plan.activations import deferred, loss_tensors, tensors
from dtron.plan.compute_time import matmuls, repeated
from dtron.plan.run_shape import Resolved
from dtron.plan.saved_tensors import ENCODED, block, output_gradients

B, T = 2, 64
LLAMA = Path(__file__).parents[2] / "configs/llama3_8b.toml"
SAME = "aot_eager_decomp_partition"
"""Partitions as inductor does, without generating code."""
HEADS = (4, 8)
"""Numbers of heads of debug sizes."""
MIXTURES = 0.025
"""Vectors of a router's size, which do not grow with the model's width, are not all listed."""


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code saves what attention returns on CPUs only, where the planner plans nothing."""
    monkeypatch.setattr("dtron.parallelisms.recompute.CPU_ATTENTION", ())


def made(
    name: str, layer: int, attention: str = "sdpa", **sizes: Any
) -> tuple[nn.Module, tuple[Any, ...], list[torch.Tensor]]:
    """A block, what it is called with, and tensors that it reads but makes none of."""
    torch._dynamo.reset()
    config = model_config(name, "debug", sizes)
    needs = AttentionNeeds.of(config, "cpu", torch.bfloat16)
    backend = choose_backend(attention if not config.window else "math", needs)
    if backend.full is not None:  # fused, as on GPUs
        backend = replace(backend, full=BACKENDS["sdpa"])
    torch.manual_seed(0)
    model = build_model(name, config, backend).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    unit = model.get_submodule(f"blocks.{layer}")
    positions = torch.arange(T).unsqueeze(0)
    of_layer = config.of_layer(config.layer_kinds[layer])
    rope = rope_table(of_layer, positions) if config.positions == "rope" else None
    mask = model.backend.prepare(None, positions)  # type: ignore[union-attr, operator]
    x = torch.randn(B, T, config.dim, dtype=torch.bfloat16, requires_grad=True)
    shared = [*model.parameters(), *([rope] if rope is not None else [])]
    if config.layer_kinds[layer].recurrent:
        return unit, (x, None, None, None), shared
    if config.layer_kinds[layer].cross:
        encoded = torch.randn(B, T, config.dim, dtype=torch.bfloat16, requires_grad=True)
        return unit, (x, None, mask, None, encoded), [*shared, encoded]
    keys = torch.randint(0, 2**31, (B, T)) if config.attention_dropout else None
    return unit, (x, rope, mask, keys), shared


def saved_bytes(
    name: str,
    layer: int,
    mode: str,
    recipe: str = "",
    skip: str = "",
    modules: Sequence[str] = (),
    **plain: Any,
) -> float:
    """A token, by torch's own partitioner, without generating code."""
    unit, inputs, shared = made(name, layer, **plain)
    if recipe:
        in_recipe(unit, recipe, skip)
    recompute([(0, unit)], Recompute(mode=mode, modules=list(modules)))  # type: ignore[arg-type]
    others = {tensor.untyped_storage().data_ptr() for tensor in shared}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in others:
            found[at] = tensor
        return tensor

    compiled = torch.compile(unit, backend=SAME)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(*inputs)
    # Constants, such as a cast copy of a router's weight, do not grow with the tokens.
    leading = (1, B, B * T, 4 * B * T, *(B * heads for heads in HEADS if plain))
    of_tokens = [t for t in found.values() if t.numel() >= B * T and t.shape[0] in leading]
    return sum(t.untyped_storage().nbytes() for t in of_tokens) / (B * T)


def in_recipe(unit: nn.Module, recipe: str, skip: str = "") -> None:
    """Make a block's linear layers float8, but the router and those that a pattern names."""
    linears = [name for name, module in unit.named_modules() if isinstance(module, nn.Linear)]
    gates = ("ffn.router", "delta.w_a", "delta.w_b", "mamba.w_dt")
    chosen = [n for n in linears if n not in gates and not fnmatch.fnmatch(n, skip)]
    convert(unit, chosen, RECIPES[recipe], emulate=True)
    if getattr(unit.ffn, "activation", None) is ACTIVATIONS["swiglu"]:  # as float8_plan.py
        fuse(unit, ["ffn"])


ROWS = [
    *[("llama", 0, mode) for mode in ("none", "selective", "attention")],
    *[(name, 0, "none") for name in ("gpt", "bert", "qwen3", "deepseek_v3")],
    *[("deepseek_v3", 3, mode) for mode in ("none", "selective", "attention")],
    ("qwen3_moe", 0, "none"),
    *[("qwen3_5", 0, mode) for mode in ("none", "selective", "attention")],
    ("qwen3_5", 3, "none"),
    *[("qwen3_5_moe", 0, mode) for mode in ("none", "selective")],
    *[("gemma3", 0, mode) for mode in ("none", "selective", "attention")],
    *[("gemma4", layer, mode) for layer in (0, 2) for mode in ("none", "selective", "attention")],
    *[("nemotron_h", 0, mode) for mode in ("none", "selective", "attention")],
    *[("nemotron_h", layer, "none") for layer in (1, 2, 3)],
    ("t5", 1, "none"),
    *[("t5", 2, mode) for mode in ("none", "selective", "attention")],
]


def kind_of(name: str, layer: int) -> LayerKind:
    """The kind of a layer of a debug size."""
    return model_config(name, "debug").layer_kinds[layer]


@pytest.mark.parametrize(("name", "layer", "mode"), ROWS)
def test_bytes_that_a_compiled_block_keeps(name: str, layer: int, mode: str) -> None:
    config = model_config(name, "debug")
    mixture = config.layer_kinds[layer].experts
    saved = [row for row in block(config, kind_of(name, layer)) if row.module != ENCODED]
    rows = [row for row in saved if row.eager is not True and mode in row.modes]
    messages = sum(row.width * (4 if row.wide else 2) for row in rows)
    real = saved_bytes(name, layer, mode)
    assert messages == pytest.approx(real, rel=MIXTURES if mixture else 0)


PLAIN: list[tuple[str, int, str, dict[str, Any]]] = [
    *[("llama", 0, mode, {"attention_dropout": 0.1}) for mode in ("none", "selective")],
    *[(name, 0, "none", {"attention_dropout": 0.1}) for name in ("gpt", "bert", "qwen3")],
    ("deepseek_v3", 0, "none", {"attention_dropout": 0.1}),
    *[(name, 0, "none", {}) for name in ("llama", "gpt", "deepseek_v3")],
    ("t5", 2, "none", {}),
]


@pytest.mark.parametrize(("name", "layer", "mode", "sizes"), PLAIN)
def test_bytes_that_attention_without_a_kernel_keeps(
    name: str, layer: int, mode: str, sizes: dict[str, Any]
) -> None:
    words = f"model.name={name} model.size=debug train.seq_len={T} train.micro_batch={B}"
    words += f" train.global_batch={B} recompute.mode={mode} model.attention=math"
    override = [f"model.override.{key}={value}" for key, value in sizes.items()]
    run = Resolved.of(RunConfig.load(LLAMA, [*words.split(), *override]), 1)
    rows = block(run.model, run.kind(layer), padded=False, keys=(T, T))
    planned = [row for row in rows if row.module != ENCODED and row.eager is not True]
    listed = sum(
        row.width * (4 if row.wide else 1 if row.narrow else 2)
        for row in planned
        if mode in row.modes
    )
    # In `selective`, the keys of dropout, int64, are an input of what is computed again.
    keys = 8 if mode == "selective" and sizes else 0
    real = saved_bytes(name, layer, mode, attention="math", **sizes)
    assert (run.saves_weights(layer), listed + keys) == (True, real)


MODULES = [
    ("llama", 0, "full", ["attn"]),
    ("llama", 0, "full", ["ffn"]),
    ("llama", 0, "full", ["attn", "ffn"]),
    ("llama", 0, "attention", ["attn"]),
    ("llama", 0, "selective", ["ffn"]),
    ("llama", 0, "selective", ["attn"]),
    ("qwen3_5", 0, "full", ["delta"]),
    ("nemotron_h", 0, "full", ["mamba"]),
    ("nemotron_h", 2, "full", ["attn"]),
    *[("gemma3", 0, "full", modules) for modules in (["attn"], ["ffn"], ["attn", "ffn"])],
    ("gpt", 0, "full", ["ffn"]),
    ("gpt", 0, "full", ["attn"]),
    ("deepseek_v3", 0, "full", ["attn"]),
    ("deepseek_v3", 3, "full", ["attn", "ffn.shared"]),
    ("qwen3_moe", 0, "full", ["ffn.experts"]),
    ("qwen3_moe", 0, "full", ["ffn.experts", "attn"]),
]


@pytest.mark.parametrize(("name", "layer", "mode", "modules"), MODULES)
def test_bytes_that_a_block_keeps_whose_modules_recompute(
    name: str, layer: int, mode: str, modules: list[str]
) -> None:
    words = f"model.name={name} model.size=debug train.seq_len={T} train.micro_batch={B}"
    words += f" train.global_batch={B} recompute.mode={mode} compile.enable=true"
    words = [*words.split(), f"recompute.modules={json.dumps(modules)}"]
    run = Resolved.of(RunConfig.load(LLAMA, words), 1)
    planned = sum(tensors(run, layer)) / (B * T)
    real = saved_bytes(name, layer, mode, modules=modules)
    mixture = run.kind(layer).experts
    # torch 2.13 keeps experts' outputs, 2.14 computes them again.
    outputs = 2 * run.model.experts_per_token * run.model.dim if "ffn.experts" in modules else 0
    possible = {planned, planned - outputs}
    assert real in [pytest.approx(each, rel=MIXTURES if mixture else 0) for each in possible]


FLOAT8 = [
    *[("llama", 0, recipe, "") for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")],
    ("llama", 0, "blockwise", ""),
    # not fused; inputs that layers in high precision read too; no input of feed-forward
    *[("llama", 0, "tensorwise", name) for name in ("ffn.down", "attn.wk", "ffn.*")],
    *[(name, 0, "tensorwise", "") for name in ("gpt", "qwen3", "gemma3")],
    *[("deepseek_v3", layer, "tensorwise", "") for layer in (0, 3)],
]


@pytest.mark.parametrize(("name", "layer", "recipe", "skip"), FLOAT8)
def test_bytes_that_a_compiled_float8_block_keeps(
    name: str, layer: int, recipe: str, skip: str
) -> None:
    words = f"model.name={name} model.size=debug train.seq_len={T} train.micro_batch={B} "
    words += f"train.global_batch={B} recompute.mode=none float8.recipe={recipe}"
    skipped = [f'float8.skip=["blocks.*.{skip}"]'] if skip else []
    planned = Resolved.of(RunConfig.load(LLAMA, [*words.split(), *skipped]), 1)
    real = saved_bytes(name, layer, "none", recipe, skip)
    mixture = planned.kind(layer).experts
    found = sum(tensors(planned, layer)) / (B * T)
    assert found == pytest.approx(real, rel=MIXTURES if mixture else 0)


UNITS = [
    *[(name, 0) for name in ("llama", "mixtral", "gpt", "qwen3", "qwen3_moe")],
    *[("deepseek_v3", layer) for layer in (0, 3)],
    *[("qwen3_5", layer) for layer in (0, 3)],
    ("qwen3_5_moe", 0),
    ("gemma3", 0),
    ("nemotron_h", 0),
    ("t5", 2),
]


@pytest.mark.parametrize(
    ("name", "layer", "compiled"),
    [
        *[pytest.param(*row, False, id=f"{row[0]}-{row[1]}-eager") for row in UNITS],
        *[pytest.param(*row, True, id=f"{row[0]}-{row[1]}-compiled") for row in UNITS[::2]],
    ],
)
def test_what_waits_for_weight_gradients(name: str, layer: int, compiled: bool) -> None:
    """Inputs of products and gradients of their results, each once, to the byte."""
    unit, inputs, _ = made(name, layer)
    gradients = defer([unit], compiled)
    out = (torch.compile(unit, backend=SAME) if compiled else unit)(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    with gradients.collect(0):
        torch.autograd.backward([out], [torch.randn_like(out)])
    config, kind = model_config(name, "debug"), kind_of(name, layer)
    messages = [row for row in block(config, kind) if row.read], output_gradients(config, kind)
    for rows, field in zip(messages, ("x", "grad"), strict=True):
        storages = [getattr(item, field).untyped_storage() for _, item, _ in gradients._queues[0]]
        real = {each.data_ptr(): each.nbytes() // (B * T) for each in storages}
        assert sorted(real.values()) == sorted(2 * row.width for row in rows), field


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_what_waits_for_weight_gradients_of_float8(recipe: str) -> None:
    """The operands as they are cast, to the byte; the planner's floats are of a pipeline."""
    unit, inputs, _ = made("llama", 0)
    in_recipe(unit, recipe)
    gradients = defer([unit], compiled=True)
    out = torch.compile(unit, backend=SAME)(*inputs)
    with gradients.collect(0):
        out.backward(torch.randn_like(out))
    operands = [item.operands for _, item, _ in gradients._queues[0]]  # type: ignore[attr-defined]
    tensors = [tensor for each in operands for tensor in (each.left, each.right)]
    real = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    words = f"model.name=llama model.size=debug train.seq_len={T} train.micro_batch={B} "
    words += f"train.global_batch={8 * B} parallel.pp=2 parallel.schedule=ZBVZeroBubble "
    planned = Resolved.of(RunConfig.load(LLAMA, f"{words} float8.recipe={recipe}".split()), 2)
    assert sum(real.values()) == sum(map(sum, deferred(planned, 0)))


def test_every_family_has_rows() -> None:
    for name, spec in MODELS.items():
        config = spec.sizes["debug"]
        kind = config.layer_kinds[-1]
        assert sum(row.width for row in block(config, kind)) > 0, name


class Products(TorchDispatchMode):
    """Counts matrix products by rows, length of sums and columns."""

    supports_higher_order_operators = True  # attention that is computed again keeps its RNG state

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(op, "_overloadpacket", None) in MATRICES:
            left, right = args[1:3] if op._overloadpacket is torch.ops.aten.addmm else args[:2]
            self.found[(left.shape[0], left.shape[-1], right.shape[-1])] += 1
        return op(*args, **(kwargs or {}))


MATRICES = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._grouped_mm)


def multiplied(
    name: str, layer: int, mode: str, compiled: bool, modules: Sequence[str] = ()
) -> Counter[tuple[int, int, int]]:
    """Products of a block's backward."""
    unit, inputs, _ = made(name, layer)
    products = Products()

    def counted(graph: torch.fx.GraphModule, _: Any) -> Callable:
        def call(*args: Any) -> Any:  # dynamo calls no graph while a mode is on around it
            with products:
                return graph.forward(*args)

        return make_boxed_func(call)

    # As inductor partitions, but without generating code: each operator is called.
    backend = aot_autograd(fw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    outside = mode == "full" and not modules
    if compiled and outside:  # `apply._wrap_blocks`: compiled inside
        unit.forward = torch.compile(unit.forward, backend=backend)  # type: ignore[method-assign]
    recompute([(0, unit)], Recompute(mode=mode, modules=list(modules)))  # type: ignore[arg-type]
    inside = compiled and not outside
    out = (torch.compile(unit, backend=backend) if inside else unit)(*inputs)
    products.found.clear()
    with contextlib.nullcontext() if compiled else products:
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return products.found


AGAIN = [
    *[("llama", 0, mode) for mode in ("attention", "full")],
    *[("deepseek_v3", layer, mode) for layer in (0, 3) for mode in ("attention", "full")],
    *[(name, 0, "attention") for name in ("gpt", "qwen3", "qwen3_moe", "qwen3_5", "gemma3")],
    ("gemma3", 0, "full"),
    *[("nemotron_h", layer, "attention") for layer in (0, 2)],
]


@pytest.mark.parametrize(
    ("name", "layer", "mode", "compiled"),
    [
        *[pytest.param(*row, False, id=f"{'-'.join(map(str, row))}-eager") for row in AGAIN],
        *[pytest.param(*row, True, id=f"{'-'.join(map(str, row))}-compiled") for row in AGAIN[::2]],
    ],
)
def test_products_that_the_backward_computes_again(
    name: str, layer: int, mode: str, compiled: bool
) -> None:
    again = multiplied(name, layer, mode, compiled) - multiplied(name, layer, "none", compiled)
    words = f"model.name={name} model.size=debug train.seq_len={T} train.micro_batch={B}"
    words += f" train.global_batch={B} recompute.mode={mode} compile.enable={str(compiled).lower()}"
    run = Resolved.of(RunConfig.load(LLAMA, words.split()), 1)
    assert again == Counter((p.m, p.k, p.n) for p in repeated(run, layer))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("name", "layer", "modules"),
    [
        ("llama", 0, ["attn"]),
        ("llama", 0, ["ffn"]),
        ("gemma3", 0, ["ffn"]),
        ("gemma3", 0, ["attn"]),
        ("deepseek_v3", 3, ["attn", "ffn.shared"]),
        ("qwen3_moe", 0, ["ffn.experts"]),
    ],
)
def test_products_that_modules_compute_again(
    name: str, layer: int, modules: list[str], compiled: bool
) -> None:
    again = multiplied(name, layer, "full", compiled, modules)
    again -= multiplied(name, layer, "none", compiled)
    words = f"model.name={name} model.size=debug train.seq_len={T} train.micro_batch={B}"
    words += f" train.global_batch={B} recompute.mode=full compile.enable={str(compiled).lower()}"
    words = [*words.split(), f"recompute.modules={json.dumps(modules)}"]
    run = Resolved.of(RunConfig.load(LLAMA, words), 1)
    planned = Counter((p.m, p.k, p.n) for p in repeated(run, layer))
    possible = [planned]
    if compiled and "ffn.experts" in modules:  # torch 2.14 computes outputs again, 2.13 keeps them
        (output,) = [p for p in matmuls(run, run.kind(layer)) if p.module == "experts"][-1:]
        possible.append(planned + Counter([(output.m, output.k, output.n)]))
    assert again in possible


def test_a_chunked_loss_holds_a_padded_weight_of_an_odd_vocabulary() -> None:
    """64 columns more: of the logits of a chunk, of the weight's two gradients, and the weight."""
    sizes = []
    for vocabulary in (192, 130):  # 130 are padded to 192
        train = {"loss_chunks": 2, "seq_len": T, "micro_batch": B, "dtype": "bfloat16"}
        values = {"train": train, "model": {"override": {"vocab_size": vocabulary}}}
        sizes.append(loss_tensors(Resolved.of(RunConfig.of(values), 1)))
    even, odd = sizes
    dim = model_config("llama", "debug").dim
    assert odd == [*even, 2 * dim * 192]
