"""Low-rank adapters: train two narrow factors of a matrix, and freeze the matrix.

    y = W x + scale B A x       W (N, K) frozen, A (rank, K), B (N, rank)

The factors are parameters of the module that has W, so that they are sharded, gathered, saved and
drawn like all others: `lora_a` and `lora_b` of a linear layer; of a matrix of stacked experts, such
as `up`, `up_lora_a` (E, rank, K) and `up_lora_b` (E, N, rank). They are float32 like other
weights that are trained, and their products are in the dtype of computation, also where W is
multiplied in float8. Frozen weights are kept in the dtype of computation.

A's product with x is added to W x by a hook, before the hooks of tensor parallelism: of a weight
split by rows (colwise) B is split too, of one split by columns (rowwise) A is, and the other factor
is replicated. No collective is added to a forward or backward: the replicated factor's gradient is
a partial sum, which is reduced once per step (`placement.LOW_RANK`, `expert_parallel.WIDTHS`).

Saved for the backward: x, once for all layers that read it, and A x; a frozen W needs no x.

Sources: LoRA, arXiv:2106.09685; rank-stabilised scale, arXiv:2312.03732.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtron.config import Lora, RunConfig
from dtron.errors import nearest
from dtron.io.safetensors_file import Region
from dtron.kernels.grouped import grouped_matmul
from dtron.lora.dora import MAGNITUDE, local, rescale, rescaled
from dtron.models import ModelSpec, build_model, model_spec
from dtron.models.attention import BACKENDS
from dtron.models.config import DecoderConfig
from dtron.models.flops import FlopsModel
from dtron.models.router import routers
from dtron.parallelisms.placement import contains, present
from dtron.parallelisms.tensor.async_tp import Gathered, communicate

FACTORS = ("lora_a", "lora_b")
"""Ends of the FQNs of the factors A and B."""
ADAPTERS = (*FACTORS, MAGNITUDE)
"""Ends of the FQNs of all parameters of adapters."""
Initializer = Callable[[str, Tensor, torch.Generator], None]


def is_adapter(fqn: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return fqn.endswith(ADAPTERS)


def factors(weight: str) -> tuple[str, str]:
    """Return the FQNs of the factors A and B of the adapter of a weight with this FQN."""
    path, _, name = weight.rpartition(".")
    prefix = f"{path}." if name == "weight" else f"{weight}_"
    return f"{prefix}{FACTORS[0]}", f"{prefix}{FACTORS[1]}"


@dataclass(frozen=True)
class Adapted:
    """A matrix that can get an adapter."""

    weight: str
    """FQN of the weight."""
    shape: tuple[int, ...]
    """(N, K), or (E, N, K) of stacked experts."""

    @property
    def name(self) -> str:
        """FQN that patterns of `lora.modules` select: of the layer, or of the experts' matrix."""
        return self.weight.removesuffix(".weight")

    @property
    def magnitude(self) -> str:
        """FQN of the magnitudes of a linear layer, which it has with `lora.dora`."""
        return f"{self.name}.{MAGNITUDE}"

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""
        *experts, n, k = self.shape
        return (*experts, rank, k), (*experts, n, rank)

    def parameters(self, settings: Lora) -> dict[str, tuple[int, ...]]:
        """Return {FQN of a parameter of the adapter: its shape}: A, B and magnitudes, if any."""
        found = dict(zip(factors(self.weight), self.shapes(settings.rank), strict=True))
        if settings.dora and len(self.shape) == 2:
            found[self.magnitude] = self.shape[:1]
        return found

    def n_parameters(self, settings: Lora) -> int:
        """Count the elements of the adapter's parameters."""
        return sum(map(math.prod, self.parameters(settings).values()))


def adaptable(model: nn.Module, spec: ModelSpec) -> Iterator[Adapted]:
    """Yield the linear layers and matrices of experts of the layers that can get an adapter."""
    layers = spec.layer.format("*")
    for name, module in model.named_modules():
        if not contains(layers, name) or any(contains(pattern, name) for pattern in spec.gates):
            continue
        if isinstance(module, nn.Linear):
            yield Adapted(f"{name}.weight", tuple(module.weight.shape))
        elif hasattr(module, "adapt"):
            for matrix, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and not is_adapter(matrix):
                    yield Adapted(f"{name}.{matrix}", tuple(parameter.shape))


def chosen(model: nn.Module, spec: ModelSpec, settings: Lora) -> list[Adapted]:
    """Return the matrices that get an adapter, in the model's order; none without `lora.rank`."""
    if not settings.rank:
        return []
    return [each for each in adaptable(model, spec) if _selects(settings.modules, each.name)]


def _selects(patterns: Sequence[str], name: str) -> bool:
    return not patterns or any(contains(pattern, name) for pattern in patterns)


@functools.lru_cache(maxsize=8)  # a search of layouts asks for each
def _adaptable(name: str, model: DecoderConfig) -> tuple[Adapted, ...]:
    with torch.device("meta"):
        built = build_model(
            name, model.model_copy(update={"attention_dropout": 0.0}), BACKENDS["math"]
        )
    return tuple(adaptable(built, model_spec(name)))


def adapters(name: str, model: DecoderConfig, settings: Lora) -> list[Adapted]:
    """Return the matrices that get an adapter in the model `name`; none without `lora.rank`."""
    if not settings.rank:
        return []
    return [each for each in _adaptable(name, model) if _selects(settings.modules, each.name)]


def n_adapter_parameters(
    name: str, model: DecoderConfig, settings: Lora, active: bool = False
) -> int:
    """Count the parameters of all adapters.

    Args:
        active: count only the experts that process a token.
    """
    total = 0.0
    for each in adapters(name, model, settings):
        stacked = active and len(each.shape) == 3
        part = model.experts_per_token / model.n_experts if stacked else 1
        total += each.n_parameters(settings) * part
    return round(total)


def flops_model(config: RunConfig, model: DecoderConfig) -> FlopsModel:
    """Return the sizes that determine the FLOPs of a run's model, with adapters if it has any."""
    active = n_adapter_parameters(config.model.name, model, config.lora, active=True)
    return FlopsModel.of(model, active, config.data.span_lengths(config.train.seq_len))


def wrong_modules(name: str, model: DecoderConfig, settings: Lora) -> Iterator[str]:
    """Yield an error for each pattern of `lora.modules` that selects nothing."""
    names = [each.name for each in _adaptable(name, model)]
    if not names:
        yield f"lora.rank = {settings.rank}: no block of model.name = {name} has a linear layer"
        return
    for pattern in settings.modules:
        if not any(contains(pattern, each) for each in names):
            yield (
                f"lora.modules: {pattern!r} selects no linear layer and no experts of a block"
                f"{nearest(pattern, names)}; use names such as {names[0]}, in which * is one "
                "component, or of modules that contain them. Routers, embeddings, norms and the "
                "head have no adapters"
            )


def attach(
    model: nn.Module, spec: ModelSpec, settings: Lora, dtype: torch.dtype | None = None
) -> None:
    """Freeze an unsharded model, also the routers' biases, and give it adapters, in place.

    Call it after the conversion to float8, which replaces modules.

    Args:
        dtype: dtype in which frozen weights are kept, that of computation: without updates, a
            float32 copy has no use. None: as they are. Adapters keep the dtype of the weights.
    """
    model.requires_grad_(False)
    for router in routers([model]):
        router.bias_speed = 0.0
    for each in chosen(model, spec, settings):
        path, _, matrix = each.weight.rpartition(".")
        module, weight = model.get_submodule(path), model.get_parameter(each.weight)
        for fqn, shape in each.parameters(settings).items():
            made = nn.Parameter(weight.detach().new_empty(shape))
            module.register_parameter(fqn.rpartition(".")[2], made)
        module.lora_scale = settings.scale  # type: ignore[assignment]
        if matrix == "weight":
            module.register_forward_hook(_add_to_linear)
        else:
            module.adapt = _add_to_experts  # type: ignore[assignment]
    for parameter in model.parameters():
        if dtype is not None and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def conversion(
    convert: Callable[[nn.Module], None] | None,
    spec: ModelSpec,
    settings: Lora,
    dtype: torch.dtype,
) -> Callable[[nn.Module], None] | None:
    """Return the pass `Passes.convert`: `convert` (to float8) and then adapters, if any."""
    if not settings.rank:
        return convert

    def apply(model: nn.Module) -> None:
        if convert is not None:
            convert(model)
        attach(model, spec, settings, dtype)

    return apply


def train_from(embedding: str, stages: Iterable[nn.Module]) -> None:
    """Let gradients flow through all blocks, although the embedding (an FQN) is frozen.

    The first block's input then requires a gradient like those of all others, so that one compiled
    graph serves all, and so does what a first pipeline stage without adapters sends. Call it after
    sharding: FSDP would gather a module again whose output requires a gradient.
    """
    for stage in stages:
        found = present(dict(stage.named_modules()))
        if embedding in found:
            found[embedding].register_forward_hook(_require_gradient)


def _require_gradient(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    return out.requires_grad_() if torch.is_grad_enabled() and not out.requires_grad else out


def initializer(fill: Initializer) -> Initializer:
    """Return an initializer that draws A as nn.Linear does, B as zeros, and others with `fill`."""

    def filled(fqn: str, full: Tensor, generator: torch.Generator) -> None:
        if fqn.endswith(FACTORS[0]):
            bound = full.shape[-1] ** -0.5
            full.uniform_(-bound, bound, generator=generator)
        elif fqn.endswith(FACTORS[1]):
            full.zero_()
        elif fqn.endswith(MAGNITUDE):
            full.fill_(1.0)  # until `dora.start_magnitudes`, which needs the matrix
        else:
            fill(fqn, full, generator)

    return filled


def _add_to_linear(module: Any, args: tuple, out: Tensor) -> Tensor:
    """Add the adapter to the output (..., N) of a linear layer for x (..., K)."""
    x = args[0]
    if not isinstance(out, DTensor):
        return _adapted(module, x, out, False)
    # A rank's gradient of a replicated input is a partial sum, as that of the layer itself.
    placements = [Partial() if each == Replicate() else each for each in x.placements]
    shard = x.to_local(grad_placements=placements)
    added = _adapted(module, shard, out.to_local(), out.placements == (Partial(),))
    return DTensor.from_local(added, out.device_mesh, out.placements, run_check=False)


def _adapted(module: Any, x: Any, out: Tensor, partial: bool) -> Tensor:
    """Return the output (..., N) of a layer with its adapter, on local tensors.

    Args:
        x: (..., K); of linears that share a fused all-gather, a `Gathered`.
        partial: whether `out` is a partial sum over tp.
    """
    if isinstance(x, Gathered):
        x = x.shard
    narrow = F.linear(x, local(module.lora_a))
    if not partial and getattr(module, "role", None):  # the layer communicates by itself
        narrow = communicate(narrow, module)
    out = low_rank_sum(out, narrow, local(module.lora_b), module.lora_scale)
    return rescale(module, out, partial) if hasattr(module, MAGNITUDE) else out


def low_rank_sum(out: Tensor, narrow: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return out + scale narrow b^T: narrow = A x (..., rank), b (N, rank), out (..., N).

    One matmul adds to `out`. It is not among the operators whose results selective recomputation
    keeps, since it is cheap to repeat; so `out` is kept alone.
    """
    rows, narrow = out.flatten(0, -2).unsqueeze(0), narrow.flatten(0, -2).unsqueeze(0)
    return torch.baddbmm(rows, narrow, b.t().unsqueeze(0), alpha=scale).view(out.shape)


def _add_to_experts(experts: Any, name: str, x: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """Add the products of the adapters of a matrix to the experts' results: (R, K) -> (R, N)."""
    if not hasattr(experts, f"{name}_{FACTORS[0]}"):
        return out
    a, b = (experts.own(f"{name}_{factor}") for factor in FACTORS)
    narrow = grouped_matmul(x, a, offsets) * experts.lora_scale
    return out + grouped_matmul(narrow, b, offsets)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight (..., n, k) + scale b (..., n, rank) a (..., rank, k), also of a region.

    It is computed and returned in float32 at least.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + scale * (b.to(wide) @ a.to(wide))


def merging(
    read: Callable[[str, Region], Tensor], model: nn.Module, spec: ModelSpec, settings: Lora
) -> Callable[[str, Region], Tensor]:
    """Return a reader of regions of weights with their adapters merged.

    Args:
        read: (FQN, region) -> a region of a stored weight or factor.
        model: the unsharded model without adapters, on any device.
    """
    adapted = {each.weight: each for each in chosen(model, spec, settings)}

    def get(fqn: str, region: Region) -> Tensor:
        if fqn not in adapted:
            return read(fqn, region)
        *experts, n, k = region
        each, rank = adapted[fqn], slice(0, settings.rank)
        rescales = each.magnitude in each.parameters(settings)
        columns = slice(0, each.shape[-1]) if rescales else k  # a norm is that of a whole row
        a, b = factors(fqn)
        whole = merged(
            read(fqn, (*experts, n, columns)),
            read(a, (*experts, rank, columns)),
            read(b, (*experts, n, rank)),
            settings.scale,
        )
        return rescaled(whole, read(each.magnitude, (n,)))[:, k] if rescales else whole

    return get
