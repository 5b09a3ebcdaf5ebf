"""`fast_plan`: the settings of `parallelize` for a causal language model of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dtron.config import Compile
from dtron.errors import ConfigError, nearest
from dtron.float8 import RECIPES, convert, layer_names
from dtron.float8.convert import Choice
from dtron.float8.products import why_emulated
from dtron.huggingface.attention import NAME, pass_empty_mask
from dtron.huggingface.loss import give_labels_to_head
from dtron.parallelisms import (
    Mesh,
    ParallelPlan,
    Replicate,
    colwise,
    heads,
    prepare_input,
    replicate,
    rowwise,
)
from dtron.parallelisms.fsdp.sharding import DTYPES
from dtron.parallelisms.placement import Row, matches
from dtron.parallelisms.tensor.tensor_parallel import AnyRow
from dtron.setup.float8_plan import scale_groups
from dtron.training.loss import ChunkedLoss, VocabularyShard

_ROWS: dict[str, AnyRow] = {
    "colwise": colwise(),
    "rowwise": rowwise(),
    "embedding_rowwise": rowwise(),
    "colwise_gather_output": colwise(output=Replicate()),
    "colwise_rep": colwise(output=Replicate()),
    "replicated_with_grad_allreduce": heads(),
}
"""Styles of a transformers tp plan -> placement rules."""


def fast_plan(
    model: Any,
    mesh: Mesh,
    *,
    float8: str = "",
    loss_chunks: int = 8,
    compile: Compile = Compile(enable=True),
    convert: Callable[[nn.Module], None] | None = None,
    **fields: Any,
) -> ParallelPlan:
    """Return a plan that trains a causal language model of transformers fast.

        import dtron.huggingface                # registers attn_implementation="dtron"
        model = AutoModelForCausalLM.from_config(config, attn_implementation="dtron")
        model = parallelize(model, mesh, fast_plan(model, mesh))
        loss = model(tokens, labels=tokens, use_cache=False).loss

    Embedding, blocks and head are FSDP units; blocks are compiled; the model's tp plan gives the
    placements; and head and loss are computed in chunks, so that `loss` is all that a call with
    labels computes. A forward without attention_mask and position_ids makes no host wait.

    Args:
        model: a PreTrainedModel, unsharded.
        float8: a key of dtron.float8.RECIPES for the linear layers of the blocks; empty: none.
        loss_chunks: number of chunks of head and loss; 1: the model's own loss, with all logits.
        compile: how to compile blocks and loss; Compile(): not at all.
        convert: function that changes the unsharded model in place, after the conversion to float8.
        fields: other fields of ParallelPlan, which replace those of this plan.
    Raises:
        ConfigError: the model has no list of blocks or attention code of its own, its tp plan has
            an unknown style or lacks one, its head is no Linear without bias or is not sharded over
            tp, it has another loss, or the recipe is unknown.
    """
    _check_attention(model)
    passes = list[Callable[[nn.Module], None]]()
    if model.config._attn_implementation == NAME:
        passes.append(pass_empty_mask)
    plan = ParallelPlan(units=fields.get("units") or _units(model), compile=compile)
    if mesh.size("tp") > 1:
        plan = replace(plan, placements=fields.get("placements") or placements(model))
    if loss_chunks > 1:
        name, head = _head(model)
        if mesh.size("tp") > 1:
            _check_sharded(name, plan.placements or {})
        loss = ChunkedLoss(loss_chunks, _vocabulary(head, mesh), compile)
        plan = replace(plan, loss=(name, loss))
        passes.append(lambda model: give_labels_to_head(model, head))
    plan = replace(plan, **fields)
    if float8:
        blocks = plan.units if isinstance(plan.units, str) else _blocks(model)
        passes.append(_to_float8(blocks, float8, mesh, DTYPES[plan.dtype]))
    if convert is not None:
        passes.append(convert)

    def change(model: nn.Module) -> None:
        for each in passes:
            each(model)

    return replace(plan, convert=change)


def placements(model: Any) -> dict[Any, AnyRow]:
    """Return the placement rules of a model's tp plan; modules without a style are replicated.

    Raises:
        ConfigError: the model has no tp plan, a style is unknown, or parameters next to sharded
            layers have none.
    """
    styles = dict(model.tp_plan or {})
    if not styles:
        raise ConfigError(
            f"{type(model).__name__} has no tp plan; pass placements={{pattern: colwise(), ...}}"
        )
    rows: dict[Any, AnyRow] = {}
    for pattern, style in styles.items():
        if style not in _ROWS:
            raise ConfigError(
                f"{type(model).__name__} has tp style {style!r} for {pattern}, which has no "
                f"placement rule; pass placements={{...}}{nearest(style, _ROWS)}"
            )
        rows[pattern] = _ROWS[style]
    inputs = [pattern.rpartition(".")[0] for pattern, s in styles.items() if s == "colwise"]
    shared = tuple(dict.fromkeys(parent for parent in inputs if inputs.count(parent) > 1))
    if shared:  # several layers read one input: one all-reduce of its gradient
        rows[shared] = prepare_input(Replicate())
    if others := _uncovered(model, styles):
        for each in others:
            if any(f"{each}.".startswith(f"{parent}.") for parent in inputs if parent):
                raise ConfigError(
                    f"{type(model).__name__} has no tp style for {each}, among layers that are "
                    "sharded: its gradient may be a partial sum; pass placements={...}"
                )
        rows[others] = replicate()
    return rows


def _uncovered(model: nn.Module, patterns: Any) -> tuple[str, ...]:
    """Return patterns of the outermost modules that have parameters themselves and no style."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern in patterns or any(pattern.startswith(f"{outer}.") for outer in found):
            continue
        if next(module.parameters(recurse=False), None) is not None:
            found[pattern] = None
    return tuple(found)


def _units(model: Any) -> list[str]:
    """Return patterns of the FSDP units: embedding, blocks and head.

    The head's weight is then gathered while the last block computes, and its gradient reduced while
    the blocks' backward runs. A weight that both share is in the root unit.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    blocks = _blocks(model)
    if embedding is None or head is None or embedding.weight is head.weight:
        return [blocks]
    names = {module: name for name, module in model.named_modules()}
    return [names[embedding], blocks, names[head]]


def _blocks(model: nn.Module) -> str:
    """Return the pattern of the list of modules that has most of the parameters."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of blocks; pass units='PATTERN.*'")
    sizes = {name: sum(p.numel() for p in blocks.parameters()) for name, blocks in lists.items()}
    return f"{max(sizes, key=lambda name: sizes[name])}.*"


def _head(model: Any) -> tuple[str, nn.Linear]:
    """Return the FQN of the output embedding, and the module."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise ConfigError(
            f"the head of {type(model).__name__} is no Linear without bias; use loss_chunks=1"
        )
    return next(name for name, module in model.named_modules() if module is head), head


def _check_attention(model: Any) -> None:
    """Refuse attn_implementation = "dtron" if the model's code does not call it."""
    calls = getattr(model, "_can_set_attn_implementation", None)  # reads the model's source
    if model.config._attn_implementation == NAME and calls is not None and not calls():
        raise ConfigError(
            f'attn_implementation = "{NAME}": {type(model).__name__} computes attention in its own '
            'code; use "eager"'
        )


def _check_sharded(head: str, rules: Mapping[Any, AnyRow]) -> None:
    """Raise ConfigError if the head is not sharded by the vocabulary, as the loss needs over tp."""
    for patterns, rule in rules.items():
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            if matches(pattern, head) and isinstance(rule, Row) and rule.kind == "colwise":
                return
    raise ConfigError(f"{head} has no placement rule colwise(); add it, or use loss_chunks=1")


def _vocabulary(head: nn.Linear, mesh: Mesh) -> VocabularyShard | None:
    if mesh.size("tp") == 1:
        return None
    return VocabularyShard(head.out_features, mesh.rank("tp"), mesh.group("tp"))


def _to_float8(
    blocks: str, recipe: str, mesh: Mesh, dtype: torch.dtype
) -> Callable[[nn.Module], None]:
    if recipe not in RECIPES:
        known = ", ".join(RECIPES)
        raise ConfigError(f"float8 = {recipe!r} is not a recipe{nearest(recipe, RECIPES) or known}")
    row = RECIPES[recipe]
    emulate = bool(why_emulated(row, torch.device(mesh.device_type), dtype))

    def apply(model: nn.Module) -> None:
        convert(model, layer_names(model, Choice(blocks)), row, emulate, scale_groups(mesh))

    return apply
