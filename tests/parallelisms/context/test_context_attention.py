"""Attention over ranks that share sequences equals attention in one process, by every method."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dtron.config import CpMethod, Parallel, Recompute
from dtron.data.loader import map_tables
from dtron.kernels.attention import KERNELS, Score, Tables
from dtron.models.attention import _dynamic
from dtron.parallelisms.context.attention import (
    ContextAttention,
    context_attention,
    context_attention_backward,
)
from dtron.parallelisms.context.blocks import Blocks
from dtron.parallelisms.context.layout import ContextLayout, layout_of, table_names
from dtron.parallelisms.context.split import Split
from dtron.parallelisms.functional_collectives import NamedGroup
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks
from tests.parallelisms import parity
from tests.parallelisms.parity import Case, parallel_run

METHODS: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses", "hierarchical")
BATCH, TOKENS, HEADS, SIZE = 2, 48, 8, 4


def inputs(kv_heads: int, dtype: torch.dtype, size: int = SIZE) -> list[Tensor]:
    """q, k, v and a gradient of the output, of whole sequences."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    shapes = [(BATCH, TOKENS, n, size) for n in heads]
    return [3 * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def packed() -> Tensor:
    """Documents of many lengths, some of one token; other ones in each sequence."""
    ends = torch.tensor([[5, 6, 7, 21, 30, 47], [1, 2, 3, 4, 40, 41]])
    return (torch.arange(TOKENS).view(1, 1, -1) >= ends.unsqueeze(-1)).sum(1)


def expected(
    tensors: list[Tensor], documents: Tensor | None, sink: Tensor | None, score: Score
) -> list[Tensor]:
    """Output and gradients by plain autograd over one dense mask."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    due = [q, k, v]
    index = torch.arange(TOKENS)
    seen = index.unsqueeze(1) >= index
    if score.window:
        seen = seen & (index.unsqueeze(1) - index < score.window)
    seen = seen.expand(BATCH, -1, -1)
    if documents is not None:
        seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1))
    repeated = [x.repeat_interleave(HEADS // x.shape[2], 2) for x in (k, v)]
    scores = torch.einsum("bthk,bshk->bhts", q * score.scale, repeated[0])
    if score.softcap:
        scores = score.softcap * (scores / score.softcap).tanh()
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sink is not None:
        sink = sink.clone().requires_grad_()
        due.append(sink)
        column = sink.view(1, -1, 1, 1).expand(BATCH, -1, TOKENS, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :TOKENS]
    out = torch.einsum("bhts,bshk->bthk", weights, repeated[1])
    out.backward(tensors[3])
    return [out.detach(), *(x.grad for x in due)]  # type: ignore[misc]


def attend(
    method: CpMethod,
    kv_heads: int,
    documents: Tensor | None,
    sink: Tensor | None,
    dtype: torch.dtype,
    inner: int,
    window: int,
    softcap: float,
    kernel: str = "math",
    device: str = "cpu",
    size: int = SIZE,
) -> list[Tensor]:
    """The same on this rank: its tokens' output and gradients, and the sink's part."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    shape = windowed(layout_of(method, cp, inner), window)
    inside, between = groups(shape.inner)
    split = Split(documents, (BATCH, TOKENS), cp)
    index = split.index(rank)
    mask: Tables | None = split.tables({method: shape}, rank)

    def mine(x: Tensor) -> Tensor:
        return x[torch.arange(BATCH).unsqueeze(1), index].to(device)

    if mask is not None:
        mask = map_tables(mask, lambda x: x.to(device))
    q, k, v, grad = (mine(x) for x in inputs(kv_heads, dtype, size))
    due = [x.requires_grad_() for x in (q, k, v)]
    if sink is not None:
        due.append(sink.to(device, copy=True).requires_grad_())
    attention = ContextAttention(method, shape, between, inside, kernel, window, softcap)
    out = attention(q, k, v, mask, due[3] if sink is not None else None)
    out.backward(grad)
    return [index, *(x.detach().cpu() for x in (out, *(x.grad for x in due)))]  # type: ignore[union-attr]


def windowed(shape: ContextLayout, window: int) -> ContextLayout:
    return replace(shape, windows=(window,) if window else ())


def groups(inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Process groups inside blocks of neighbours, and between the blocks."""
    ranks = torch.arange(dist.get_world_size()).view(-1, inner)
    rows = dist.new_subgroups_by_enumeration(ranks.tolist())[0]
    columns = dist.new_subgroups_by_enumeration(ranks.t().tolist())[0]
    assert isinstance(rows, dist.ProcessGroup)
    assert isinstance(columns, dist.ProcessGroup)
    return rows, columns


def compare(
    method: CpMethod,
    cp: int,
    *,
    kv_heads: int = 4,
    packing: bool = False,
    sinks: bool = False,
    dtype: torch.dtype = torch.float64,
    inner: int = 0,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    documents = packed() if packing else None
    sink = torch.linspace(-1, 2, HEADS, dtype=dtype) if sinks else None
    score = Score(SIZE**-0.5, True, window, softcap)
    wanted = expected(inputs(kv_heads, dtype), documents, sink, score)
    ranks = run_ranks(cp, attend, method, kv_heads, documents, sink, dtype, inner, window, softcap)
    check(ranks, wanted, 1e-12 if dtype == torch.float64 else 1e-5)


def check(ranks: list[list[Tensor]], wanted: list[Tensor], tolerance: float) -> None:
    """What ranks found, put together, is what is wanted, relative to its norm."""
    found = [torch.full_like(x, torch.nan) for x in wanted[:4]]
    for index, *tensors in ranks:
        for whole, part in zip(found, tensors[:4], strict=True):
            whole[torch.arange(BATCH).unsqueeze(1), index] = part.to(whole.dtype)
    if len(wanted) > 4:
        found.append(torch.stack([tensors[-1] for tensors in ranks]).sum(0))
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("packing", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_one_process(method: CpMethod, cp: int, packing: bool) -> None:
    if (method, cp) != ("hierarchical", 2):  # refused
        compare(method, cp, packing=packing)


def announced(method: CpMethod, kv_heads: int, window: int) -> None:
    """Run both operators and compare sizes and strides with what compile is told."""
    shape = windowed(layout_of(method, dist.get_world_size()), window)
    split = Split(packed(), (BATCH, TOKENS), dist.get_world_size())
    tables = split.tables({method: shape}, dist.get_rank())
    assert tables is not None
    q, k, v, grad = (x[:, : TOKENS // 2] for x in inputs(kv_heads, torch.float64))
    named = NamedGroup.of(groups(1)[1])  # held: the operators find it by its name
    name = named.group.group_name
    rows = list(tables[method])
    if window:
        (*index, segments), (counts,) = (tables[key] for key in table_names(method, window))
        rows = [*index, counts, segments]
    settings = (rows, name, 1, shape.gathers, "math", 1.0, window, 0.0)
    outputs = context_attention(q, k, v, None, *settings)
    for operator, args in (
        (context_attention, (q, k, v, None, *settings)),
        (context_attention_backward, (grad, q, k, v, *outputs, *settings)),
    ):
        with FakeTensorMode(allow_non_fake_inputs=True):
            messages = operator(*args)
        for real, fake in zip(operator(*args), messages, strict=True):
            assert (real.shape, real.stride()) == (fake.shape, fake.stride())


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(("method", "window"), [("ring", 0), ("ring", 5), ("all_gather", 0)])
def test_operators_lay_tensors_out_as_announced(
    method: CpMethod, window: int, kv_heads: int
) -> None:
    run_ranks(2, announced, method, kv_heads, window)


def compiled_once() -> None:
    """Halos of other documents have other sizes."""
    shape, rank = windowed(layout_of("ring", 2), 5), dist.get_rank()
    inside, between = groups(1)
    attention = ContextAttention("ring", shape, between, inside, "math", 5)
    q, k, v, _ = (x[:, : TOKENS // 2].requires_grad_() for x in inputs(2, torch.float64))
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (3, 11, 48, 1):
            documents = (torch.arange(TOKENS) // length).expand(BATCH, -1)
            mask = Split(documents, (BATCH, TOKENS), 2).tables({"ring": shape}, rank)
            found, wanted = (
                torch.autograd.grad(call(q, k, v, _dynamic(mask)).square().sum(), (q, k, v))
                for call in (compiled, attention)
            )
            for gradient, same in zip(found, wanted, strict=True):
                assert torch.equal(gradient, same)


def test_halos_of_all_documents_take_one_graph() -> None:
    run_ranks(2, compiled_once)


def kernel_calls(case: Case) -> int:
    """How often a rank attends to blocks in one step."""
    attend, calls = Blocks.attend, []

    def counted(self: Blocks, *args: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return attend(self, *args)

    Blocks.attend = counted  # type: ignore[method-assign]
    parity.evaluate = lambda *_: torch.zeros(())  # type: ignore[assignment]
    parallel_run(case)
    return len(calls)


@pytest.mark.parametrize(("mode", "times"), [("attention", 1), ("selective", 1), ("full", 2)])
def test_recomputation_keeps_what_came_round(mode: Any, times: int) -> None:
    case = Case("llama", 2, Parallel(cp=2), Recompute(mode=mode), sequences=1, steps=1)
    n_layers = case.resolved()[0].n_layers
    assert run_ranks(2, kernel_calls, case) == [times * n_layers] * 2


VARIANTS: list[tuple[CpMethod, int, dict[str, Any]]] = [
    ("ring", 4, {"sinks": True, "softcap": 2.0, "packing": True}),
    ("ring", 2, {"kv_heads": 1, "dtype": torch.float32}),
    ("ring", 3, {"kv_heads": 8}),
    ("all_gather", 4, {"sinks": True, "softcap": 2.0, "window": 7, "packing": True}),
    ("all_gather", 2, {"window": 20, "kv_heads": 1}),
    ("ulysses", 4, {"sinks": True, "softcap": 2.0, "window": 7, "packing": True}),
    ("ulysses", 4, {"kv_heads": 1, "window": 20}),
    ("ulysses", 4, {"kv_heads": 2, "dtype": torch.float32}),
    ("hierarchical", 4, {"sinks": True, "softcap": 2.0, "packing": True, "kv_heads": 1}),
    ("hierarchical", 8, {"inner": 2}),
    ("hierarchical", 8, {"inner": 4, "packing": True}),
    # a halo: nothing, one token, a part of a chunk, a chunk, more than one, more than a block, all
    *[("ring", 2, {"window": window, "kv_heads": 1}) for window in (2, 7, 12, 13, 29, 47, 48)],
    *[("ring", 4, {"window": window, "packing": True}) for window in (2, 4, 7, 13, 40)],
    ("ring", 2, {"window": 1, "sinks": True}),
    ("ring", 4, {"window": 1, "sinks": True, "packing": True}),
    ("ring", 4, {"window": 6}),
    ("ring", 3, {"window": 20, "softcap": 2.0, "sinks": True}),
    ("ring", 4, {"sinks": True, "softcap": 2.0, "window": 7, "packing": True}),
    ("ring", 2, {"window": 9, "packing": True, "dtype": torch.float32}),
    ("hierarchical", 4, {"window": 5, "sinks": True, "packing": True, "kv_heads": 1}),
    ("hierarchical", 4, {"window": 14, "softcap": 2.0}),
    ("hierarchical", 4, {"sinks": True, "kv_heads": 2}),
    ("hierarchical", 8, {"inner": 2, "window": 7, "sinks": True}),
    ("hierarchical", 8, {"inner": 4, "window": 20, "softcap": 2.0, "packing": True}),
]


@pytest.mark.parametrize(("method", "cp", "settings"), VARIANTS, ids=str)
def test_variants_equal_one_process(method: CpMethod, cp: int, settings: dict[str, Any]) -> None:
    compare(method, cp, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [5, 12, 20])
@pytest.mark.parametrize("kernel", [name for name, row in KERNELS.items() if row.window])
def test_windows_in_rings_over_nccl(kernel: str, window: int, packing: bool) -> None:
    """Each kernel with windows in bfloat16, against one process in float32."""
    if kernel == "fa4":
        pytest.importorskip("flash_attn.cute")
    size, documents, sink = 64, packed() if packing else None, torch.linspace(-1, 2, HEADS)
    tensors = [x.float() for x in inputs(4, torch.bfloat16, size)]
    wanted = expected(tensors, documents, sink, Score(size**-0.5, True, window))
    settings = (documents, sink, torch.bfloat16, 0, window, 0.0, kernel, "cuda", size)
    check(run_on_gpus(2, attend, "ring", 4, *settings), wanted, 2e-2)
