"""The plug-in on models that dtron did not write: gradients in every layout equal one process."""

import functools
import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dtron.config import Compile, Parallel, Recompute, Section, choices
from dtron.errors import ConfigError, PlacementError
from dtron.parallelisms import (
    Mesh,
    ParallelPlan,
    Replicate,
    Shard,
    colwise,
    global_norm,
    parallelize,
    pipeline,
    prepare_input,
    prepare_output,
    replicate,
    rowwise,
    sequence,
)
from dtron.parallelisms.plugin import _completed
from examples import vit
from tests.harness import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
UNITS = {"hf_llama": "model.layers.*", "hf_bert": "bert.encoder.layer.*", "vit": "blocks.*"}
ROWS, SEQ_LEN, VOCABULARY = 8, 16, 128
FOUR_STAGES = [["model.embed_tokens", "model.layers.0"], ["model.layers.[12]"]]
FOUR_STAGES += [["model.layers.3"], ["model.norm", "lm_head"]]
# BERT with a split vocabulary: embedding and head share the weight, two modules share the bias.
SPLIT_VOCABULARY = {
    "bert.encoder.layer.*.attention.self.[qkv]*": colwise(),
    "bert.encoder.layer.*.intermediate.dense": colwise(),
    ("bert.encoder.layer.*.output.dense", "bert.encoder.layer.*.*.output.dense"): rowwise(),
    ("bert.encoder.layer.*.*.LayerNorm", "bert.encoder.layer.*.*.*.LayerNorm"): replicate(),
    ("bert.embeddings.[pt]*_embeddings", "bert.embeddings.LayerNorm"): replicate(),
    "bert.embeddings.word_embeddings": rowwise(),
    "cls.predictions.transform": replicate(),
    "cls.predictions.decoder": colwise(output=Replicate()),
}


@dataclass(frozen=True)
class Case:
    """One model in one layout; `loop` is a loop of one's own over `parallelize`."""

    model: str
    world: int = 2
    tp: int = 1
    pp: int = 1
    schedule: str = "1F1B"
    loop: bool = False
    split_vocabulary: bool = False

    def __str__(self) -> str:
        kind = "loop" if self.loop else "step"
        name = f"{self.model}-{self.world}r-tp{self.tp}-pp{self.pp}-{kind}"
        name += f"-{self.schedule}" if self.pp > 1 else ""
        return name + ("-split" if self.split_vocabulary else "")


CASES = [
    *[Case(m, 2, tp=2, loop=True) for m in UNITS],
    Case("hf_bert", 4, tp=2, loop=True),
    *[Case(m, 2, pp=2) for m in UNITS],
    Case("vit", 4, tp=2),
    Case("hf_llama", 4, tp=2, pp=2, schedule="ZBVZeroBubble"),
    Case("hf_bert", 2, tp=2, split_vocabulary=True),
    Case("hf_bert", 4, tp=2, pp=2, split_vocabulary=True),
]


def build(name: str) -> nn.Module:
    """An example's model, its matrices large enough that attention is far from uniform."""
    torch.manual_seed(0)
    module = importlib.import_module(f"examples.{name}")
    model = vit.ViT() if name == "vit" else module.build()
    for parameter in model.parameters():
        if parameter.dim() > 1 and name != "vit":
            parameter.data.mul_(4)
    for child in model.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
    return model.train()


def batch(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(inputs, targets, other inputs) of all ranks together."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(ROWS, 3, 16, 16, generator=generator)
        return images, torch.randint(10, (ROWS,), generator=generator), {}
    tokens = torch.randint(2, VOCABULARY, (ROWS, SEQ_LEN), generator=generator)
    labels = torch.randint(2, VOCABULARY, (ROWS, SEQ_LEN), generator=generator)
    if name == "hf_llama":
        return tokens, labels, {}
    for row in range(ROWS):
        labels[row, : 2 * row] = -100  # unevenly, so that a mean of means would differ
    mask = (torch.arange(SEQ_LEN) < torch.arange(9, 9 + ROWS)[:, None]).long()
    tokens[0, :3] = 0  # the embedding's padding_idx
    return tokens, labels, {"attention_mask": mask, "token_type_ids": tokens % 2}


def count_of(name: str) -> Tensor | None:
    """What BERT's summed loss is divided by; None for a mean."""
    return (batch(name)[1] != -100).sum() if name == "hf_bert" else None


def reference(name: str) -> dict[str, Any]:
    """Plain PyTorch in one process."""
    torch.set_num_threads(1)
    model = build(name)
    inputs, targets, others = batch(name)
    loss = importlib.import_module(f"examples.{name}").loss(model(inputs, **others), targets)
    count = count_of(name)
    loss = loss / (1 if count is None else count)
    loss.backward()
    gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return {"loss": loss.item(), "norm": norm.item(), "gradients": gradients}


def local(x: Tensor, mesh: Mesh) -> Tensor:
    """This data-parallel rank's rows."""
    return x.chunk(mesh.size("dp_shard"))[mesh.rank("dp_shard")]


def parallel_run(case: Case) -> dict[str, Any]:
    """The same on one rank, with the patterns of the example."""
    example = importlib.import_module(f"examples.{case.model}")
    mesh = Mesh(tp=case.tp, pp=case.pp)
    inputs, targets, others = batch(case.model)
    inputs, targets = local(inputs, mesh), local(targets, mesh)
    others = {name: local(x, mesh) for name, x in others.items()}
    count, units = count_of(case.model), UNITS[case.model]
    placements = SPLIT_VOCABULARY if case.split_vocabulary else example.PLACEMENTS
    model = build(case.model)
    if case.loop:
        parallelize(model, mesh, units=units, placements=placements, dtype="float32")
        loss = example.loss(model(inputs, **others), targets)
        loss = loss / (mesh.size("dp_shard") if count is None else count)
        loss.backward()
        named = dict(model.named_parameters())
        norm = global_norm(list(named.values()), mesh)
        torch.distributed.all_reduce(loss.detach(), group=mesh.group("dp_shard"))
    else:
        plan = ParallelPlan(units=units, placements=placements, dtype="float32")
        stages = FOUR_STAGES if case.schedule == "ZBVZeroBubble" else example.STAGES
        staged = pipeline(model, mesh, plan, stages=stages, schedule=case.schedule)
        loss = staged.step(
            inputs, targets, example.loss, micro_batches=4, divide_by=count, **others
        )
        named = dict(staged.named_parameters())
        norm = staged.clip_gradients(1e9)
    gradients = {k: p.grad.full_tensor() for k, p in named.items() if p.grad is not None}  # type: ignore[attr-defined]
    return {"loss": loss.item(), "norm": norm.item(), "gradients": gradients}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float = 1e-5) -> None:
    """||g - g_ref|| <= limit * max(||g_ref||, 1e-3 * ||all g_ref|| / sqrt(n))."""
    total = torch.stack([t.norm() for t in wanted.values()]).norm()
    floor = 1e-3 * total / len(wanted) ** 0.5
    for name, tensor in found.items():
        bound = limit * max(wanted[name].norm(), floor)
        error = (tensor - wanted[name]).norm()
        assert error <= bound, f"{name}: {error:.3e} > {bound:.3e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    if case.model.startswith("hf"):
        pytest.importorskip("transformers")
    wanted = reference(case.model)
    seen: set[str] = set()
    for found in run_ranks(case.world, parallel_run, case):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
        assert_close(found["gradients"], wanted["gradients"])
        seen |= found["gradients"].keys()
    assert seen == wanted["gradients"].keys()


@pytest.mark.parametrize("name", UNITS)
def test_the_parallel_part_of_an_example_is_ten_lines_at_most(name: str) -> None:
    marked, lines = False, []
    for line in (EXAMPLES / f"{name}.py").read_text().splitlines():
        if line.strip() in ("# -- parallel", "# -- end"):
            marked = line.strip() == "# -- parallel"
        elif marked and line.strip() and not line.strip().startswith("#"):
            lines.append(line)
    assert any("Mesh(" in line for line in lines)
    assert 0 < len(lines) <= 10, "\n".join(lines)


# -- rows that the examples do without ------------------------------------------------------------

SEQUENCE_PARALLEL = {
    "embed": colwise(output=Shard(1)),
    "blocks": prepare_output(Shard(1), Replicate()),
    "blocks.*.norm?": sequence(),
    ("blocks.*.attn", "blocks.*.mlp"): prepare_input(Shard(1)),
    ("blocks.*.attn.[qkv]", "blocks.*.mlp.0"): colwise(),
    ("blocks.*.attn.out", "blocks.*.mlp.2"): rowwise(output=Shard(1)),
    "head": replicate(),
}


class Scaled(nn.Module):
    """A model with a parameter of its own beside its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((12,), 0.5))
        self.vit = vit.ViT()
        self.vit.embed = nn.Linear(12, 64)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x * self.scale)


def scaled_run(tp: int, rows: dict[Any, Any]) -> tuple[dict[str, Tensor], float]:
    """Two micro-batches in a loop of one's own: gradients add up, each backward reduces its own."""
    torch.manual_seed(0)
    placements: dict[Any, Any] = {"scale": replicate()}
    for unit, row in rows.items():
        patterns = (unit,) if isinstance(unit, str) else unit
        placements[tuple(f"vit.{pattern}" for pattern in patterns)] = row
    mesh = Mesh(tp=tp)
    # float64: the gradient of a key's bias is 0, and in float32 nothing but rounding
    model = parallelize(
        Scaled().double(), mesh, units="vit.blocks.*", placements=placements, dtype="float64"
    )
    for images in torch.randn(2, 4, 16, 12, generator=torch.Generator().manual_seed(1)).double():
        F.cross_entropy(model(images), torch.arange(4)).backward()
    norm = global_norm(list(model.parameters()), mesh).item()
    return {k: p.grad.full_tensor() for k, p in model.named_parameters()}, norm  # type: ignore[union-attr]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_are_complete_after_each_backward(sequence_parallel: bool) -> None:
    rows = SEQUENCE_PARALLEL if sequence_parallel else vit.PLACEMENTS
    ((wanted, norm),) = run_ranks(1, scaled_run, 1, rows)
    for found, found_norm in run_ranks(2, scaled_run, 2, rows):
        assert_close(found, wanted, 1e-10)
        assert found.keys() == wanted.keys()
        assert found_norm == pytest.approx(norm, rel=1e-10)


def dropout_run(mode: str) -> list[Tensor]:
    torch.manual_seed(0)
    recompute = Recompute.model_validate({"mode": mode})
    noisy = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 8))
    model = parallelize(noisy, Mesh(), units="0", blocks="0", recompute=recompute)
    torch.manual_seed(1)
    model(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


def test_recomputation_repeats_the_dropout_of_the_first_forward() -> None:
    (wanted,), (found,) = run_ranks(1, dropout_run, "none"), run_ranks(1, dropout_run, "full")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def evaluation(pp: int) -> tuple[float, bool, bool]:
    mesh = Mesh(pp=pp)
    model = pipeline(build("vit"), mesh, stages=vit.STAGES, units="blocks.*", dtype="float32")
    images, labels, _ = batch("vit")
    images, labels = local(images, mesh), local(labels, mesh)
    loss = model.eval().evaluate(images, labels, F.cross_entropy, micro_batches=2).item()
    stays = all(not part.training for part in model.parts.values())
    model.train().evaluate(images, labels, F.cross_entropy)
    clean = all(p.grad is None for p in model.parameters())
    return loss, stays, clean and all(part.training for part in model.parts.values())


@pytest.mark.parametrize(("world", "pp"), [(2, 1), (2, 2), (4, 2)])
def test_evaluation_is_the_mean_loss_and_keeps_the_mode(world: int, pp: int) -> None:
    wanted = reference("vit")["loss"]
    for loss, stays, returns in run_ranks(world, evaluation, pp):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert stays
        assert returns


# -- what is refused ------------------------------------------------------------------------------


def refuse(error: type[Exception], call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def refused_on_tp() -> dict[str, str]:
    """Messages of what cannot be split over tp = 2 (world 2)."""
    mesh, rows = Mesh(tp=2), dict(vit.PLACEMENTS)

    def apply(model: nn.Module, placements: Any, units: Any = "blocks.*") -> str:
        wrong = (PlacementError, ConfigError)
        return refuse(wrong, parallelize, model, mesh, units=units, placements=placements)  # type: ignore[arg-type]

    odd = vit.ViT()
    odd.blocks[0].mlp[0] = nn.Linear(64, 127)  # type: ignore[index, operator]
    norms = ("blocks.*.norm?", "embed", "head")
    uncovered = {k: v for k, v in rows.items() if k != norms} | {norms[:2]: replicate()}
    scaled = {"vit": replicate(), "scale": colwise()}
    return {
        "typo": apply(vit.ViT(), rows | {"blokcs.*.norm1": replicate()}),
        "unit": apply(vit.ViT(), rows, units="block.*"),
        "uncovered": apply(vit.ViT(), uncovered),
        "divides": apply(odd, rows),
        "none": apply(vit.ViT(), None),
        "parameter": apply(Scaled(), scaled, units="vit.blocks.*"),
        "root": apply(Scaled(), {"vit": replicate()}, units="vit.blocks.*"),
        "twice": apply(vit.ViT(), rows | {"blocks.*.mlp.*": replicate()}),
    }


def test_what_tensor_parallelism_refuses() -> None:
    messages = run_ranks(2, refused_on_tp)[0]
    assert "'blokcs.*.norm1' matches no module; did you mean blocks." in messages["typo"]
    assert "'block.*' matches no module; did you mean block" in messages["unit"]
    assert "head.norm.weight is covered by no row" in messages["uncovered"]
    assert "does not divide the 127 rows of blocks.0.mlp.0.weight" in messages["divides"]
    assert "needs `placements`" in messages["none"]
    assert "scale is a parameter, not a module" in messages["parameter"]
    assert "scale is covered by no row" in messages["root"]
    assert "two rows cover blocks.0.mlp.0.weight: colwise, replicate; use one" in messages["twice"]


def refused_on_pp() -> dict[str, str]:
    """Messages of what cannot be a pipeline of pp = 2 (world 2)."""
    mesh = Mesh(pp=2)

    def apply(stages: Any, schedule: str = "1F1B", model: nn.Module | None = None) -> str:
        options = {"units": "*.blocks.*" if model else "blocks.*", "schedule": schedule}
        wrong = (PlacementError, ConfigError)
        return refuse(wrong, pipeline, model or vit.ViT(), mesh, stages=stages, **options)  # type: ignore[arg-type]

    first, second = vit.STAGES
    model = pipeline(
        vit.ViT(),
        mesh,
        stages=["embed", ["blocks.0"], ["blocks.1"], ["blocks.[23]", "head"]],
        schedule="DualPipeV",
        units="blocks.*",
        dtype="float32",
    )
    images, labels, _ = batch("vit")

    def step(micro_batches: int, targets: Tensor = labels) -> str:
        options = {"micro_batches": micro_batches}
        return refuse(ConfigError, model.step, images, targets, F.cross_entropy, **options)

    return {
        "whole": refuse(ConfigError, parallelize, vit.ViT(), mesh, units="blocks.*"),
        "none": apply(()),
        "empty": apply([[*first, *second], []]),
        "many": apply([["embed"], ["blocks.*"], ["head"]]),
        "few": apply(vit.STAGES, "ZBVZeroBubble"),
        "schedule": apply(vit.STAGES, "1F1b"),
        "typo": apply([first, ["blocks.[23]", "haed"]]),
        "left": apply([first, ["blocks.[23]"]]),
        "twice": apply([first, ["blocks.[123]", "head"]]),
        "root": apply([["vit.embed"], ["vit.blocks", "vit.head"]], model=Scaled()),
        "rows": step(3),
        "rule": step(2),
        "targets": step(4, labels[:4]),
    }


def test_what_a_pipeline_refuses() -> None:
    messages = run_ranks(2, refused_on_pp)[0]
    assert "parallelize takes whole models; use pipeline" in messages["whole"]
    assert "pp = 2 needs `stages`" in messages["none"]
    assert "stage 1 names no module" in messages["empty"]
    assert "3 stages for pp = 2: schedule '1F1B' takes 1 per rank; use 2" in messages["many"]
    assert "2 stages for pp = 2: schedule 'ZBVZeroBubble' takes 2 per rank" in messages["few"]
    assert "unknown; did you mean 1F1B?" in messages["schedule"]
    assert "'haed' matches no module; did you mean head" in messages["typo"]
    assert "head.norm.weight is in no pipeline stage" in messages["left"]
    assert "blocks.1 is in stages 0 and 1; name it in one" in messages["twice"]
    assert "scale is owned by the root" in messages["root"]
    assert "micro_batches = 3 does not divide the rank's batch of" in messages["rows"]
    assert "takes at least 2 x parallel.pp micro-batches" in messages["rule"]
    assert "8 rows, targets 4; use equal numbers" in messages["targets"]


def refused_arguments() -> dict[str, str]:
    """Messages of arguments that are of another type (world 1)."""
    mesh, device_mesh = Mesh(), init_device_mesh("cpu", (1,))
    plain: dict[str, Any] = {"units": "blocks.*"}

    def apply(model: Any, mesh: Any = mesh, **options: Any) -> str:
        return refuse(ConfigError, parallelize, model, mesh, **{**plain, **options})

    done = parallelize(vit.ViT(), mesh, **plain)
    averaged = pipeline(vit.ViT(), mesh, units="blocks.*", dtype="float32")
    images, labels, _ = batch("vit")
    each = functools.partial(F.cross_entropy, reduction="none")
    return {
        "swapped": apply(mesh, vit.ViT()),
        "device mesh": apply(vit.ViT(), device_mesh),
        "DDP": apply(DistributedDataParallel(vit.ViT())),
        "compiled": apply(torch.compile(vit.ViT())),
        "again": apply(done),
        "nested": apply(nn.Sequential(done), units="0.blocks.*"),
        "dtype": apply(vit.ViT(), dtype="fp32"),
        "torch's dtype": apply(vit.ViT(), dtype=torch.float32),
        "class": apply(vit.ViT(), units=vit.ViT),
        "modules": apply(vit.ViT(), units=[vit.ViT()]),
        "function": apply(vit.ViT(), placements={"embed": colwise}),
        "name": apply(vit.ViT(), placements={"embed": "colwise"}),
        "zero": refuse(ConfigError, Mesh, tp=0),
        "text": refuse(ConfigError, Mesh, tp="2"),
        "loss": refuse(ConfigError, averaged.step, images, labels, each),
    }


def test_arguments_of_another_type_are_refused() -> None:
    messages = run_ranks(1, refused_arguments)[0]
    assert messages["swapped"] == "model is a Mesh; pass an nn.Module, then the mesh"
    assert "mesh is a DeviceMesh; pass a dtron.parallelisms.Mesh" in messages["device mesh"]
    assert "DistributedDataParallel; pass model.module" in messages["DDP"]
    assert "model is compiled; pass the module that torch.compile got" in messages["compiled"]
    assert "is a DTensor already" in messages["again"]
    assert "is a DTensor already" in messages["nested"]
    assert "dtype = 'fp32' is unknown; use 'bfloat16', 'float32'" in messages["dtype"]
    assert "dtype = torch.float32 is unknown" in messages["torch's dtype"]
    assert "units has a type; name modules by patterns" in messages["class"]
    assert "units has a ViT; name modules by patterns" in messages["modules"]
    assert "placements['embed'] is a function; use a row" in messages["function"]
    assert "placements['embed'] is a str; use a row" in messages["name"]
    assert messages["zero"] == "parallel.tp = 0; use at least 1"
    assert messages["text"] == "parallel.tp = '2'; use at least 1"
    assert "loss returns a tensor of shape (8,), which has no backward" in messages["loss"]


def test_fields_replace_those_of_a_plan() -> None:
    plan = ParallelPlan(units="blocks.*", dtype="float32")
    given = Recompute.model_validate({"mode": "full"})
    assert _completed(plan, {"recompute": given}) == replace(plan, recompute=given)
    assert _completed(None, {"units": "blocks.*", "dtype": "float32"}) == plan
    with pytest.raises(TypeError, match="unit"):
        _completed(plan, {"unit": "blocks.*"})
    with pytest.raises(ConfigError, match="schedule = 'GPipe' has no effect in the plug-in"):
        _completed(plan, {"parallel": Parallel(schedule="GPipe")})
    with pytest.raises(ConfigError, match='"auto" is chosen by the Trainer alone; use "none"'):
        _completed(plan, {"recompute": Recompute(mode="auto")})


USED = {
    "parallel": {
        *("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"),  # compared with the mesh
        *("zero", "reduce", "reduce_dtype", "accumulate_in_matmul", "blocks_per_unit"),
        *("reduce_by", "copy_engines", "prefetch"),
    },
    "compile": {"enable", "backend"},
}
"""Keys that have an effect in the plug-in."""
OTHERS = {"cp_inner": 2, "cache_dir": "somewhere", "pp_layout": "Et|tL", "high_priority": ["tp"]}
"""Values that are not the default, of keys whose type does not tell one."""


@pytest.mark.parametrize(("section", "model"), [("parallel", Parallel), ("compile", Compile)])
def test_keys_without_effect_are_refused(section: str, model: type[Section]) -> None:
    for key, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        legal = [value for value in choices(section, key) if value not in (default, "auto")]
        other = OTHERS.get(
            key, legal[0] if legal else not default if isinstance(default, bool) else 3
        )
        given = {section: model().model_copy(update={key: other})}
        if key in USED[section]:
            _completed(None, {"units": "blocks.*", **given})
            continue
        with pytest.raises(ConfigError, match=rf"{section}\.{key} = .* has no effect"):
            _completed(None, {"units": "blocks.*", **given})
