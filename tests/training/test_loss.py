"""Head and loss in chunks equal those at once, and hold no logits of all tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtron.config import Compile, Parallel
from dtron.parallelisms import Mesh
from dtron.training.loss import EVEN, ChunkedLoss, VocabularyShard, sequence_losses
from dtron.training.optim import build_optimizer
from dtron.training.step import TrainStep, evaluate
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, build_parallel, connect, micro_batches

B, T, D, V = 2, 11, 6, 13
SCALE = 0.37  # of the loss, as the division by the number of labels is
LABELS = {"some": slice(0, None, 3), "none": slice(0, None), "all": slice(0, 0)}
"""Which tokens have no label."""
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def inputs(dtype: torch.dtype, without: str = "some") -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (B * T,), generator=generator)
    labels[LABELS[without]] = -100
    return hidden.to(dtype), weight.to(dtype), labels.view(B, T)


def gradients(loss: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss, and the gradients of its multiple by hidden states and weight."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = total_of(loss(hidden, weight, labels))
    (SCALE * total).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [total.detach(), hidden.grad, weight.grad]


def total_of(found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The loss, from `ChunkedLoss` or from another function; those of sequences add up to it."""
    if isinstance(found, Tensor):
        return found
    total, each = found
    assert not each.requires_grad
    assert each.shape == (len(each),)
    return total


def at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert (x.double() - y.double()).norm() <= tolerance * y.double().norm()


@pytest.mark.parametrize("without", LABELS)
@pytest.mark.parametrize("chunks", [1, 2, 5, 16, B * T])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_cross_entropy(dtype: torch.dtype, chunks: int, without: str) -> None:
    """Also where chunks do not divide the tokens, and as zeros where no label is."""
    case = inputs(dtype, without)
    found = gradients(ChunkedLoss(chunks), *case)
    assert [x.dtype for x in found] == [dtype] * 3
    close(found, gradients(at_once, *case), TOLERANCE[dtype])
    with torch.no_grad():
        assert ChunkedLoss(chunks)(*case)[0].item() == pytest.approx(found[0].item())
    hidden, weight, labels = case
    rows = [at_once(hidden[i : i + 1], weight, labels[i : i + 1]) for i in range(B)]
    for loss in (ChunkedLoss(chunks)(*case)[1], sequence_losses(F.linear(hidden, weight), labels)):
        close([loss], [torch.stack(rows)], TOLERANCE[dtype])


def test_soft_cap_equals_capped_logits() -> None:
    case = inputs(torch.float64, "some")

    def at_once_capped(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = 2 * torch.tanh(F.linear(hidden, weight).flatten(0, 1) / 2)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")

    capped = ChunkedLoss(3, cap=2.0)
    close(gradients(capped, *case), gradients(at_once_capped, *case), 1e-12)
    with torch.no_grad():
        assert capped(*case)[0].item() == pytest.approx(at_once_capped(*case).item())


@pytest.mark.parametrize("chunks", [1, 7, 64])
def test_bfloat16_loses_nothing_over_many_chunks(chunks: int) -> None:
    """Against float32 from the same inputs; summed in bfloat16 the weight's gradient is off by
    0.0046 with 7 chunks and 0.0094 with 64."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 1024, 64).bfloat16(), torch.randn(512, 64).bfloat16() * 0.3
    labels = torch.randint(512, (1, 1024))
    exact = gradients(at_once, hidden.float(), weight.float(), labels)
    found = gradients(ChunkedLoss(chunks), hidden, weight, labels)
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    close(found, exact, 0.0045)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("chunks", [1, 3, 5])
def test_weighted_losses_of_several_predictions(chunks: int, compile: bool) -> None:
    """Their sums, and the gradients of the weighted sum, with one weight gradient for all."""
    torch.compiler.reset()  # shapes of earlier cases count towards its limit
    _, weight, _ = inputs(torch.float64)
    predictions = [inputs(torch.float64, without) for without in ("some", "all", "none")]
    hidden = torch.cat([x * (1 + k) for k, (x, _, _) in enumerate(predictions)])
    labels = torch.cat([y for _, _, y in predictions])
    weights = torch.tensor([0.5, 0.01, 2.0], dtype=torch.float64)
    loss = ChunkedLoss(chunks, compile=Compile(enable=compile, backend="aot_eager"))

    def by_chunks(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        objective, losses = loss(x, w, y, weights)
        assert not losses.requires_grad
        close([objective], [(losses.view(3, B).sum(1) * weights).sum()], 1e-14)
        return objective

    def one_by_one(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        each = zip(x.chunk(3), y.chunk(3), weights, strict=True)
        return torch.stack([c * at_once(h, w, part) for h, part, c in each]).sum()

    wanted = gradients(one_by_one, hidden, weight, labels)
    close(gradients(by_chunks, hidden, weight, labels), wanted, 1e-14)
    with torch.no_grad():
        close([by_chunks(hidden, weight, labels)], wanted[:1], 1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [701, 997, 1024, 1333, 1666, 2047, 2500, 3001, 3777, 4095])
def test_scaled_on_a_gpu_as_the_whole_loss_is(n: int) -> None:
    """A factor of 1 / n, which bfloat16 does not hold, acts in float32: gradients are as near as
    those of the unchunked loss, but for a second rounding."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator("cuda").manual_seed(n)
    hidden = torch.randn(1, n, 256, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(1000, 256, generator=generator, device="cuda").bfloat16() * 0.25
    labels = torch.randint(1000, (1, n), generator=generator, device="cuda")

    def of_mean(loss: Any, dtype: torch.dtype) -> list[Tensor]:
        x, w = (given.detach().to(dtype, copy=True).requires_grad_() for given in (hidden, weight))
        (total_of(loss(x, w, labels)) / n).backward()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad.double(), w.grad.double()]

    exact = of_mean(at_once, torch.float64)
    whole = of_mean(lambda x, w, y: sequence_losses(F.linear(x, w), y).sum(), torch.bfloat16)
    chunked = of_mean(ChunkedLoss(8), torch.bfloat16)
    for wanted, one, found in zip(exact, whole, chunked, strict=True):
        factor = ((found * wanted).sum() / wanted.square().sum()).item()
        assert abs(factor - 1) <= 1e-3  # 1 / n as a bfloat16 is up to 2e-3 off
        assert (found - wanted).norm() <= 1.2 * (one - wanted).norm()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden, weight, labels = inputs(torch.float64)
    wanted = gradients(at_once, hidden, weight, labels)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    (SCALE * ChunkedLoss(3)(hidden, weight, labels)[0]).backward()
    other = weight if frozen == "hidden" else hidden
    assert (hidden.grad is None, weight.grad is None) == (frozen == "hidden", frozen == "weight")
    assert other.grad is not None
    close([other.grad], [wanted[2 if frozen == "hidden" else 1]], 1e-14)


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels = inputs(torch.float32)
    total, _ = ChunkedLoss(2)(hidden, weight.requires_grad_(), labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        total.backward()


def test_compiled_chunks_equal_eager_ones() -> None:
    """In one graph each: `fullgraph` refuses breaks."""
    torch.compiler.reset()
    case = inputs(torch.float64)
    compiled = ChunkedLoss(5, compile=Compile(enable=True, backend="aot_eager"))
    close(gradients(compiled, *case), gradients(ChunkedLoss(5), *case), 1e-14)


def of_shard(chunks: int, compile: Compile) -> list[Tensor]:
    """On one rank: the loss, the hidden states' gradient summed over ranks, the weight's rows."""
    hidden, weight, labels = inputs(torch.float64)
    rank, size = dist.get_rank(), dist.get_world_size()
    padded = F.pad(weight, (0, 0, 0, -V % size)).chunk(size)[rank]
    assert dist.group.WORLD is not None
    loss = ChunkedLoss(chunks, VocabularyShard(V, rank, dist.group.WORLD), compile)
    total, grad_hidden, grad_weight = gradients(loss, hidden, padded, labels)
    dist.all_reduce(grad_hidden)
    return [total, grad_hidden, grad_weight]


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("compile", [False, True])
def test_split_vocabulary_with_padding(chunks: int, compile: bool) -> None:
    options = Compile(enable=compile, backend="aot_eager" if compile else "inductor")
    first, second = run_ranks(2, of_shard, chunks, options)
    wanted = gradients(at_once, *inputs(torch.float64))
    rows = torch.cat([first[2], second[2]])
    assert not rows[V:].any()
    for total, grad_hidden, _ in (first, second):
        close([total, grad_hidden, rows[:V]], wanted, 1e-14)


class LargestTensor(TorchDispatchMode):
    """Records the most elements of a tensor that an operator gives; a DTensor is counted by its
    local part, which comes here as well."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if type(x) is Tensor]
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_no_tensor_of_tokens_times_vocabulary() -> None:
    tokens, width, vocabulary, chunks = 64, 8, 128, 8
    hidden, weight = torch.randn(1, tokens, width), torch.randn(vocabulary, width)
    labels = torch.randint(vocabulary, (1, tokens))

    def largest(loss: Any) -> int:
        with LargestTensor() as seen:
            gradients(loss, hidden, weight, labels)
            with torch.no_grad():
                loss(hidden, weight, labels)
        return seen.elements

    assert largest(lambda h, w, y: sequence_losses(F.linear(h, w), y).sum()) == tokens * vocabulary
    assert largest(ChunkedLoss(chunks)) == max(tokens // chunks, width) * vocabulary


def test_an_odd_vocabulary_has_matmuls_of_even_size() -> None:
    """The loss and gradients of odd sizes are those of the other tests, where V is odd."""
    seen = []

    class Matmuls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "mm" in str(func) or "multiply" in str(func):
                seen.extend(x.shape for x in args if isinstance(x, Tensor))
            return func(*args, **(kwargs or {}))

    hidden, weight = torch.randn(1, 8, 64), torch.randn(2 * EVEN + 1, 64)
    with Matmuls():
        gradients(ChunkedLoss(1), hidden, weight, torch.randint(2 * EVEN, (1, 8)))
    assert len(seen) >= 6
    assert {n % EVEN for shape in seen for n in shape} <= {0, 8}


def largest_of_step(case: Case) -> int:
    """On one rank: elements of the largest tensor of a step and an evaluation."""
    config, layout = case.resolved()
    mesh = Mesh(**case.config().degrees(case.world))
    applied = build_parallel(case, config, layout, mesh)
    optimizer = build_optimizer(applied.named_parameters(), case.config().optim)
    model = connect(case, applied, config, layout, mesh)
    step = TrainStep(model, optimizer, 1.0)
    batches = micro_batches(case, mesh, 0)
    with LargestTensor() as seen:
        step(batches, 0, 0.1)
        evaluate(model, batches)
    return seen.elements


@pytest.mark.parametrize(
    "parallel",
    [Parallel(), Parallel(tp=2), Parallel(pp=2, schedule="ZBVZeroBubble")],
    ids=["alone", "tp", "pp"],
)
def test_no_such_tensor_in_a_step(parallel: Parallel) -> None:
    """A micro-batch has 64 tokens, more than the model is wide: weights are smaller."""
    world, vocabulary = parallel.tp * parallel.pp, 512
    case = Case("llama", world, parallel, sequences=8, micro_batch=4)
    case = replace(case, override={"vocab_size": vocabulary})
    logits = 64 * vocabulary // parallel.tp
    assert max(run_ranks(world, largest_of_step, case)) == logits
    chunked = max(run_ranks(world, largest_of_step, replace(case, loss_chunks=4)))
    assert chunked < logits / 2
