"""Every model in every layout equals one process: loss, every gradient, grad norm, parameters."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from dtron.config import Compile, Optim, Parallel, Recompute
from dtron.data import Batch
from dtron.loss import VocabularyShard, cross_entropy_sum
from dtron.models import MODELS, build_model, model_config
from dtron.models.attention import choose_backend
from dtron.models.config import DecoderConfig
from dtron.models.dropout import token_keys
from dtron.optim import build_optimizer
from dtron.parallelisms import Mesh
from dtron.parallelisms.apply import Applied, Passes, apply_passes
from dtron.parallelisms.fsdp import Policy
from dtron.parallelisms.initialize import initialize
from dtron.parallelisms.layout import StageNames, build_layout
from dtron.parallelisms.mesh import BATCH_AXES
from dtron.parallelisms.schedules import SCHEDULES
from dtron.step import SHARE_AXES, Loss, TrainStep, build_execution
from tests.harness import run_ranks

SEQUENCES, SEQ_LEN, STEPS, LR, MAX_NORM, SEED = 8, 16, 3, 0.5, 0.05, 7
SMALL = {"n_layers": 3, "vocab_size": 67, "dim": 24, "n_heads": 4, "ffn_dim": 40}
MODEL_OVERRIDES = {
    "llama": {**SMALL, "n_kv_heads": 2},
    "qwen3": {**SMALL, "n_kv_heads": 2, "head_dim": 8},
    "gpt": {**SMALL, "n_kv_heads": 4, "max_seq_len": SEQ_LEN},
}


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    model: str = "llama"
    world: int = 4
    dp_replicate: int = 1
    pp: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int = 0
    tp: int = 1
    sequence_parallel: bool = True
    parallel: Parallel = Parallel()
    recompute: Recompute = Recompute()
    compile: Compile = Compile()
    override: dict = field(default_factory=dict)
    dtype: str = "float32"
    micro_batch: int = 1
    documents: bool = False

    def __str__(self) -> str:
        changed = [f"{self.model}-{self.world}r{self.dp_replicate}", f"zero{self.parallel.zero}"]
        changed += [self.parallel.reduce, self.recompute.mode, str(self.recompute.every)]
        changed += [f"tp{self.tp}{'sp' if self.sequence_parallel else ''}"] if self.tp > 1 else []
        changed += [f"pp{self.pp}{self.schedule}{self.stages_per_rank}"] if self.pp > 1 else []
        changed += [self.compile.backend] if self.compile.enable else []
        changed += [f"{k}={v}" for k, v in self.override.items()]
        changed += [self.dtype, f"mb{self.micro_batch}"] + (["docs"] if self.documents else [])
        return "-".join(changed)


LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (4, 2)]  # (world, dp_replicate)
ZERO = [Parallel(zero=1), Parallel(zero=2), Parallel(zero=2, reduce="step")]
ZERO += [Parallel(zero=3, reduce="step"), Parallel(zero=3, prefetch=2)]
CASES = [
    *[Case(m, w, r) for m in MODELS for w, r in LAYOUTS],
    *[Case(m, 2, tp=2, sequence_parallel=sp) for m in MODELS for sp in (True, False)],
    *[Case(m, 4, tp=2, sequence_parallel=sp) for m in MODELS for sp in (True, False)],
    *[Case("llama", 2, pp=2, schedule=s) for s in SCHEDULES],
    *[Case("llama", 4, 2, parallel=p) for p in ZERO],
    *[Case("gpt", 2, 1, parallel=p) for p in ZERO],
    *[Case(m, 2, micro_batch=2, override={"tied": t}) for m in MODELS for t in (True, False)],
    *[Case(m, 2, recompute=Recompute(mode="full")) for m in MODELS],
    *[Case("llama", 2, recompute=Recompute(mode="selective", every=e)) for e in (1, 2)],
    *[Case("gpt", 4, 2, override={"dropout": 0.1}, recompute=Recompute(mode="full"))],
    *[Case("gpt", 2, 1, override={"dropout": 0.1, "attention_dropout": 0.1}, micro_batch=4)],
    *[Case("llama", 4, 2, override={"rope_scaling_factor": 4.0}, documents=True)],
    *[Case(m, 4, 2, dtype="float64") for m in MODELS],
    *[Case(m, 2, compile=Compile(enable=True, backend="aot_eager")) for m in MODELS],
    Case(
        "gpt",
        2,
        compile=Compile(enable=True, backend="aot_eager"),
        recompute=Recompute(mode="selective"),
        override={"dropout": 0.1},
    ),
    Case(
        "llama",
        2,
        compile=Compile(enable=True, backend="aot_eager"),
        recompute=Recompute(mode="full"),
        parallel=Parallel(zero=1),
    ),
]


def build(case: Case) -> tuple[nn.Module, DecoderConfig]:
    """The unsharded model with weights drawn by FQN."""
    config = model_config(case.model, "debug", {**MODEL_OVERRIDES[case.model], **case.override})
    attention = choose_backend(
        "auto",
        device_type="cpu",
        dtype=torch.float32,
        head_dim=config.head_size,
        documents=case.documents,
        dropout=config.attention_dropout > 0,
        deterministic=False,
    )
    model = build_model(case.model, config, attention)
    if case.dtype == "float64":
        model.double()

    def fill(fqn: str, full: Tensor, generator: torch.Generator) -> None:
        MODELS[case.model].init_parameter(config, fqn, full, generator)
        if full.dim() > 1:
            full.mul_(4)  # attention far from uniform, gradients of all layers of one magnitude

    initialize(model, SEED, fill)
    return model, config


def make_batch(case: Case, rows: range, step: int) -> Batch:
    """Sequences of one step; labels are missing unevenly, so that a mean of means would differ."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(67, (SEQUENCES, SEQ_LEN), generator=generator)
    labels = torch.randint(67, (SEQUENCES, SEQ_LEN), generator=generator)
    for row in range(SEQUENCES):
        labels[row, : row * 2] = -100
    documents = positions = None
    if case.documents:
        cut = torch.arange(SEQ_LEN) >= torch.arange(3, 3 + SEQUENCES)[:, None]
        documents = cut.int()
        positions = torch.arange(SEQ_LEN) - cut * torch.arange(3, 3 + SEQUENCES)[:, None]
        positions, documents = positions[rows.start : rows.stop], documents[rows.start : rows.stop]
    part = slice(rows.start, rows.stop)
    index = torch.arange(SEQUENCES) + step * SEQUENCES
    return Batch(tokens[part], labels[part], index[part], positions, documents)


def reference(case: Case) -> dict:
    """Plain PyTorch in one process: the whole batch at once, SGD, torch's own clipping."""
    torch.set_num_threads(1)
    model, config = build(replace(case, dp_replicate=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        batch = make_batch(case, range(SEQUENCES), step)
        keys = None
        if config.dropout or config.attention_dropout:  # type: ignore[attr-defined]
            keys = token_keys(SEED, step, batch.sequence, torch.arange(SEQ_LEN))
        logits = model(batch.tokens, batch.positions, batch.documents, keys)
        loss = cross_entropy_sum(logits, batch.labels) / (batch.labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {k: p.grad.clone() for k, p in model.named_parameters()}  # type: ignore[union-attr]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    parameters = {k: p.detach().clone() for k, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters}


def parallel_run(case: Case) -> dict:
    """The same on one rank of `case.world`, by dtron."""
    mesh = Mesh(dp_replicate=case.dp_replicate, dp_shard=-1, tp=case.tp, pp=case.pp)
    model, config = build(case)
    parallel = case.parallel.model_copy(
        update={
            "pp": case.pp,
            "schedule": case.schedule,
            "stages_per_rank": case.stages_per_rank,
        }
    )
    spec = MODELS[case.model]
    layout = None
    if case.pp > 1:
        n_micro_batches = SEQUENCES // mesh.size(*BATCH_AXES) // case.micro_batch
        names = StageNames(spec.embedding(config), spec.layer, spec.head)
        layout = build_layout(parallel, names, config.n_layers, n_micro_batches, 1.0)
    passes = Passes(
        units=spec.units(config),
        blocks="blocks.*",
        placements=spec.placements(config, case.sequence_parallel),
        parallel=parallel,
        dtype=case.dtype,
        recompute=case.recompute,
        compile=case.compile,
        vocabulary=spec.vocabulary,
        layout=layout,
        replicas="step",
    )
    applied = apply_passes(model, mesh, passes)
    loss: Loss = cross_entropy_sum
    if case.tp > 1:
        shard = VocabularyShard(config.vocab_size, mesh.rank("tp"), mesh.group("tp"))
        loss = functools.partial(cross_entropy_sum, vocabulary=shard)
    optimizer = build_optimizer([p for _, p in applied.named_parameters()], Optim(name="sgd"))
    dropout = config.dropout or config.attention_dropout
    execution = build_execution(applied, passes.layout, mesh, Policy.of(parallel, mesh))
    train_step = TrainStep(
        execution, applied, mesh, optimizer, loss, MAX_NORM, SEED if dropout else None
    )
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        batches = micro_batches(case, mesh, step)
        if step == 0:
            train_step.accumulate(batches, step)
            gradients = whole(applied, [p.grad for _, p in applied.named_parameters()])  # type: ignore[misc]
            optimizer.zero_grad()
        result = train_step(batches, step, LR)
        torch.distributed.all_reduce(result.loss, group=mesh.group(*SHARE_AXES))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    parameters = whole(applied, [p.detach() for _, p in applied.named_parameters()])
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters}


def whole(applied: Applied, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Unsharded tensors by name, without padded rows, which must be zero; tied copies are equal."""
    full: dict[str, Tensor] = {}
    for (name, _), shard in zip(applied.named_parameters(), tensors, strict=True):
        tensor = shard.full_tensor()  # type: ignore[attr-defined]
        rows = applied.padded_rows.get(name, len(tensor))
        assert not tensor[rows:].any(), f"{name}: padded rows are not zero"
        assert torch.equal(full.setdefault(name, tensor[:rows]), tensor[:rows]), name
    return full


def micro_batches(case: Case, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's micro-batches of a step, as the loader cuts them."""
    ranks, rank = mesh.size("dp_replicate", "dp_shard"), mesh.rank("dp_replicate", "dp_shard")
    first, stride = rank * case.micro_batch, ranks * case.micro_batch
    starts = range(first, SEQUENCES, stride)
    return [make_batch(case, range(s, s + case.micro_batch), step) for s in starts]


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """||g - g_ref|| <= tolerance * max(||g_ref||, 1e-3 * ||all g_ref|| / sqrt(n))."""
    total = torch.stack([t.norm() for t in wanted.values()]).norm()
    floor = 1e-3 * total / len(wanted) ** 0.5
    for name, tensor in found.items():
        bound = tolerance * max(wanted[name].norm(), floor)
        error = (tensor - wanted[name]).norm()
        assert error <= bound, f"{name}: {error:.3e} > {bound:.3e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    tolerance = 1e-10 if case.dtype == "float64" else 1e-5
    wanted = reference(case)
    seen: dict[str, set[str]] = {"gradients": set(), "parameters": set()}
    for found in run_ranks(case.world, parallel_run, case):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
        assert min(wanted["norms"]) > MAX_NORM, "clipping does not act"
        for kind in ("gradients", "parameters"):
            seen[kind] |= found[kind].keys()
            assert_close(found[kind], wanted[kind], tolerance)
    for kind, names in seen.items():
        assert names == wanted[kind].keys()
