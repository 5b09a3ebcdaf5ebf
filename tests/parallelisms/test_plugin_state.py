"""State of a pipeline in a user's own loop: tied weights on one rank, modes, and steps in a row."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.errors import ConfigError, PlacementError
from dtron.parallelisms import Mesh, PipelinedModel, Replicate, colwise, pipeline, replicate
from dtron.parallelisms.initialize import materialize
from tests.harness import run_ranks


class Tied(nn.Module):
    """The head uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


STAGES = [["embed", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "head"]]


def in_a_v() -> PipelinedModel:
    torch.manual_seed(0)
    return pipeline(
        Tied(),
        Mesh(pp=2),
        stages=STAGES,
        schedule="ZBVZeroBubble",
        units="blocks.*",
        dtype="float32",
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def loaded() -> list[bool]:
    model = in_a_v()
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    return [bool((p.full_tensor() == 1).all()) for p in model.parameters()]  # type: ignore[attr-defined]


def test_loading_reaches_both_holders_of_a_tied_weight() -> None:
    first, second = run_ranks(2, loaded)
    assert first == [True] * 6  # two holders of the weight, two blocks with biases
    assert second == [True] * 4


def test_evaluation_keeps_the_modes_of_submodules() -> None:
    assert run_ranks(1, alone) == [(True, [False])]


def alone() -> tuple[bool, list[bool]]:
    model = pipeline(Tied(), Mesh(), units="blocks.*", dtype="float32")
    model.parts[0].drop.eval()  # type: ignore[union-attr]
    tokens = torch.arange(16).view(4, 4) % 11
    before = model.evaluate(tokens, tokens, loss, micro_batches=4)
    found = model.step(tokens, tokens, loss, micro_batches=4)
    return bool(torch.isclose(before, found)), [bool(model.parts[0].drop.training)]  # type: ignore[union-attr]


def twice() -> str:
    model = in_a_v()
    tokens = torch.arange(16).view(4, 4) % 11
    model.step(tokens, tokens, loss, micro_batches=4)
    applied = model._applied
    shared = [p for pair in applied.shared.pairs for p in pair]
    if not shared:
        return "this rank holds none"
    with pytest.raises(ConfigError, match="zero_grad"):
        model._refuse_complete_gradients()
    return "refused"


def test_complete_gradients_are_not_completed_again() -> None:
    assert run_ranks(2, twice) == ["refused", "this rank holds none"]


def test_stages_follow_the_order_of_layers() -> None:
    assert run_ranks(1, disordered) == ["blocks.1 is in stage 1, but blocks.2, which follows it"]


def disordered() -> str:
    stages = [["embed", "blocks.0", "blocks.2"], ["blocks.1", "blocks.3", "head"]]
    with pytest.raises(PlacementError) as error:
        pipeline(Tied(), Mesh(), stages=stages, units="blocks.*", dtype="float32")
    return str(error.value).split(", is in")[0]


def differently_tied() -> str:
    placements = {
        "embed": colwise(output=Replicate()),
        "blocks.*": replicate(),
        "head": replicate(),
    }
    with pytest.raises(PlacementError) as error:
        pipeline(
            Tied(),
            Mesh(pp=2, tp=2),
            stages=[["embed", "blocks.[01]"], ["blocks.[23]", "head"]],
            placements=placements,
            units="blocks.*",
            dtype="float32",
        )
    return str(error.value)


def test_a_weight_tied_over_stages_is_split_alike() -> None:
    for message in run_ranks(4, differently_tied):
        assert "shards it in two ways" in message


class Buffered(nn.Module):
    """Keeps a table that it computes when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.linear = nn.Linear(4, 4)


def test_buffers_survive_new_storage() -> None:
    model = Buffered()
    materialize(model, torch.device("cpu"))
    assert torch.equal(model.table, torch.arange(4.0))  # type: ignore[arg-type]


def frozen() -> list[bool]:
    """The first stage and the tied weight get no gradients; the others train."""
    torch.manual_seed(0)
    net = Tied()
    net.embed.weight.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    stages = [["embed", "blocks.0"], ["blocks.[1-3]", "head"]]
    model = pipeline(net, Mesh(pp=2), stages=stages, units="blocks.*", dtype="float32")
    tokens = torch.arange(16).view(4, 4) % 11
    model.step(tokens, tokens, loss, micro_batches=4)
    return [p.grad is not None for p in model.parameters()]


def test_frozen_stages_and_tied_weights() -> None:
    first, second = run_ranks(2, frozen)
    assert not any(first)
    assert second.count(True) == 6  # three blocks with biases; not the head
