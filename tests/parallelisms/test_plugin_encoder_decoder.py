"""Several tensors between stages: an encoder and a decoder in any layout equal one process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtron.config import Compile, Parallel, Recompute
from dtron.parallelisms import Mesh, pipeline
from dtron.parallelisms.pipeline.executor import Pipeline
from examples import encoder_decoder as example
from tests.harness import run_ranks

ROWS = 8
FOUR = [["embed", "encoder.0"], ["encoder.1", "begin"], ["decoder.0"], ["decoder.1", "head"]]


@dataclass(frozen=True)
class Case:
    world: int
    mesh: dict[str, Any]
    stages: int = 2
    schedule: str = "1F1B"
    plan: str = ""
    frozen: bool = False

    def __str__(self) -> str:
        degrees = "-".join(f"{key}{n}" for key, n in self.mesh.items())
        shown = [degrees, self.schedule, self.plan, "frozen" if self.frozen else ""]
        return "-".join(filter(None, shown))


PLANS: dict[str, dict[str, Any]] = {
    "": {},
    "zero": {"parallel": Parallel(zero=3)},
    "recompute": {"recompute": Recompute(mode="full")},
    "compile": {"compile": Compile(enable=True, backend="aot_eager")},
}
CASES = [
    Case(2, {"pp": 2}),
    Case(2, {"pp": 2}, 4, "Interleaved1F1B", "recompute"),
    Case(2, {"pp": 2}, 4, "ZBVZeroBubble"),
    Case(4, {"pp": 4}, 4),
    Case(4, {"pp": 2, "dp_shard": 2}, plan="zero"),
    Case(4, {"pp": 2, "tp": 2}, 4, "InterleavedZeroBubble"),
    Case(2, {"pp": 2}, plan="compile"),
    Case(2, {"pp": 2}, 4, "Interleaved1F1B", frozen=True),
]


def build(frozen: bool) -> example.EncoderDecoder:
    torch.manual_seed(0)
    model = example.EncoderDecoder()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)
        if frozen and name.startswith(("embed.", "encoder.")):
            parameter.requires_grad_(False)
    return model


def reference(frozen: bool) -> tuple[float, dict[str, Tensor]]:
    model = build(frozen)
    tokens, before, labels = example.batch(0, ROWS)
    loss = example.loss(model(tokens, before), labels)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def in_ranks(case: Case, plant: Callable[[], None] | None = None) -> Any:
    """(loss, gradients of this rank's stages); the second step has the same weights."""
    if plant is not None:
        plant()
    mesh = Mesh(**case.mesh)
    model = pipeline(
        build(case.frozen),
        mesh,
        stages=FOUR if case.stages == 4 else example.STAGES,
        schedule=case.schedule,
        units=example.BLOCKS,
        placements=example.PLACEMENTS if mesh.size("tp") > 1 else None,
        dtype="float32",
        **PLANS[case.plan],
    )
    rows = [x.chunk(mesh.size("dp_shard"))[mesh.rank("dp_shard")] for x in example.batch(0, ROWS)]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        mean = model.step(rows[0], rows[2], example.loss, micro_batches=4, decoder_tokens=rows[1])
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
    evaluated = model.evaluate(rows[0], rows[2], example.loss, decoder_tokens=rows[1])
    return mean.item(), evaluated.item(), whole


def wrong(case: Case, plant: Callable[[], None] | None = None) -> list[str]:
    """What differs from one process."""
    loss, gradients = reference(case.frozen)
    ranks = run_ranks(case.world, in_ranks, case, plant)
    found: dict[str, Tensor] = {}
    for mean, evaluated, own in ranks:
        assert mean == pytest.approx(loss, rel=1e-5)
        assert evaluated == pytest.approx(loss, rel=1e-5)
        found |= own
    assert found.keys() == gradients.keys()
    total = torch.stack([g.norm() for g in gradients.values()]).norm() / len(gradients) ** 0.5
    # The gradient of a key bias is zero but for rounding.
    least = {name: total * (1 if name.endswith("k.bias") else 1e-3) for name in gradients}
    return [
        name
        for name, g in gradients.items()
        if (found[name] - g).norm() > 1e-5 * max(g.norm(), least[name])
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_encoder_and_decoder_on_different_stages_equal_one_process(case: Case) -> None:
    assert not wrong(case)


def encoder_gradient_lost() -> None:
    """Only the first of the tensors between stages gets its gradient."""
    send = Pipeline._send

    def first_only(self: Pipeline, state: Any, tensors: Any, peer: int) -> None:
        lost = [torch.zeros_like(x) for x in tensors[1:]] if peer < self.peers[self.rank] else []
        send(self, state, (tensors[0], *(lost or tensors[1:])), peer)

    Pipeline._send = first_only  # type: ignore[method-assign]


def crossed_causally() -> None:
    """Cross attention hides the encoder's later tokens."""
    begin = example.DecoderBlock.__init__

    def init(self: example.DecoderBlock) -> None:
        begin(self)
        self.cross.causal = True

    example.DecoderBlock.__init__ = init  # type: ignore[method-assign]


def test_a_lost_gradient_of_the_encoder_turns_parity_red() -> None:
    case = Case(4, {"pp": 4}, 4)
    found = wrong(case, encoder_gradient_lost)
    assert found
    assert all(name.startswith(("embed.", "encoder.", "begin.norm.")) for name in found)


def test_causal_cross_attention_turns_parity_red() -> None:
    with pytest.raises(AssertionError):
        wrong(CASES[0], crossed_causally)
