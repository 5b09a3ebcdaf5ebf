"""Silent numerical bugs reported in other frameworks; dtron has none of them.

Each row of REPORTS names the report, says what was wrong, and has a case that fails if dtron has
the same bug. Two tests run each row: the case equals one process, and no longer does with the bug
planted. Bugs of checkpoints follow below.

Megatron-LM#7452 numbers its bugs:

    1     label smoothing over a split vocabulary used local means. Not applicable: dtron has no
          label smoothing.
    4, 5  used the global tp group instead of the model's own. dtron has no global groups (`Mesh` is
          an object); the rows test the effect.
    6, 7  as 5, for cross-attention and for embeddings of images and text. Not applicable: dtron has
          no such models.
    11    a norm in gated delta nets, which dtron does not have; the row tests norms of heads.
    13    attention with another cp group than the model's own; a test of its own below.
    B     gradients of a video model; the row tests the effect.
    C     constant factors: two rows.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from dtron.checkpoint import checkpointer as checkpoint
from dtron.checkpoint.stored_model import StoredModel
from dtron.config import Optim, Parallel, Recompute
from dtron.data import Batch
from dtron.models import router
from dtron.models.router import Router
from dtron.parallelisms import apply
from dtron.parallelisms.context.attention import ContextAttention
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.fsdp import sharding as fsdp
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.pipeline.executor import Pipeline
from dtron.parallelisms.tensor import tensor_parallel as tensor
from dtron.training import optim, step
from tests.harness import run_ranks
from tests.parallelisms import parity
from tests.parallelisms.parity import MTP, SIZES, Batches, Case, Outcome, deviations, selected
from tests.parallelisms.test_planted_bugs import (
    ALSO_LOSS,
    BEFORE_EXPERTS,
    BEFORE_HEAD,
    EVERYTHING,
    head_gradient_not_reduced,
    local_divisor,
    loss_of_every_tp_rank,
    run_with,
)
from tests.training.test_trainer import contents, fit, losses, tiny

VOCABULARY = 64
"""Differs from all other dims of the models."""


def nothing() -> None:
    """Plants no bug."""


def gathered_logits() -> None:
    """The loss takes each rank's whole logits for its part of twice as large a vocabulary."""
    split, shard_of = tensor._Colwise.apply, parity.vocabulary

    def gathered(self: Any, module: Any, mesh: Any) -> None:
        if module.out_features == VOCABULARY:
            self.output = Replicate()
        split(self, module, mesh)

    def twice(config: Any, mesh: Mesh) -> Any:
        found = shard_of(config, mesh)
        return found and replace(found, size=found.size * mesh.size("tp"))

    tensor._Colwise.apply = gathered  # type: ignore[method-assign]
    parity.vocabulary = twice


def prediction_counts_of_own_tokens() -> None:
    """MTP losses are means over the rank's own labels, averaged over the ranks."""
    count = step.TrainStep._global_label_counts

    def counts(self: Any, batches: list[Batch]) -> Tensor:
        own = torch.stack([step._label_counts(batch) for batch in batches]).sum(0).clamp(min=1)
        return torch.cat([count(self, batches)[:1], own[1:] * dist.get_world_size()])

    step.TrainStep._global_label_counts = counts  # type: ignore[method-assign]


def balance_loss_averaged_over_replicas() -> None:
    """The gradient of the balance loss is divided by the ranks that have different tokens."""
    added = router.AddedLoss.apply

    def divided(weights: Tensor, total: Tensor, divisor: Any) -> Tensor:
        return added(weights, total / dist.get_world_size(), divisor)

    router.AddedLoss.apply = divided  # type: ignore[method-assign]


def expert_gradients_not_scaled() -> None:
    """Gradients of experts are multiplied by the ranks that share them."""
    summed = fsdp._sum_gradients

    def scaled(module: Any) -> None:
        summed(module)
        if hasattr(module, "part"):
            module.set_gradient_divide_factor(0.5)

    fsdp._sum_gradients = scaled


def recomputed_from_another_replica() -> None:
    """Recomputation gathers activations from ranks with other sequences. Only in feed-forward
    layers: with other inputs routers choose other experts, which torch would report."""
    redistribute = tensor.PrepareArgument.redistribute

    def mixed(self: Any, x: Tensor, mesh: Any) -> Tensor:
        recomputed = torch._C._current_graph_task_id() >= 0
        if recomputed and self.gradient is None:
            ranks = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, x.detach().contiguous())
            other = ranks[(dist.get_rank() + mesh.size()) % len(ranks)]
            x = x + (other - x).detach()  # as much is kept for the backward as of x
        return redistribute(self, x, mesh)

    tensor.PrepareArgument.redistribute = mixed  # type: ignore[method-assign]


def padding_of_another_rank() -> None:
    """Routers see which tokens of another tp rank are padding."""

    def cut(module: nn.Module, mesh: Any, row: tensor.Row) -> None:
        size, rank = mesh.size(), mesh.get_local_rank()

        def part(_module: nn.Module, args: tuple) -> tuple:
            def own(i: int, x: Any) -> Any:
                if i not in row.split or not isinstance(x, Tensor):
                    return x
                return x.chunk(size, 1)[(rank + (x.dtype == torch.bool)) % size]

            return tuple(own(i, x) for i, x in enumerate(args))

        module.register_forward_pre_hook(part)

    tensor._shard_arguments = cut


def sinks_of_first_rank_counted() -> None:
    """The norm counts sinks of the first tp rank's heads alone."""
    norm = step.global_norm
    heads = SIZES["gpt_oss"]["n_heads"]

    def counted(parameters: Sequence[Tensor], *args: Any) -> Tensor:
        sinks = [p for p in parameters if p.shape == (heads,)]
        assert sinks, "the model has sinks"
        others = [p.grad for p in sinks]
        for parameter in sinks:
            parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
            parameter.grad.to_local()[heads // 2 :] = 0  # type: ignore[attr-defined]
        found = norm(parameters, *args)
        for parameter, gradient in zip(sinks, others, strict=True):
            parameter.grad = gradient
        return found

    step.global_norm = counted


def tokens_of_all_ranks() -> None:
    """The balance loss is scaled as if all ranks' tokens were the rank's own."""
    of_all = Router._of_all

    def scaled(self: Router, *args: Any) -> tuple[Tensor, Tensor]:
        loads, mean = of_all(self, *args)
        return loads, mean / (1 if self.pool is None else self.pool.counting)

    Router._of_all = scaled  # type: ignore[method-assign]


def norms_of_heads_not_reduced() -> None:
    """Gradients of norms that each rank applies to its own heads stay parts."""
    tensor._PARTIAL = ("sequence",)


def dropped_by_middle_stages(name: str) -> None:
    """Stages that have neither the embedding nor the head are called without an argument."""
    forward = Pipeline._forward

    def bare(self: Pipeline, run: Any, key: Any) -> None:
        if 0 < key[0] < self.last_stage:
            batches = [(x, {**others, name: None}) for x, others in run.micro_batches]
            run = replace(run, micro_batches=batches)
        forward(self, run, key)

    Pipeline._forward = bare  # type: ignore[method-assign]


def first_update_counted_twice() -> None:
    """AdamW's state begins as after an update."""
    made = optim.AdamW._state

    def counted(self: Any, parameter: Tensor) -> dict[str, Tensor]:
        new = not self.state[parameter]
        state = made(self, parameter)
        if new:
            state["step"] += 1
        return state

    optim.AdamW._state = counted  # type: ignore[method-assign]


def gradient_of_first_copy() -> None:
    """Of a token's copies at the etp ranks of an expert one gives a gradient back."""

    def copies(self: Any, rows: Tensor, sent: list[int]) -> Tensor:
        each = range(self.etp)
        parts = rows.split(sent[:: self.etp])
        return torch.cat([part if i == 0 else part.detach() for part in parts for i in each])

    AllToAll._repeat = copies  # type: ignore[method-assign]


def routers_not_reduced() -> None:
    """Gradients of routers stay parts: each tp rank has that of its own tokens."""
    reduce = apply.reduce_replicas
    size = SIZES["deepseek_v3"]
    router = (size["n_experts"], size["dim"])
    apply.reduce_replicas = lambda parameters, group: reduce(
        [p for p in parameters if p.shape != router], group
    )


@dataclass(frozen=True)
class Report:
    """A bug in another framework."""

    name: str
    """Issue or pull request, and the bug's number there."""
    wrong: str
    """What was wrong."""
    case: Case
    """Fails if dtron has the same bug."""
    plant: Callable[[], None]
    """Plants the bug, on one rank."""
    spoils: str
    """Pattern of what deviates first: loss and gradients, else the norm, else parameters."""


MEGATRON = "Megatron-LM#7452"
WHOLE = Parallel(tp=2, sequence_parallel=False)
ROUTERS = r"gradient blocks\.\d+\.ffn\.router\.weight"
REPORTS = [
    Report(
        f"{MEGATRON}-2",
        "Logits that had been gathered over tp went into the loss of a split vocabulary: the loss "
        "was log(tp) too large and the label had no gradient.",
        Case("qwen3", 2, Parallel(tp=2), override={"vocab_size": VOCABULARY}),
        gathered_logits,
        ALSO_LOSS,
    ),
    Report(
        f"{MEGATRON}-3",
        "The loss of multi-token prediction was weighted by each rank's own number of labels.",
        Case("deepseek_v3", 4, Parallel(cp=2), override=MTP, sequences=4, padded=True),
        prediction_counts_of_own_tokens,
        ALSO_LOSS,
    ),
    Report(
        f"{MEGATRON}-4",
        "Full recomputation of multi-token prediction gathered saved activations over a group that "
        "was not the layer's, from replicas with other data.",
        Case("deepseek_v3", 4, Parallel(tp=2), Recompute(mode="full"), override=MTP),
        recomputed_from_another_replica,
        EVERYTHING,
    ),
    Report(
        f"{MEGATRON}-5",
        "The padding mask of routers was split over another tp group than the hidden states.",
        Case("mixtral", 4, Parallel(tp=2), override={"z_loss": 0.1}, padded=True),
        padding_of_another_rank,
        ALSO_LOSS,
    ),
    Report(
        f"{MEGATRON}-8",
        "Attention sinks were split over tp by heads but counted as copies: the norm by which "
        "gradients are clipped had the first rank's alone.",
        Case("gpt_oss", 2, Parallel(tp=2), micro_batch=2, dtype="float64"),  # small in the norm
        sinks_of_first_rank_counted,
        r"norm 0",
    ),
    Report(
        f"{MEGATRON}-9",
        "With context parallelism the loss was divided by the labels of the rank's own part.",
        Case("llama", 4, Parallel(cp=4, cp_method="all_gather"), sequences=9, padded=True),
        local_divisor,
        ALSO_LOSS,
    ),
    Report(
        f"{MEGATRON}-10",
        "With a padding mask and tp the balance loss was scaled by the tokens of all ranks where "
        "the rank's own were due: its gradient was tp times too large.",
        Case("qwen3_moe", 2, Parallel(tp=2), override={"z_loss": 0.1}, padded=True, micro_batch=2),
        tokens_of_all_ranks,
        r"gradient .*",
    ),
    Report(
        f"{MEGATRON}-11",
        "A norm that each tp rank applies to its own heads had parts of its gradient on each rank, "
        "summed under sequence parallelism only: the copies went different ways.",
        Case("qwen3", 2, WHOLE, optimizer="adamw", steps=4),
        norms_of_heads_not_reduced,
        r"gradient blocks\.\d+\.attn\.[qk]_norm\.weight",
    ),
    Report(
        f"{MEGATRON}-B",
        "Hidden states were gathered over tp for a loss that each rank computed whole, and their "
        "gradients were summed over tp: all were tp times too large.",
        Case("llama", 2, Parallel(tp=2), sequences=2),
        loss_of_every_tp_rank,
        EVERYTHING,
    ),
    Report(
        f"{MEGATRON}-C-balance",
        "The gradient of the balance loss over all ranks was averaged over dp where the sum was "
        "due: it was dp times too small.",
        Case("mixtral", 2, Parallel(), override={"balance": "global_batch"}, sequences=4),
        balance_loss_averaged_over_replicas,
        r"gradient .*",
    ),
    Report(
        f"{MEGATRON}-C-experts",
        "The factor that averages gradients of experts was left out: they were dp times too large.",
        Case("mixtral", 4, Parallel(ep=2), sequences=4),
        expert_gradients_not_scaled,
        r"gradient blocks\.\d+\.ffn\.experts\..*",
    ),
    Report(
        "Megatron-Bridge#2952",
        "Middle stages of a pipeline did not get the borders of packed documents: their tokens "
        "attended to all documents.",
        Case("llama", 4, Parallel(pp=4), documents=True),
        functools.partial(dropped_by_middle_stages, "documents"),
        ALSO_LOSS,
    ),
    Report(
        "Megatron-Bridge#2952-padding",
        "The same of the padding mask, which routers need on every stage.",
        Case("mixtral", 4, Parallel(pp=4), documents=True, padded=True),
        functools.partial(dropped_by_middle_stages, "real"),
        r"gradient .*",
    ),
    Report(
        "NeMo-Automodel#3191",
        "Creating Adam's state by an update with zero gradients left its count at 1: the first "
        "update was 1.34 times too small.",
        Case("llama", 2, Parallel(zero=2), optimizer="adamw", steps=3),
        first_update_counted_twice,
        r"parameter .*|validation",
    ),
    Report(
        "torchtitan#3412",
        "A chunked loss under tp took each rank's part of the gradient of the hidden states for "
        "the sum.",
        Case("qwen3", 2, WHOLE, loss_chunks=4, micro_batch=2),
        head_gradient_not_reduced,
        BEFORE_HEAD,
    ),
    Report(
        "torchtitan#4054-etp",
        "Experts split over tp without expert parallelism: the gradient of their input was one "
        "rank's part.",
        Case("deepseek_v3", 2, Parallel(tp=2, etp=2)),
        gradient_of_first_copy,
        BEFORE_EXPERTS,
    ),
    Report(
        "torchtitan#4054-router",
        "The same of routers, whose gradients were off most.",
        Case("deepseek_v3", 2, Parallel(tp=2), override={"z_loss": 0.1}, micro_batch=2),
        routers_not_reduced,
        ROUTERS,
    ),
]


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> Batches:
    """The cases of all tests that were selected."""
    return Batches(selected(request))


@pytest.mark.parametrize("case", [pytest.param(r.case, id=r.name) for r in REPORTS])
def test_equals_one_process(case: Case, batches: Batches) -> None:
    assert not batches.outcome(case).wrong(case)


def first_deviating(names: Sequence[str]) -> list[str]:
    """Those of the first backward, else its norm, else all."""
    backward = [name for name in names if name.startswith(("loss 0", "gradient "))]
    return backward or [name for name in names if name == "norm 0"] or list(names)


@pytest.mark.parametrize("report", [pytest.param(r, id=r.name) for r in REPORTS])
def test_the_bug_turns_it_red(report: Report) -> None:
    case = replace(report.case, steps=1)
    ranks = run_ranks(case.world, run_with, report.plant, case)
    wrong = Outcome(deviations(case, ranks)).wrong(case)
    found = first_deviating([line.rsplit(": ", 1)[0] for line in wrong])
    assert any(name != "loss 0" for name in found), "no gradient deviates"
    assert not [name for name in found if not re.fullmatch(report.spoils, name)]


# Several models in one process.

EVALUATED = [
    Case("llama", 4, Parallel(dp_shard=2, cp=2), sequences=4, steps=3),
    Case("llama", 4, Parallel(cp=4), sequences=4, steps=3),
]


def last_cp_group_for_all() -> None:
    """All models attend over the cp group of the model that was built last."""
    made, called = ContextAttention.__post_init__, ContextAttention.__call__
    last: list[ContextAttention] = []

    def noted(self: ContextAttention) -> None:
        made(self)
        last[:] = [self]

    def attended(_self: ContextAttention, *args: Any) -> Tensor:
        return called(last[0], *args)

    ContextAttention.__post_init__ = noted  # type: ignore[method-assign]
    ContextAttention.__call__ = attended  # type: ignore[method-assign]


def trained_within(
    plant: Callable[[], None], outer: Case, inner: Case
) -> tuple[dict[str, Any], dict[str, Any]]:
    """On one rank, which ends afterwards: one model is built and trained between the first and the
    second step of another one."""
    plant()
    accumulate, found = parity.RecordingStep.accumulate, list[dict[str, Any]]()

    def between(self: parity.RecordingStep, batches: Sequence[Batch], step: int) -> Tensor:
        if step == 1 and not found:
            found.append({})
            found[0] = parity.parallel_run(inner)
        return accumulate(self, batches, step)

    parity.RecordingStep.accumulate = between  # type: ignore[method-assign]
    return parity.parallel_run(outer), found[0]


def wrong_within(plant: Callable[[], None], outer: Case, inner: Case) -> list[str]:
    """What of both models deviates from one process."""
    both = run_ranks(4, trained_within, plant, outer, inner)
    pairs = zip((outer, inner), zip(*both, strict=True), strict=True)
    return [line for case, ranks in pairs for line in Outcome(deviations(case, ranks)).wrong(case)]


@pytest.mark.parametrize("outer", [0, 1])
def test_a_model_keeps_its_groups_beside_another(outer: int) -> None:
    """Megatron-LM#7452-13: an evaluation with another cp group than the training's wrote its own
    into what both shared, so that only the first batch was right."""
    assert not wrong_within(nothing, EVALUATED[outer], EVALUATED[1 - outer])


def test_another_models_group_turns_it_red() -> None:
    assert wrong_within(last_cp_group_for_all, *EVALUATED)


# Checkpoints.


def names_of_the_stage() -> None:
    """Each stage numbers its layers from 0."""
    made = StoredModel.__init__

    def numbered(self: Any, *args: Any) -> None:
        made(self, *args)
        layers = {name.split(".")[1] for name in self.names.values() if name.startswith("blocks.")}
        first = min(map(int, layers))

        def local(name: str) -> str:
            prefix, *rest = name.split(".")
            if prefix != "blocks":
                return name
            return ".".join((prefix, str(int(rest[0]) - first), *rest[1:]))

        self.names = {key: local(name) for key, name in self.names.items()}

    StoredModel.__init__ = numbered  # type: ignore[method-assign]


def state_after_an_empty_update() -> None:
    """Loading leaves the count of updates as the update that creates AdamW's state made it."""
    load = checkpoint.Checkpointer.load

    def counted(self: Any, path: Any) -> None:
        load(self, path)
        for state in self.optimizer.state.values():
            state["step"] += 1

    checkpoint.Checkpointer.load = counted  # type: ignore[method-assign]


def fit_with(plant: Callable[[], None], config: Any) -> None:
    """On one rank, which ends afterwards: nothing is put back."""
    plant()
    fit(config)


def resumed(folder: Path, plant: Callable[[], None]) -> tuple[list[float], set[float]]:
    """Losses of steps 2 and 3 in two stages, resumed from a step without stages; AdamW's counts."""
    model = {"model__override.n_layers": 4, "train__steps": 3, "optim__lr": 0.03}
    saves = {"checkpoint__interval": 1, "checkpoint__keep": 0}
    run_ranks(2, fit, tiny(folder / "whole", **model, **saves))
    resume = {"checkpoint__resume": str(folder / "whole/checkpoints/step-1")}
    changes = {**model, **resume, "parallel__pp": 2}
    run_ranks(2, fit_with, plant, tiny(folder / "resumed", **changes))
    tensors = contents(folder / "resumed/checkpoints/step-3")
    counts = {x.item() for name, x in tensors.items() if name.endswith(".step")}
    wanted = losses(folder / "whole")[1:]
    return [abs(x - y) / y for x, y in zip(losses(folder / "resumed"), wanted, strict=True)], counts


def test_a_checkpoint_is_resumed_with_other_stages(tmp_path: Path) -> None:
    """Megatron-LM#7452-12: parameters were saved by the layer's index in its stage, so that with
    more stages all of them loaded the first one's layers. NeMo-Automodel#3191: see above."""
    deviation, counts = resumed(tmp_path, nothing)
    assert max(deviation) < 1e-5
    assert counts == {3.0}


@pytest.mark.parametrize("plant", [names_of_the_stage, state_after_an_empty_update])
def test_the_bug_shows_when_resumed(plant: Callable[[], None], tmp_path: Path) -> None:
    deviation, _ = resumed(tmp_path, plant)
    assert max(deviation) > 1e-4


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_first_update_is_the_whole_learning_rate(moments: str) -> None:
    """NeMo-Automodel#3191: Adam's first update is the sign of the gradient, times the rate."""
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.full_like(weight, 0.25)
    options = Optim.model_validate({"moments": moments, "weight_decay": 0.0})
    optimizer = optim.build_optimizer([("weight", weight)], options)
    optim.update(optimizer, torch.tensor(1.0), 0.1)
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, -0.1), rtol=1e-3, atol=0)
