"""Parallelism applied to a module that dtron did not write, patterns, and initial weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtron.config import Parallel, Recompute
from dtron.errors import ConfigError, PlacementError
from dtron.parallelisms import Mesh, parallelize
from dtron.parallelisms.gradients import global_norm
from dtron.parallelisms.placement import join_units, matches, select, select_units
from tests.harness import run_ranks


class Layer(nn.Module):
    """A block of a user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Net(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.out = nn.Linear(7, 5, bias=False)
        self.out.weight = nn.Parameter(torch.randn(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_settings_of_the_trainer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule = 'GPipe' has no effect in the plug-in"):
        parallelize(Net(), None, units="blocks.*", parallel=Parallel(schedule="GPipe"))  # type: ignore[arg-type]


def test_star_matches_one_component() -> None:
    assert matches("blocks.*", "blocks.3")
    assert not matches("blocks.*", "blocks.3.attn")
    assert not matches("blocks.*", "blocks")
    assert matches("*.*", "blocks.3")


def test_patterns_that_match_nothing_name_the_nearest() -> None:
    with pytest.raises(PlacementError, match=r"did you mean blocks"):
        select(Net(), "blokcs.*")
    with pytest.raises(PlacementError, match="two units"):
        select_units(Net(), ("blocks.*", ("blocks.0", "out")))
    assert [list(g) for g in select_units(Net(), ["stem", ("blocks.0", "out")])] == [
        ["stem"],
        ["blocks.0", "out"],
    ]


def test_units_without_a_pattern_are_not_joined_in_silence() -> None:
    units = ("stem", "blocks.0")
    groups = select_units(Net(), units)
    assert len(join_units(groups, units, 1)) == 2
    with pytest.raises(PlacementError, match="blocks_per_unit = 2 joins neighbouring units of a"):
        join_units(groups, units, 2)


def user_loop(replicas: int, recompute: Recompute) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    mesh = Mesh(dp_replicate=replicas, dp_shard=-1)
    model = parallelize(Net(), mesh, units="blocks.*", dtype="float32", recompute=recompute)
    batch = torch.arange(40.0).view(8, 5) / 40
    rank, ranks = mesh.rank("dp_replicate", "dp_shard"), mesh.size("dp_replicate", "dp_shard")
    model(batch.chunk(ranks)[rank]).square().sum().backward()
    norm = global_norm(list(model.parameters()), mesh).item()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, norm  # type: ignore[union-attr]


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_gradients_of_a_users_model(world: int, replicas: int, mode: str) -> None:
    if world == 3:
        batch_rows = 8  # three ranks get 3, 3 and 2 rows: sums need no equal shares
        assert batch_rows % world
    torch.manual_seed(0)
    model = Net()
    model(torch.arange(40.0).view(8, 5) / 40).square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    total = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for found, norm in run_ranks(
        world, user_loop, replicas, Recompute.model_validate({"mode": mode})
    ):
        torch.testing.assert_close(found, wanted)
        assert norm == pytest.approx(total, rel=1e-6)


def draw(fqn: str, full: Tensor, generator: torch.Generator) -> None:
    full.normal_(generator=generator)


def first_block(model: Net) -> Layer:
    block = model.blocks[0]
    assert isinstance(block, Layer)
    return block


def weights_from_meta() -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Net()
        model.out.weight = first_block(model).linear.weight  # a tie; shapes do not matter on meta
    parallelize(model, Mesh(), units=(("blocks.0", "out"), "stem"), dtype="float32", init=(3, draw))
    assert model.out.weight is first_block(model).linear.weight
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def test_initial_weights_are_equal_in_every_layout() -> None:
    (wanted,) = run_ranks(1, weights_from_meta)
    for found in run_ranks(3, weights_from_meta):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not torch.equal(wanted["blocks.1.linear.weight"], wanted["blocks.2.linear.weight"])


def refused_without_blocks() -> str:
    with pytest.raises(ConfigError) as error:
        parallelize(Net(), Mesh(), units="stem", recompute=Recompute(mode="full"))
    return str(error.value)


def test_recompute_without_blocks_is_refused() -> None:
    assert "use blocks=PATTERN, such as" in run_ranks(1, refused_without_blocks)[0]


def dtypes_of_compute(replicas: int) -> set[torch.dtype]:
    model = parallelize(Net(), Mesh(dp_replicate=replicas), units="blocks.*")
    out = model(torch.zeros(2, 5, dtype=torch.bfloat16))
    out.float().sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    return {out.dtype}


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_mixed_precision_is_the_same_in_every_layout(world: int, replicas: int) -> None:
    assert run_ranks(world, dtypes_of_compute, replicas)[0] == {torch.bfloat16}


def refused_axes() -> str:
    with pytest.raises(ConfigError) as error:
        parallelize(Net(), Mesh(tp=2), units="blocks.*")
    return str(error.value)


def test_axes_that_are_not_built_are_refused() -> None:
    assert "tp = 2" in run_ranks(2, refused_axes)[0]


def refused_sharing() -> str:
    model = Net()
    model.out.weight = nn.Parameter(torch.zeros(7, 7))
    first_block(model).linear.weight = model.out.weight
    with pytest.raises(PlacementError) as error:
        parallelize(model, Mesh(), units=("blocks.*", "out"))
    return str(error.value)


def test_a_parameter_shared_across_units_is_refused() -> None:
    assert "blocks.0.linear and out share a parameter" in run_ranks(1, refused_sharing)[0]


def weights_of_unseeded_ranks() -> Tensor:
    torch.manual_seed(torch.distributed.get_rank())
    mesh = Mesh(dp_replicate=2)
    model = parallelize(Net(), mesh, units="blocks.*")
    return model.stem.weight.to_local()  # type: ignore[operator]


def test_replicas_start_equal_without_a_common_seed() -> None:
    one, other = run_ranks(2, weights_of_unseeded_ranks)
    assert torch.equal(one, other)


def refused_buffer() -> str:
    with torch.device("meta"):
        model = Net()
        model.register_buffer("table", torch.ones(3))
    with pytest.raises(ConfigError) as error:
        parallelize(model, Mesh(), units="blocks.*", init=(0, draw))
    return str(error.value)


def test_a_buffer_on_meta_is_refused() -> None:
    assert "buffer table" in run_ranks(1, refused_buffer)[0]
