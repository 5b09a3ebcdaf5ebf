"""Expert parallelism of models in a loop of one's own: gradients and norm equal one process."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtron.config import Compile, Recompute
from dtron.errors import ConfigError
from dtron.models import build_model, model_config
from dtron.models.attention import BACKENDS
from dtron.parallelisms import ExpertLayers, Mesh, experts, parallelize
from tests.harness import run_ranks
from tests.parallelisms.test_plugin_context import compare, found_by, wanted_of

ROWS, DIM, EXPERTS = 8, 12, 4
HALF_COMPILED = {"compile": Compile(enable=True), "recompute": Recompute(mode="selective")}


class OwnExperts(nn.Module):
    """Two stacked matrices that are named as their author likes."""

    part = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(EXPERTS, 6, DIM))
        self.narrow = nn.Parameter(torch.randn(EXPERTS, DIM, 6))

    def own(self, name: str) -> Tensor:
        return getattr(self, name)

    def forward(self, rows: Tensor, offsets: Tensor, tail: bool = True) -> Tensor:
        assert not tail
        ends = [0, *offsets.tolist()]
        wide, narrow = self.own("wide"), self.own("narrow")
        parts = [
            F.relu(rows[a:b] @ wide[e].T) @ narrow[e].T
            for e, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        return torch.cat(parts)


class OwnModel(nn.Module):
    """A token's expert is the largest of its first elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.experts = OwnExperts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        chosen = x[:, :EXPERTS].argmax(-1)
        order = chosen.argsort(stable=True)
        offsets = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).int()
        out = self.experts(x[order], offsets, tail=False)
        return x + torch.zeros_like(out).index_copy(0, order, out)


def own_model() -> tuple[OwnModel, Tensor]:
    torch.manual_seed(0)
    return OwnModel(), torch.randn(ROWS, DIM)


def train_own(ep: int, etp: int) -> dict:
    mesh = Mesh(ep=ep, etp=etp)
    model, x = own_model()
    layers = ExpertLayers("experts", widths={"wide": 1, "narrow": 2})
    model = parallelize(model, mesh, units="inner", dtype="float32", experts=layers)
    part = x.chunk(mesh.size("dp_shard"))[mesh.rank("dp_shard")]
    model(part).square().sum().backward()
    return found_by(model, mesh)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (2, 2)])
def test_experts_of_ones_own(ep: int, etp: int) -> None:
    model, x = own_model()
    model(x).square().sum().backward()
    compare(run_ranks(4, train_own, ep, etp), wanted_of(model))


def mixture() -> tuple[nn.Module, Tensor]:
    override = {"n_layers": 2, "balance": "none", "balance_coefficient": 0.0}
    config = model_config("mixtral", "debug", override)
    model = build_model("mixtral", config, BACKENDS["math"])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return model, torch.randint(config.vocab_size, (4, 16), generator=generator)


def train_mixture() -> dict:
    mesh = Mesh(ep=2)
    model, tokens = mixture()
    layers = ExpertLayers("blocks.*.ffn.experts")
    parallelize(model, mesh, units="blocks.*", dtype="float32", experts=layers)
    part = tokens.chunk(2)[mesh.rank("dp_shard")]
    model(part).square().sum().backward()
    return found_by(model, mesh)


def packed(ep: int) -> int:
    """Gradients that FSDP packs, to reduce them."""
    model, tokens = mixture()
    layers = ExpertLayers("blocks.*.ffn.experts")
    parallelize(model, Mesh(ep=ep), units="blocks.*", dtype="float32", experts=layers)
    loss = model(tokens).square().sum()
    counted = Packed()
    with counted:
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return counted.gradients


class Packed(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.gradients = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("fsdp::chunk_cat"):  # of several dtypes since torch 2.15
            self.gradients += len(args[0])
        return func(*args, **(kwargs or {}))


def test_what_one_rank_has_alone_keeps_its_gradients() -> None:
    """Of four ranks two share each expert by ep = 2, none by ep = 4; of one, none anything."""
    model, _ = mixture()
    every = len(list(model.parameters()))
    stacked = len([name for name, _ in model.named_parameters() if "experts" in name])
    assert set(run_ranks(4, packed, 2)) == {every}
    assert set(run_ranks(4, packed, 4)) == {every - stacked}
    assert set(run_ranks(1, packed, 1)) == {0}


def test_mixture_in_a_loop_of_ones_own() -> None:
    model, tokens = mixture()
    model(tokens).square().sum().backward()
    compare(run_ranks(2, train_mixture), wanted_of(model))


def refused() -> list[str]:
    found = []
    tries: list[tuple[Mesh, dict]] = [
        (Mesh(ep=2), {"units": "inner"}),
        (Mesh(tp=2), {"units": "inner", "placements": {"experts": experts()}}),
        (Mesh(ep=2), {"units": "experts", "experts": ExpertLayers("experts")}),
        (Mesh(ep=2), {"units": "inner", "experts": ExpertLayers("experts")}),
        (Mesh(ep=2), {"units": "inner", "experts": ExpertLayers("experts"), **HALF_COMPILED}),
    ]
    for mesh, arguments in tries:
        with pytest.raises(ConfigError) as error:
            parallelize(OwnModel(), mesh, **arguments)
        found.append(str(error.value))
    return found


def test_experts_that_are_not_named_are_refused() -> None:
    ep, row, unit, width, compiled = run_ranks(2, refused)[0]
    assert width.startswith("experts.wide is a parameter of experts, but ExpertLayers.widths")
    assert compiled.startswith('recompute.mode = "selective" with compile.enable and parallel.ep x')
    assert ep.startswith("ep x etp = 2 needs `experts`, which names the stacked experts")
    assert row.startswith("`placements` has a row experts(), but")
    assert unit.startswith("units has experts, but FSDP gathers experts with the block")
