"""What each mode of recomputation computes again, counted by operator."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dtron.config import Compile, Recompute
from dtron.models import BACKENDS
from dtron.models.decoder import Decoder
from dtron.parallelisms.compile import compile_blocks
from dtron.parallelisms.recompute import (
    ATTENTION,
    PRODUCTS,
    SAVED_OPS,
    chunk_feed_forward,
    recompute,
)
from tests.models.build import initialized, small_config, tokens

LAYERS = 3
PRODUCT, ATTEND = "mm", "_scaled_dot_product_flash_attention_for_cpu"


class Counting(TorchDispatchMode):
    """Counts operators that run; one whose result recomputation has kept does not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def model_of(mode: str) -> Decoder:
    model = initialized("llama", small_config("llama", n_layers=LAYERS), BACKENDS["sdpa"])
    options = Recompute.model_validate({"mode": mode})
    recompute(((int(name), block) for name, block in model.blocks.items()), options)
    return model


def counts(mode: str) -> Counter[str]:
    """Operators of one step, eagerly."""
    model = model_of(mode)
    with Counting() as counting:
        model(tokens()).sum().backward()
    return counting.counts


def compiled_counts(mode: str) -> Counter[str]:
    """The same with compiled blocks, inside which a dispatch mode sees nothing."""
    torch._dynamo.reset()
    model = model_of(mode)
    compile_blocks(dict(model.blocks.items()), Compile(enable=True, backend="aot_eager"))
    model(tokens()).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(tokens()).sum().backward()
    return Counter(event.name.removeprefix("aten::") for event in profiled.events() or ())


@pytest.mark.parametrize(
    ("every", "first", "chosen"),
    [
        (1, 0, [0, 1, 2, 3, 4]),
        (2, 0, [0, 2, 4]),
        (1, 2, [0, 1]),
        (2, 3, [0, 2]),
        (1, 5, [*range(5)]),
    ],
)
def test_which_blocks_recompute(every: int, first: int, chosen: list[int]) -> None:
    """By their index in the model, also those of a later stage of a pipeline."""
    options = Recompute(mode="full", every=every, first=first)
    blocks = [(i, nn.Linear(2, 2)) for i in range(5)]
    assert recompute(blocks, options) == len(chosen)
    assert [i for i, block in blocks if "forward" in vars(block)] == chosen
    assert recompute(blocks[3:], options) == len([i for i in chosen if i >= 3])
    assert recompute(blocks, Recompute(every=every, first=first)) == 0


@pytest.mark.parametrize("count", [counts, compiled_counts])
def test_what_runs_again(count: Any) -> None:
    found = {mode: count(mode) for mode in ("none", "full", "attention", "selective")}
    attended = {mode: found[mode][ATTEND] for mode in found}
    assert attended == {
        "none": LAYERS,
        "full": 2 * LAYERS,
        "attention": LAYERS,
        "selective": LAYERS,
    }
    again = {mode: found[mode][PRODUCT] - found["none"][PRODUCT] for mode in found}
    assert again["selective"] == 0
    assert again["full"] == again["attention"]
    # Of seven a block, the last is needed by no gradient.
    assert again["full"] in (6 * LAYERS, 7 * LAYERS)


@pytest.mark.parametrize(
    ("modules", "products", "attended"),
    [(["attn"], 3, 1), (["ffn"], 2, 0), (["attn", "ffn"], 5, 1)],
)
def test_modules_run_again(modules: list[str], products: int, attended: int) -> None:
    """Of a block's seven products, without the last of each module, which no gradient needs."""
    found = {}
    for options in (Recompute(), Recompute(mode="full", modules=modules)):
        model = initialized("llama", small_config("llama", n_layers=LAYERS), BACKENDS["sdpa"])
        recompute(((int(name), block) for name, block in model.blocks.items()), options)
        with Counting() as counting:
            model(tokens()).sum().backward()
        found[options.mode] = counting.counts
    again = found["full"] - found["none"]
    assert (again[PRODUCT], again[ATTEND]) == (products * LAYERS, attended * LAYERS)


def linear(inputs: list[Any], module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The forward of a linear layer; records its input."""
    inputs.append(x.detach())
    return nn.functional.linear(x, module.weight, module.bias)


@pytest.mark.parametrize("mode", ["none", "full", "attention"])
def test_feed_forward_in_chunks(mode: str) -> None:
    """The same gradients, up to the order of sums; hidden states of one chunk only."""
    widest, grads = {}, {}
    for n_chunks in (1, 5):  # of 24 tokens: the last chunk has 4
        model = initialized("llama", small_config("llama", n_layers=LAYERS), BACKENDS["sdpa"])
        model.double()  # where the order of sums is far below the tolerance on every CPU
        blocks: list[Any] = list(model.blocks.values())
        assert n_chunks == 1 or chunk_feed_forward(blocks, n_chunks) == LAYERS
        recompute(enumerate(blocks), Recompute.model_validate({"mode": mode}))
        inputs: list[Any] = []
        for block in blocks:
            block.ffn.down.forward = functools.partial(linear, inputs, block.ffn.down)
        model(tokens()).sum().backward()
        widest[n_chunks] = max(x.numel() for x in inputs)
        grads[n_chunks] = [p.grad for p in model.parameters()]
    assert widest[5] == widest[1] * 5 / 24
    for wanted, found in zip(grads[1], grads[5], strict=True):
        torch.testing.assert_close(wanted, found)


def test_feed_forward_in_chunks_runs_again() -> None:
    """Of its three products the last is not computed again, as no gradient needs it."""
    found = []
    for n_chunks in (1, 4):
        model = initialized("llama", small_config("llama", n_layers=LAYERS), BACKENDS["sdpa"])
        chunk_feed_forward(model.blocks.values(), n_chunks)
        with Counting() as counting:
            model(tokens()).sum().backward()
        found.append(counting.counts[PRODUCT])
    # Forward and backward of 4 products a block and head; 3 of the feed-forward, 2 again.
    assert found == [3 * (4 * LAYERS + 1) + n * (9 + 2) * LAYERS for n in (1, 4)]


def test_experts_on_other_ranks_recompute_without_dispatch() -> None:
    """Expert parallelism leaves them `local_forward`."""
    calls = []

    class Experts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("dispatch")
            return self.local_forward(x)  # type: ignore[operator]

    block = nn.Sequential()
    block.experts, other = Experts(), nn.Linear(2, 2)
    block.experts.local_forward = lambda x: calls.append("compute") or other(x).exp()  # type: ignore[assignment]
    assert recompute([(0, block)], Recompute(mode="full", modules=["experts"])) == 1
    block.experts(torch.ones(2, requires_grad=True)).sum().backward()
    assert calls == ["dispatch", "compute", "compute"]


def test_selective_keeps_grouped_products() -> None:
    found = {}
    for mode in ("none", "full", "attention", "selective"):
        model = initialized("mixtral", small_config("mixtral", n_layers=LAYERS), BACKENDS["sdpa"])
        options = Recompute.model_validate({"mode": mode})
        recompute(((int(name), block) for name, block in model.blocks.items()), options)
        with Counting() as counting:
            model(tokens()).sum().backward()
        found[mode] = counting.counts["_grouped_mm"]
    assert found["none"] == found["selective"] == 9 * LAYERS
    assert found["full"] == found["attention"] > found["none"]


def test_experts_are_chosen_once_under_inductor() -> None:
    """What recomputation kept is of these choices; a kernel that rounds otherwise could make
    others."""
    torch._dynamo.reset()
    model = initialized("mixtral", small_config("mixtral", n_layers=1), BACKENDS["sdpa"])
    numbered = [(int(name), block) for name, block in model.blocks.items()]
    recompute(numbered, Recompute(mode="selective"))
    compile_blocks(dict(model.blocks.items()), Compile(enable=True, backend="inductor"))
    model(tokens()).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(tokens()).sum().backward()
    counts = Counter(event.name for event in profiled.events() or ())
    assert (counts["aten::topk"], counts["aten::sort"]) == (1, 1)


def test_modes_keep_nested_sets() -> None:
    assert set(SAVED_OPS["attention"]) < set(SAVED_OPS["selective"])
    assert not set(ATTENTION) & set(PRODUCTS)
    assert {*SAVED_OPS, "none", "full", "auto"} == set(
        Recompute.model_json_schema()["properties"]["mode"]["enum"]
    )


@pytest.mark.parametrize("mode", ["full", "attention", "selective"])
def test_gradients_are_bitwise_equal(mode: str) -> None:
    one, other = model_of("none"), model_of(mode)
    for model in (one, other):
        model(tokens()).sum().backward()
    for wanted, found in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(wanted.grad, found.grad)  # type: ignore[arg-type]
