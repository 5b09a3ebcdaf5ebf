"""One layout against one process: loss, every gradient, gradient norm and parameters after steps.

`parallel_run` goes through the code of the Trainer; `reference` is plain PyTorch, which
test_reference.py compares with transformers. The rule, per tensor g of the parallel run:

    ||g - g_ref|| <= 1e-5 * max(||g_ref||, 1e-3 * ||all g_ref|| / sqrt(number of tensors))

in float32, 1e-10 in float64. A deviation is the left side over the right one's max(...). Loads of
experts are equal.

float8: one process runs the same recipe over the same micro-batches. In float32 two summation
orders round a few elements to another float8 number, so equality is shown in float64, where none
does. Recipes whose scales follow a rank's own tokens or columns are not equal under cp and tp:
there gradients are as far from those without float8, in dB, as one process's are, within 1 dB.

Moments in bfloat16: one process keeps them so too, over whole parameters. For the same reason these
cases are float64; tests/kernels/test_adamw.py compares the update itself with torch's. Muon too:
its Newton-Schulz in bfloat16 turns a difference in the last bit of float32 into one of bfloat16,
so that float64 models take float64 there. Lion too: a sign may differ where a gradient is nearly 0.
"""

import functools
import hashlib
import itertools
import json
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtron.config import (
    Compile,
    Data,
    Float8,
    Lora,
    Model,
    Optim,
    Parallel,
    Recompute,
    RunConfig,
    Train,
)
from dtron.data import Batch, TrainingSource
from dtron.data.best_fit_packing import PackedGroups, count_sequences
from dtron.data.corpus.document_index import DocumentIndex, Documents, documents_of
from dtron.data.loader import stacked
from dtron.data.packing import CutDocuments, Shuffled
from dtron.float8 import RECIPES, convert
from dtron.float8.delayed import DelayedScales
from dtron.float8.experts import convert_experts
from dtron.io.filesystem import write_atomically
from dtron.kernels.float8_rows import packed, unpacked
from dtron.lora.adapters import attach, conversion, train_from
from dtron.lora.dora import MAGNITUDE
from dtron.models import MODELS, AttentionNeeds, Backend, DecoderConfig, build_model, choose_backend
from dtron.models.dropout import token_keys
from dtron.models.moe import Experts
from dtron.models.router import Router, routers, update_expert_bias
from dtron.parallelisms import Mesh
from dtron.parallelisms.apply import Applied, Passes, apply_passes, build_execution
from dtron.parallelisms.context.apply import Context
from dtron.parallelisms.expert.expert_parallel import ExpertLayers
from dtron.parallelisms.fsdp.sharding import DTYPES, Policy
from dtron.parallelisms.gradients import clip_scale
from dtron.parallelisms.initialize import Initializer, initialize
from dtron.parallelisms.mesh import BATCH_AXES, SHARE_AXES
from dtron.parallelisms.pipeline.executor import Layout
from dtron.setup.float8_plan import Float8Plan
from dtron.setup.preflight import ModelSetup
from dtron.setup.rules import ModelCandidate, all_broken, check_layout, resolve
from dtron.training.batches import shard_batch
from dtron.training.build import build_run
from dtron.training.loss import ChunkedLoss, VocabularyShard, losses_from_head, sequence_losses
from dtron.training.optim import build_optimizer, update
from dtron.training.step import LossFunction, ParallelModel, TrainStep, evaluate
from tests.harness import run_ranks

MAX_NORM, SEED = 0.05, 7  # the norm is far above MAX_NORM, so that clipping acts
OPTIMIZERS = {
    "sgd": Optim(name="sgd", lr=0.5),
    # eps of the size of gradients: where one is nearly 0, m / sqrt(v) would be rounding
    "adamw": Optim(name="adamw", lr=0.02, eps=1e-4, weight_decay=0.3),
    "narrow_adamw": Optim(
        name="adamw", lr=0.02, eps=1e-4, weight_decay=0.3, moments="bfloat16", beta2=0.95
    ),
    "muon": Optim(name="muon", lr=0.02, eps=1e-4, weight_decay=0.3),
    "lion": Optim(name="lion", lr=0.002, weight_decay=0.3),
}
_OWN = {"narrow_adamw", "muon", "lion"}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
FIGURE = 1e-6
"""Deviations of logged figures up to this count as 0: routers log float32, whatever the model
computes in."""
NARROW = 2**-7
"""Of sums of gradients in bfloat16, which rounds each addend and each sum by at most 2^-9."""
NEWTON_SCHULZ = 3.4445
"""Muon's first coefficient, by which an iteration multiplies small singular values, and with them
what rounding added."""
DECIBELS = 1.0
MIXTURES = [name for name, spec in MODELS.items() if spec.sizes["debug"].n_experts]
VISION = [name for name, spec in MODELS.items() if spec.sizes["debug"].vision_layers]
"""Families with a vision encoder."""
ENCODERS = [name for name, spec in MODELS.items() if spec.sizes["debug"].encoder_layers]
"""Families with an encoder before a decoder."""
DENSE = [name for name in MODELS if name not in (*MIXTURES, *VISION, *ENCODERS)]
"""Decoders, or encoders, without experts and vision encoder."""
SMALL = {"n_layers": 5, "vocab_size": 67, "dim": 24, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40}
EXPERTS = {
    "ffn_dim": 0,
    "n_experts": 8,
    "experts_per_token": 3,
    "expert_dim": 16,
    "balance_coefficient": 0.5,
}
LIMITED = {"capacity_factor": 1.0}
MTP = {"n_layers": 3, "mtp": 2}
SINKHORN = {
    **{"router": "sinkhorn", "renormalize": False, "bias_speed": 0.0},
    **{"n_groups": 1, "top_groups": 1},
}
"""The router in any mixture."""
N_SOURCES = 3
# Here, which ranks have loaded: an import of test_parity chooses cases for seconds, in each rank.
FULL, SELECTIVE = Recompute(mode="full"), Recompute(mode="selective")
EAGER = Compile(enable=True, backend="aot_eager")
DELAYED = {"float8": {"scaling": "delayed", "amax_history": 2}, "steps": 4}
"""Keys of `float8` for scales of earlier steps."""
LATENT8 = {
    **{"head_dim": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "nope_head_dim": 16},
    **{"rope_head_dim": 16, "v_head_dim": 16, "expert_dim": 32, "first_dense_layers": 1},
}
"""Latent attention whose layers can all be float8."""
DELTA = {
    **{"delta_key_heads": 4, "delta_value_heads": 8, "delta_key_dim": 4, "delta_value_dim": 6},
    **{"full_attention_every": 2, "norm_eps": 1e-3},
}
SPANS: dict[str, Any] = {"mask_fraction": 0.75, "mask_span": 4.0}
"""Of 16 tokens of text a decoder reads 16, and an encoder 8."""
SIZES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": {**SMALL, "head_dim": 8},
    "qwen3_5": {**SMALL, **DELTA, "head_dim": 8},
    "gemma3": {
        **{**SMALL, "head_dim": 8, "query_pre_attn_scalar": 12, "logit_softcap": 3.0},
        **{"window": 5, "full_attention_every": 2, "rope_local_theta": 50.0},
    },
    "gemma4": {
        **{**SMALL, "head_dim": 8, "global_head_dim": 12, "global_kv_heads": 1},
        **{"window": 5, "full_attention_every": 2, "rope_local_theta": 50.0},
        # the next norm divides a layer's scalar out again: with a small epsilon its gradient would
        # be float32's rounding alone
        **{"rope_global_fraction": 0.5, "logit_softcap": 3.0, "norm_eps": 0.3},
    },
    "gpt": {**SMALL, "n_kv_heads": 4, "max_seq_len": 16},
    "bert": {**SMALL, "vocab_size": 72, "n_kv_heads": 4, "max_seq_len": 16},
    "t5": {
        **{**SMALL, "n_kv_heads": 4, "head_dim": 6, "encoder_layers": 2},
        **{"relative_buckets": 8, "relative_distance": 12},
    },
    "mixtral": {**SMALL, **EXPERTS},
    "qwen3_moe": {**SMALL, **EXPERTS, "head_dim": 8},
    "qwen3_5_moe": {**SMALL, **EXPERTS, **DELTA, "head_dim": 8},
    "deepseek_v3": {
        **SMALL,
        **EXPERTS,
        "n_kv_heads": 4,
        "ffn_dim": 40,
        "first_dense_layers": 2,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
        "nope_head_dim": 6,
        "rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "gpt_oss": {**SMALL, **EXPERTS, "head_dim": 8, "window": 5},
    "nemotron_h": {
        **{**SMALL, **EXPERTS, "ffn_dim": 40, "head_dim": 8, "layer_pattern": "ME*-M"},
        **{"mamba_heads": 8, "mamba_groups": 4, "mamba_head_dim": 6, "mamba_state_dim": 5},
        "norm_eps": 1e-3,
    },
    "llava": {
        **SMALL,
        **{"vision_layers": 2, "vision_dim": 24, "vision_heads": 4, "vision_ffn_dim": 40},
        **{"vision_image_size": 9, "vision_patch_size": 4, "image_token": 5},
    },
}


@dataclass(frozen=True)
class Case:
    """What is compared with one process."""

    model: str
    world: int = 1
    parallel: Parallel = Parallel()
    recompute: Recompute = Recompute()
    compile: Compile = Compile()
    override: dict = field(default_factory=dict)
    """Fields of the model's config that replace those of SIZES."""
    dtype: str = "float32"
    sequences: int = 0
    """Sequences a step, over all ranks and micro-batches. 0: as many as give a rank a first, a
    middle and a last micro-batch, and a pipeline two micro-batches a rank of it."""
    micro_batch: int = 1
    loss_chunks: int = 1
    seq_len: int = 16
    documents: bool = False
    padded: bool = False
    """Rows end in padding, each in another number of tokens, some in none."""
    packing: Literal["", "cut", "best_fit", "pad"] = ""
    """Rows are documents of 1 to T + 3 tokens, packed as in training; empty: random tokens."""
    steps: int = 2
    """Then validation is compared too, unless there is one step or blocks are compiled."""
    optimizer: Literal["sgd", "adamw", "narrow_adamw", "muon", "lion"] = "sgd"
    float8: Float8 = Float8()
    lora: Lora = Lora()

    def __post_init__(self) -> None:
        if not self.sequences:
            parallel = self.parallel
            data_ranks = max(1, self.world // (parallel.pp * parallel.cp * parallel.tp))
            number = 2 * parallel.pp if parallel.pp > 1 else 3
            object.__setattr__(self, "sequences", number * data_ranks * self.micro_batch)

    @property
    def rounds_alike(self) -> bool:
        """Whether float8 rounds as in one process: it shares scales, or no tensor is split."""
        recipe, parallel = self.float8.recipe, self.parallel
        if self.recompute.ffn_chunks > 1 and recipe in ("tensorwise", "blockwise"):
            return False  # scales of a chunk
        if self.float8.experts and parallel.etp > 1:
            return False
        return not recipe or RECIPES[recipe].shares_scales or parallel.tp == parallel.cp == 1

    def tolerance(self, name: str) -> float:
        """Of a deviation: AdamW's kernel takes float32 factors, so that what comes after an update
        is as near as that."""
        if not self.rounds_alike:
            return DECIBELS
        unreduced = name in ("loss 0", "sources 0")
        if self.parallel.reduce_dtype == "bfloat16" and not unreduced:
            muon = self.optimizer == "muon" and not name.startswith("gradient")
            return NARROW * (NEWTON_SCHULZ if muon else 1)
        before = unreduced or name.startswith("gradient") or name == "norm 0"
        return TOLERANCE[self.dtype if self.optimizer == "sgd" or before else "float32"]

    def __str__(self) -> str:
        """Model, ranks, and what differs from the defaults."""
        shown = [self.model, str(self.world)]
        for section in (self.parallel, self.recompute, self.compile, self.float8, self.lora):
            for key, value in section.model_dump(exclude_defaults=True).items():
                text = Path(value).name if isinstance(value, str) else value
                shown.append(f"{key}={text}".replace(" ", ""))
        shown += [f"{key}={value}" for key, value in self.override.items()]
        keys = (
            "dtype",
            "sequences",
            "micro_batch",
            "loss_chunks",
            "seq_len",
            "documents",
            "padded",
            "packing",
            "steps",
            "optimizer",
        )
        for key in keys:
            if (value := getattr(self, key)) != Case.__dataclass_fields__[key].default:
                shown.append(f"{key}={value}")
        return "-".join(shown)

    def config(self) -> RunConfig:
        """The run that a user would write."""
        return RunConfig(
            model=Model(name=self.model, override={**SIZES[self.model], **self.override}),
            parallel=self.parallel,
            train=Train(
                seq_len=self.seq_len,
                global_batch=self.sequences,
                micro_batch=self.micro_batch,
                loss_chunks=self.loss_chunks,
                dtype="float32",  # float64 is not for users
                max_grad_norm=MAX_NORM,
                seed=SEED,
            ),
            data=Data(
                mask_documents=self.documents,
                packing=self.packing or "cut",
                **(SPANS if self.model in ENCODERS else {}),
            ),
            optim=OPTIMIZERS[self.optimizer],
            recompute=self.recompute,
            compile=self.compile,
            float8=self.float8,
            lora=self.lora,
        )

    def plan(self) -> Float8Plan | None:
        """The float8 layers."""
        return resolve(self.config(), self.world)[-1]

    def resolved(self) -> tuple[DecoderConfig, Layout | None]:
        """The model and its pipeline, by the checks that a user meets.

        Raises:
            ConfigError: this is refused.
        """
        return check_layout(self.config(), self.world)

    def refusal(self) -> str:
        """The first rule that refuses this, before any process starts; empty if none does."""
        return next(all_broken(ModelCandidate(self.config(), self.world)), "")


def float8(recipe: str, world: int, parallel: Parallel, model: str = "llama", **more: Any) -> Case:
    """A case whose layers, and their parts under tp, have dims that are multiples of 16."""
    override = {"dim": 32, "head_dim": 16, "ffn_dim": 64, "n_layers": 2, **more.pop("override", {})}
    kept = {"dtype": "float64", "seq_len": 32, "sequences": 4, **more}
    settings = Float8(recipe=recipe, **kept.pop("float8", {}))  # type: ignore[arg-type]
    return Case(model, world, parallel, override=override, float8=settings, **kept)


def rows_of(case: Case) -> dict[str, set[str]]:
    """What a case takes of every table that users choose from."""
    parallel, degrees = case.parallel, case.config().degrees(case.world)
    axes = degrees | {"ep": parallel.ep, "etp": parallel.etp}
    return {
        "axis": {axis for axis, ranks in axes.items() if ranks > 1},
        "model": {case.model},
        "schedule": {str(parallel.schedule)} if parallel.pp > 1 else set(),
        "cp_method": set(parallel.cp_methods()) if parallel.cp > 1 else set(),
        "dispatcher": {parallel.dispatcher} if parallel.ep > 1 else set(),
        "recipe": {case.float8.recipe},
        "recompute": {case.recompute.mode},
        "recompute.modules": set(case.recompute.modules),
        "recompute.ffn_chunks": {"chunks"} if case.recompute.ffn_chunks > 1 else set(),
        "packing": {case.packing},
        "optimizer": {case.optimizer},
        "lora": {"lora"} if case.lora.rank else set(),
    }


def build(case: Case, config: DecoderConfig, device_type: str = "cpu") -> nn.Module:
    """The unsharded model, its weights on the current default device and not yet drawn."""
    model = build_model(case.model, config, attention_of(case, config, device_type))
    return model.double() if case.dtype == "float64" else model


def attention_of(case: Case, config: DecoderConfig, device_type: str) -> Backend:
    """The attention that a run of this case would choose; float64 takes float32's."""
    needs = AttentionNeeds.of(
        config,
        device_type,
        torch.bfloat16 if case.dtype == "bfloat16" else torch.float32,
        documents=case.documents,
        context=case.parallel.cp_methods() if case.parallel.cp > 1 else (),
    )
    return choose_backend("auto", needs)


def initializer(case: Case, config: DecoderConfig) -> Initializer:
    """Weights under which a mistake shows: attention is far from uniform, gradients of all layers
    are of one magnitude, no gain is 1 and no bias 0; larger biases would make all tokens alike.
    Drawn on the host, so that GPUs have the same."""

    def fill(fqn: str, full: Tensor, generator: torch.Generator) -> None:
        generator = torch.Generator().manual_seed(generator.initial_seed())
        drawn = torch.zeros(full.shape, dtype=full.dtype)
        MODELS[case.model].init_parameter(config, fqn, drawn, generator)
        if full.dim() > 1 and not fqn.endswith("bias"):  # experts' biases have two dims
            drawn.mul_(4)
        elif fqn.endswith(MAGNITUDE):
            drawn.uniform_(0.5, 1.5, generator=generator)
        else:
            noise = torch.randn(full.shape, dtype=full.dtype, generator=generator)
            drawn.add_(noise, alpha=0.01 if fqn.endswith("bias") else 0.1)
        full.copy_(drawn)

    return fill


def make_batch(case: Case, rows: range, step: int) -> Batch:
    """Sequences `rows` of a step.

    Labels are missing unevenly, in some sequences all of them, so that a mean of means would
    differ.
    """
    shape = (case.sequences, case.seq_len)
    vocabulary = {**SIZES[case.model], **case.override}["vocab_size"]
    if case.packing:
        source = packed_documents(case.packing, case.documents, case.seq_len, vocabulary)
        first = step * case.sequences
        batch = stacked(source.sequence, range(first + rows.start, first + rows.stop))
        return mixed(with_encoder(case, with_images(case, batch)))
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    labels = torch.randint(vocabulary, shape, generator=generator)
    sequence = torch.arange(case.sequences)[:, None]
    index = torch.arange(case.seq_len)
    labels[index < 2 * sequence % (case.seq_len + 1)] = -100
    part = slice(rows.start, rows.stop)
    documents = positions = None
    if case.documents:
        start = 3 + sequence % (case.seq_len - 3)  # of the second document
        documents = (index >= start).int()[part]
        positions = (index - (index >= start) * start)[part]
    pieces = None
    if case.padded:
        filled = case.seq_len - 5 * sequence % (case.seq_len - 2)
        labels[index >= filled - 1] = -100
        pieces = torch.where(index < filled, 0, -1).int()[part]
        if documents is not None:
            documents, pieces = documents - pieces * 2, torch.where(pieces < 0, -1, documents)
    number = sequence[:, 0] + step * case.sequences
    batch = Batch(tokens[part], labels[part], number[part], positions, documents)
    return mixed(with_encoder(case, with_images(case, replace(batch, pieces=pieces))))


def with_encoder(case: Case, batch: Batch) -> Batch:
    """The batch with tokens of an encoder, for a family that has one, and as prepared for it."""
    if case.model not in ENCODERS:
        return batch
    length = Data(**SPANS).span_lengths(case.seq_len).encoder
    vocabulary = {**SIZES[case.model], **case.override}["vocab_size"]
    generators = [torch.Generator().manual_seed(n) for n in batch.sequence.tolist()]
    rows = [torch.randint(vocabulary, (length,), generator=each) for each in generators]
    return replace(batch, encoder_tokens=torch.stack(rows), pieces=None)


IMAGES = ((1, range(4)), (9, range(1, 4)))
"""First token of a sequence that is of an image, and which tokens of the image follow."""


def with_images(case: Case, batch: Batch) -> Batch:
    """The batch with images, for a family that reads them: no, one or two of each sequence.

    They are at IMAGES. Some sequences have another one, which no token reads.
    """
    if case.model not in VISION:
        return batch
    index = torch.full((*batch.tokens.shape, 2), -1)
    images = []
    for row, number in enumerate(batch.sequence.tolist()):
        generator = torch.Generator().manual_seed(number)
        shown = [place for place in IMAGES if place[0] + len(place[1]) <= case.seq_len]
        for first, tokens in shown[: number % 3]:
            place = torch.tensor([[len(images), token] for token in tokens])
            index[row, first : first + len(tokens)] = place
            images.append(torch.randint(256, (3, 9, 9), generator=generator, dtype=torch.uint8))
        if number % 4 == 3:
            images.append(torch.zeros(3, 9, 9, dtype=torch.uint8))
    if images:
        batch = replace(batch, images=torch.stack(images), image_index=index)
    return batch.with_images(9)


def further_arguments(batch: Batch) -> dict[str, Tensor]:
    """What else a model reads: images, or the tokens of an encoder."""
    names = ("images", "image_index", "encoder_tokens")
    found = {name: getattr(batch, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def mixed(batch: Batch) -> Batch:
    """The batch, its rows from the sources of a mixture in turn, but not evenly."""
    sources = batch.sequence * 7 // 3 % N_SOURCES
    return replace(batch, sources=sources[:, None] == torch.arange(N_SOURCES))


def sums_by_source(losses: Tensor, batch: Batch) -> Tensor:
    """float64 (2, S): losses (B,) and numbers of labels of a batch's rows, summed one by one."""
    found = torch.zeros(2, N_SOURCES, dtype=torch.float64)
    assert batch.sources is not None
    for loss, labels, source in zip(losses, batch.labels, batch.sources, strict=True):
        n = (labels != -100).sum().item()
        found[:, source.cpu()] += torch.tensor([[loss.item()], [n]], dtype=torch.float64)
    return found


@functools.cache
def packed_documents(packing: str, masked: bool, seq_len: int, vocabulary: int) -> TrainingSource:
    """Documents of one token (EOS, which is 0), of a few, of a sequence and of more than one."""
    lengths = np.tile([1, 1, seq_len + 3, 2, 5, 1, seq_len - 1, 7, seq_len, 3], 10)
    offsets = np.concatenate([[0], lengths.cumsum()])
    tokens = np.random.default_rng(SEED).integers(1, vocabulary, offsets[-1])
    tokens[offsets[1:] - 1] = 0
    index = DocumentsInMemory(documents_of(offsets))
    settings = {"seq_len": seq_len, "mask_documents": masked}
    if packing == "cut":
        return Shuffled(CutDocuments(tokens, index, **settings), SEED)
    counts = count_sequences(index, seq_len, packing)
    plan = PackedGroups(tokens, index, counts, packing=packing, eos_id=0, **settings)
    return Shuffled(plan, SEED)


class DocumentsInMemory(DocumentIndex):
    """The index of one group of documents, without a file."""

    def __init__(self, documents: Documents) -> None:
        super().__init__(Path("nowhere"), np.array([[len(documents), documents.tokens], [0, 0]]))
        self._documents = documents

    def group(self, number: int) -> Documents:
        return self._documents


def shallow(case: Case) -> Case:
    """Without a pipeline, a first, a middle and a last layer, unless layers differ."""
    if case.parallel.pp > 1 or not isinstance(case.parallel.cp_method, str):
        return case
    if "layer_pattern" in SIZES[case.model]:
        return case
    dense = {**SIZES[case.model], **case.override}.get("first_dense_layers", 0)
    return replace(case, override={"n_layers": 3 + dense, **case.override})


def reference(case: Case, device_type: str = "cpu") -> dict[str, Any]:
    """Plain PyTorch in one process: the whole batch at once, SGD, torch's own clipping.

    float8 and experts take the micro-batches one by one, since scales and loads belong to one.
    Results are on the host, whatever the device.
    """
    elsewhere = {"all_gather": False, "gather_inputs": False, "dispatch": False}
    float8 = case.float8.model_copy(update=elsewhere)
    alone = replace(case, world=1, parallel=Parallel(), loss_chunks=1, float8=float8)
    alone = replace(alone, recompute=Recompute(), compile=Compile())
    if not by_micro_batch(case):
        alone = replace(alone, micro_batch=1)
    elif case.resolved()[0].balance == "global_batch":  # what all ranks compute at once
        degrees = case.config().degrees(case.world)
        ranks = degrees["dp_replicate"] * degrees["dp_shard"]
        alone = replace(alone, micro_batch=case.micro_batch * ranks)
    key = f"{alone} {case.float8.dispatch} {device_type}"
    if key not in _REFERENCES:
        _REFERENCES[key] = _reference(alone, case.float8.dispatch, torch.device(device_type))
    return _REFERENCES[key]


_REFERENCES: dict[str, dict[str, Any]] = {}


def carried(rows: Tensor) -> Tensor:
    """Cast to float8 as on the wire, and back."""
    return unpacked(packed(rows), rows.shape[1], rows.dtype)


class _Rows(torch.autograd.Function):
    """Cast forward; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return carried(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Results(torch.autograd.Function):
    """Results pass; their gradients are cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return carried(gradients[0])


def casting(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Experts that cast what they get themselves: what float8 dispatch is to equal."""

    def cast(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _Results.apply(compute(_Rows.apply(rows), *args, **kwargs))  # type: ignore[return-value]

    return cast


def by_micro_batch(case: Case) -> bool:
    """Whether results depend on which sequences make a micro-batch."""
    return bool(case.float8.recipe or case.resolved()[0].n_experts)


def _reference(case: Case, casts: bool, device: torch.device) -> dict[str, Any]:
    """
    Args:
        casts: experts cast what they get to float8 and back, as where it travels so.
    """
    torch.set_num_threads(1)
    config, _ = case.resolved()
    model = build(case, config, device.type)
    if (float8 := case.plan()) is not None:
        convert(model, float8.layers, float8.recipe, emulate=True)
        convert_experts(model, float8.experts, emulate=True)
    if case.lora.rank:
        attach(model, MODELS[case.model], case.lora)
    initialize(model, SEED, initializer(case, config))
    model.to(device)
    for module in model.modules() if casts else ():
        if isinstance(module, Experts):
            module.forward = casting(module.forward)  # type: ignore[method-assign]
    scales: DelayedScales | None = None
    if float8 is not None and float8.settings.scaling == "delayed":
        layers = {name: model.get_submodule(name) for name in float8.layers}
        scales = DelayedScales(layers, float8.settings.amax_history, None)  # type: ignore[arg-type]
    optimizer = _torch_optimizer(case, model)
    losses, norms, gradients, loads, figures, sources = [], [], {}, [], [], []
    at_once = case.micro_batch if by_micro_batch(case) else case.sequences
    for router in (found := routers([model])):
        router.loss_divisor.fill_(case.sequences / at_once)
    for step in range(case.steps):
        whole_batch = make_batch(case, range(case.sequences), step)
        n_valid = (whole_batch.labels != -100).sum().item()
        n_mtp = (_mtp_targets(whole_batch, config.mtp)[1] != -100).sum((0, 1)).tolist()
        optimizer.zero_grad()
        losses.append(0.0)
        sources.append(torch.zeros(2, N_SOURCES, dtype=torch.float64))
        for first in range(0, case.sequences, at_once):
            batch = make_batch(case, range(first, first + at_once), step)
            ahead, labels = (x.to(device) for x in _mtp_targets(batch, config.mtp))
            batch, keys = batch.to(device.type), None
            if config.draws:
                index = torch.arange(case.seq_len, device=device)
                keys = token_keys(SEED, step, batch.sequence, index)
            inputs = (batch.tokens, batch.positions, batch.documents, keys)
            others = {} if batch.pieces is None else {"real": batch.pieces >= 0}
            others |= {"mtp_tokens": ahead} if config.mtp else {}
            others |= further_arguments(batch)
            outputs = model(*inputs, **others)
            outputs = outputs if config.mtp else (outputs,)
            each = sequence_losses(outputs[0], batch.labels)
            sources[-1] += sums_by_source(each.detach(), batch)
            loss = each.sum() / n_valid
            losses[-1] += loss.item()
            for i, n in enumerate(n_mtp):
                mean = sequence_losses(outputs[1 + i], labels[..., i]).sum() / n
                losses[-1] += mean.item() / config.mtp
                loss = loss + config.mtp_coefficient / config.mtp * mean
            loss.backward()
        if step == 0:
            gradients = {k: on_host(p.grad) for k, p in trained(model)}  # type: ignore[arg-type]
        norms.append(_clip_and_update(case, model, optimizer))
        if scales is not None:
            scales.update()
        n_batches = len(range(0, case.sequences, at_once))
        figures.append([_mean_loss(found, i) / n_batches for i in range(2)])
        loads += update_expert_bias(found).tolist() if found else []
    assert min(norms) > MAX_NORM, f"clipping does not act: {norms}"
    parameters = {k: on_host(p.detach()) for k, p in trained(model)}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": parameters,
        "loads": _by_router([model], loads),
        "figures": figures,
        "sources": sources,
        "validation": _validation_loss(case, model, at_once, device),
    }


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are not frozen."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _torch_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """torch's own, over whole parameters; dtron's where torch lacks it: narrow moments, Lion,
    Newton-Schulz in float64 (tests/training/test_optim.py compares these)."""
    options = OPTIMIZERS[case.optimizer]
    if case.optimizer in _OWN:
        hidden = MODELS[case.model].is_hidden_matrix
        return build_optimizer(model.named_parameters(), options, hidden)
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=options.lr)
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in trained(model):
        groups[parameter.dim() > 1 and not name.endswith("bias")].append(parameter)
    return torch.optim.AdamW(
        [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def _clip_and_update(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Returns the norm of all gradients before."""
    options = OPTIMIZERS[case.optimizer]
    if case.optimizer in _OWN:  # the same float32 factors: else moments round differently
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        update(optimizer, clip_scale(norm, MAX_NORM), options.lr)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return norm.item()


def _mean_loss(found: Sequence[Router], i: int) -> float:
    """Mean over layers of the routers' i-th loss, summed over micro-batches."""
    return float(torch.stack([router.losses[i] for router in found]).mean()) if found else 0.0


@torch.no_grad()
def _validation_loss(case: Case, model: nn.Module, at_once: int, device: torch.device) -> float:
    """Mean loss of the step after the last."""
    model.eval()
    total = n_valid = 0.0
    for first in range(0, case.sequences, at_once):
        batch = make_batch(case, range(first, first + at_once), case.steps).to(device.type)
        others = {} if batch.pieces is None else {"real": batch.pieces >= 0}
        others |= further_arguments(batch)
        logits = model(batch.tokens, batch.positions, batch.documents, **others)
        total += sequence_losses(logits, batch.labels).sum().item()
        n_valid += (batch.labels != -100).sum().item()
    return total / max(n_valid, 1)  # 0 where nothing is labelled, as a run logs it


def on_host(tensor: Tensor) -> Tensor:
    """A copy."""
    return tensor.to("cpu", copy=True)


def _mtp_targets(batch: Batch, n: int) -> tuple[Tensor, Tensor]:
    """The tokens 1 ... n ahead and their labels, int64 (B, T, n), one by one."""
    rows, length = batch.tokens.shape
    tokens = batch.tokens.unsqueeze(-1).repeat(1, 1, n)
    labels = torch.full((rows, length, n), -100)
    for row, i, k in itertools.product(range(rows), range(length), range(n)):
        if (there := i + k + 1) >= length:
            continue
        assert not isinstance(batch.documents, Mapping), "sequences are whole"
        borders = [x for x in (batch.documents, batch.pieces) if x is not None]
        if all(numbers[row, there] == numbers[row, i] for numbers in borders):
            tokens[row, i, k] = batch.tokens[row, there]
            labels[row, i, k] = batch.labels[row, there]
    return tokens, labels


def _by_router(parts: Iterable[nn.Module], loads: list[list[int]]) -> dict[str, list[list[int]]]:
    """Loads of the experts in each step, by the router's FQN.

    Args:
        loads: of all routers in order, step after step.
    """
    modules = (named for part in parts for named in part.named_modules())
    names = [name for name, module in modules if isinstance(module, Router)]
    return {name: loads[i :: len(names)] for i, name in enumerate(names)}


class RecordingStep(TrainStep):
    """A TrainStep that keeps the complete gradients of the first step."""

    gradients: dict[str, Tensor]

    def accumulate(self, batches: Sequence[Batch], step: int | Tensor) -> Tensor:
        loss = super().accumulate(batches, step)
        if isinstance(step, int) and step == 0:
            self.gradients = whole(self.model.applied, [p.grad for p in self.parameters])  # type: ignore[misc]
        return loss


def parallel_run(case: Case, mesh: Mesh | None = None) -> dict[str, Any]:
    """The same on one rank of `case.world`, as the Trainer does it.

    Args:
        mesh: of the case, where several share one.
    """
    config, layout = case.resolved()
    mesh = mesh_of(case) if mesh is None else mesh
    applied = build_parallel(case, config, layout, mesh)
    model = connect(case, applied, config, layout, mesh)
    setup = ModelSetup(config, attention_of(case, config, mesh.device_type), layout, case.plan())
    run = build_run(case.config(), setup, model, step=RecordingStep)
    train_step, routing = run.step, run.routing
    assert isinstance(train_step, RecordingStep)
    if train_step.after_update is not None:  # of the weights that were drawn, as the Trainer does
        train_step.after_update(None)
    losses, norms, loads, figures, sources = [], [], [], [], []
    for step in range(case.steps):
        lr = case.config().optim.lr
        result = train_step(micro_batches(case, mesh, step, config.mtp), step, lr)
        both = result.loss + result.mtp_loss
        sums = torch.cat([both.view(1), result.by_source.flatten()])
        dist.all_reduce(sums, group=mesh.group(*SHARE_AXES))
        losses.append(sums[0].item())
        sources.append(sums[1:].view(2, -1).cpu())
        norms.append(result.grad_norm.item())
        loads += routing.counts.tolist() if routing else []
        read = routing.read() if routing else {}
        figures.append([read.get(name, 0.0) for name in ("balance_loss", "z_loss")])
    # After a step of several alone: a quarter of a one-step case. Of what is compiled it would be
    # other graphs, which take as long again.
    validation = None
    if case.steps > 1 and not case.compile.enable:
        held_out = micro_batches(case, mesh, case.steps)
        validation = evaluate(model, held_out).item()
    parameters = whole(applied, [p.detach() for _, p in applied.named_trained()])
    return {
        "losses": losses,
        "norms": norms,
        "gradients": train_step.gradients,
        "parameters": parameters,
        "loads": _by_router(applied.parts.values(), loads),
        "figures": figures,
        "sources": sources,
        "validation": validation,
        "offloaded": applied.offload.copied if applied.offload else 0,
    }


def connect(
    case: Case, applied: Applied, config: DecoderConfig, layout: Layout | None, mesh: Mesh
) -> ParallelModel:
    """The case's model with what runs it."""
    execution = build_execution(applied, layout, mesh, Policy.of(case.parallel, mesh))
    return ParallelModel(applied, execution, mesh, build_loss(case, config, mesh))


def mesh_of(case: Case) -> Mesh:
    """The mesh of a case, on one of its ranks."""
    degrees = case.config().degrees(case.world)
    return Mesh(**degrees, ep=case.parallel.ep, etp=case.parallel.etp)


def build_parallel(case: Case, config: DecoderConfig, layout: Layout | None, mesh: Mesh) -> Applied:
    """The model by the passes of the Trainer."""
    spec, float8, dtype = MODELS[case.model], case.plan(), DTYPES[case.dtype]
    rows = spec.placements(config, case.parallel.sequence_parallel)
    with torch.device("meta"):
        model = build(case, config, mesh.device_type)
    kernel = attention_of(case, config, mesh.device_type).kernel
    passes = Passes(
        units=spec.units(config),
        blocks="blocks.*",
        placements=float8.placements(rows, mesh) if float8 else rows,
        parallel=case.parallel,
        dtype=case.dtype,
        recompute=case.recompute,
        compile=case.compile,
        init=(SEED, initializer(case, config)),
        convert=conversion(
            float8.converter(mesh, dtype) if float8 else None, spec, case.lora, dtype
        ),
        vocabulary=spec.vocabulary(config),
        layout=layout,
        encoder=spec.encoder,
        replicas="step",
        smallest_offload=1,
        context=context_of(case, kernel),
        experts=expert_layers(case) if config.n_experts else None,
        loss=build_head_loss(case, config, mesh),
    )
    applied = apply_passes(model, mesh, passes)
    if case.lora.rank:
        train_from(spec.embedding(config)[0], applied.parts.values())
    return applied


def expert_layers(case: Case) -> ExpertLayers:
    """Experts of the case's model, as the Trainer wants them."""
    parallel, spec = case.parallel, MODELS[case.model]
    return ExpertLayers(
        spec.experts,
        parallel.dispatcher,
        capacity=parallel.ep_capacity,
        float8=case.float8.dispatch,
        inner=parallel.ep_inner,
    )


def build_head_loss(
    case: Case, config: DecoderConfig, mesh: Mesh
) -> tuple[str, ChunkedLoss] | None:
    """The Trainer's loss in the head, where it is computed in chunks."""
    if case.loss_chunks == 1:
        return None
    shard = vocabulary(config, mesh)
    return "head", ChunkedLoss(case.loss_chunks, shard, case.compile, config.logit_softcap)


def vocabulary(config: DecoderConfig, mesh: Mesh) -> VocabularyShard | None:
    """This rank's part of it, where it is split."""
    if mesh.size("tp") == 1:
        return None
    return VocabularyShard(config.vocab_size, mesh.rank("tp"), mesh.group("tp"))


def context_of(case: Case, kernel: str = "math") -> Context | None:
    """How attention gets at the tokens of other ranks."""
    config, _ = case.resolved()
    spec = MODELS[case.model]
    scoring = config.window, config.softcap
    recurrent = spec.recurrent_cores(config)
    return Context.of(case.parallel, spec.cores, kernel, *scoring, recurrent, config.causal)


def build_loss(case: Case, config: DecoderConfig, mesh: Mesh) -> LossFunction:
    """The Trainer's loss."""
    if case.loss_chunks > 1:
        return losses_from_head
    loss: LossFunction = functools.partial(sequence_losses, vocabulary=vocabulary(config, mesh))
    if case.compile.enable:
        loss = torch.compile(loss, backend=case.compile.backend, dynamic=False)
    return loss


def whole(applied: Applied, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Copies of unsharded tensors by name, on the host, without padded rows, which must be zero;
    those of a weight that two stages hold are equal."""
    full: dict[str, Tensor] = {}
    for (name, _), shard in zip(applied.named_trained(), tensors, strict=True):
        tensor = on_host(shard.full_tensor())  # type: ignore[attr-defined]
        rows = applied.padded_rows.get(name, len(tensor))
        assert not tensor[rows:].any(), f"{name}: padded rows are not zero"
        first = full.setdefault(name, tensor[:rows])
        assert torch.equal(first, tensor[:rows]), f"{name}: the copies differ"
    return full


def micro_batches(case: Case, mesh: Mesh, step: int, mtp: int = 0) -> list[Batch]:
    """This rank's micro-batches of a step, as the loader cuts them."""
    ranks, rank = mesh.size(*BATCH_AXES), mesh.rank(*BATCH_AXES)
    first, stride = rank * case.micro_batch, ranks * case.micro_batch
    starts = range(first, case.sequences, stride)
    batches = [make_batch(case, range(s, s + case.micro_batch), step) for s in starts]
    shares = [shard_batch(batch, mesh, context_of(case), mtp) for batch in batches]
    return [share.to(mesh.device_type) for share in shares]


def deviations(case: Case, ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Largest deviation over the ranks, by what was compared ("loss 0", "gradient norm.weight").

    A number's deviation is its relative error. A tensor that no rank has deviates by infinity, as
    do loads of experts that are not the same.
    """
    if not case.rounds_alike:
        return _decibels(case, ranks)
    return compare(ranks, reference(case))


def compare(ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> dict[str, float]:
    """Deviations of what each rank has from what `reference` gave."""
    found: dict[str, float] = {}
    for kind in ("gradients", "parameters"):
        found |= {f"{kind[:-1]} {name}": math.inf for name in wanted[kind]}
    found |= {f"loads {name}": math.inf for name in wanted["loads"]}
    seen: dict[str, list[float]] = {}
    for result in ranks:
        for name, value in _deviations_of_rank(result, wanted):
            seen.setdefault(name, []).append(value)
    # max() would overlook a nan that is not the first
    worst = {k: math.inf if any(map(math.isnan, v)) else max(v) for k, v in seen.items()}
    return found | worst


def _decibels(case: Case, ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How much farther from the gradients without float8 a layout's are than one process's, or
    nearer, in dB."""
    exact = reference(replace(case, float8=Float8()))["gradients"]
    one = signal_to_noise(exact, reference(case)["gradients"])
    found = [signal_to_noise(exact, gradients) for gradients in all_gradients(ranks)]
    return {"dB": max(math.inf if math.isnan(x) else abs(x - one) for x in found)}


def all_gradients(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Each rank's gradients, with those of other ranks for the stages that it lacks."""
    whole = {name: grad for result in ranks for name, grad in result["gradients"].items()}
    return [{**whole, **result["gradients"]} for result in ranks]


def signal_to_noise(exact: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """20 log10(||g|| / ||g - found||) over all gradients."""
    signal = torch.stack([g.norm() for g in exact.values()]).norm()
    noise = torch.stack([(g - found[name]).norm() for name, g in exact.items()]).norm()
    return 20 * math.log10(signal / noise)


def _deviations_of_rank(
    found: dict[str, Any], wanted: dict[str, Any]
) -> Iterator[tuple[str, float]]:
    for kind in ("losses", "norms"):
        for step, (x, y) in enumerate(zip(found[kind], wanted[kind], strict=True)):
            yield f"{'loss' if kind == 'losses' else 'norm'} {step}", abs(x - y) / abs(y)
    for step, (x, y) in enumerate(zip(found["sources"], wanted["sources"], strict=True)):
        yield f"sources {step}", ((x - y).abs() / torch.where(y == 0, 1.0, y)).max().item()
    if found["validation"] is not None:
        yield (
            "validation",
            abs(found["validation"] - wanted["validation"]) / (wanted["validation"] or 1.0),
        )
    for step, both in enumerate(zip(found["figures"], wanted["figures"], strict=True)):
        for name, x, y in zip(("balance", "z"), *both, strict=True):
            gap = abs(x - y) / abs(y or 1.0)
            yield f"{name} {step}", gap if gap > FIGURE else 0.0
    for name, loads in found["loads"].items():
        yield f"loads {name}", 0.0 if loads == wanted["loads"][name] else math.inf
    for kind in ("gradients", "parameters"):
        tensors = wanted[kind]
        total = torch.stack([t.norm() for t in tensors.values()]).norm()
        floor = 1e-3 * total / len(tensors) ** 0.5
        for name, tensor in found[kind].items():
            scale = max(tensors[name].norm(), floor)
            yield f"{kind[:-1]} {name}", ((tensor - tensors[name]).norm() / scale).item()


@dataclass(frozen=True)
class Outcome:
    """What became of a case that is not refused."""

    deviations: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    """Why there are none: a rank's traceback."""

    @property
    def worst(self) -> float:
        """The largest deviation."""
        return max(self.deviations.values(), default=math.inf)

    def wrong(self, case: Case) -> list[str]:
        """What deviates too much, the worst first, or the failure; empty if all is equal."""
        if self.failure:
            return [self.failure]
        over = {k: v for k, v in self.deviations.items() if not v <= case.tolerance(k)}
        return [f"{k}: {over[k]:.3e}" for k in sorted(over, key=over.__getitem__, reverse=True)]


def outcome_of(case: Case, ranks: Sequence[dict[str, Any]]) -> Outcome:
    """From what each rank's `parallel_run` gave."""
    if case.recompute.offload and not any(rank["offloaded"] for rank in ranks):
        return Outcome({}, "nothing was offloaded")
    return Outcome(deviations(case, ranks))


def check(case: Case, seconds: int = 120) -> None:
    """Fail unless a layout equals one process."""
    ranks = run_ranks(case.world, parallel_run, case, seconds=seconds)
    wrong = outcome_of(case, ranks).wrong(case)
    assert not wrong, f"{case}: {'; '.join(wrong)}"


def run_batch(cases: Sequence[Case], seconds: int = 600) -> list[Outcome]:
    """Cases of one world size, one after the other in the same processes.

    A case that fails or hangs is told by the results that are missing; the cases after it start
    afresh.
    """
    with tempfile.TemporaryDirectory() as directory:
        failure = ""
        try:
            run_ranks(cases[0].world, _run_each, cases, Path(directory), seconds=seconds)
        except AssertionError as error:
            failure = str(error)
        outcomes = []
        for number, case in enumerate(cases):
            files = [Path(directory, f"{number}.{rank}") for rank in range(case.world)]
            if not all(file.exists() for file in files):
                assert failure, f"{case}: a rank left no result"
                rest = cases[number + 1 :]
                # A rank that dies without a word has no traceback: gloo's own thread was seen to
                # crash, once in some thousand cases. Such a case is run again, alone, once.
                again = failure.endswith(" died") and len(cases) > 1
                outcomes += run_batch([case]) if again else [Outcome({}, failure)]
                return [*outcomes, *(run_batch(rest) if rest else [])]
            ranks = [pickle.loads(file.read_bytes()) for file in files]
            outcomes.append(outcome_of(case, ranks))
        return outcomes


def _run_each(cases: Sequence[Case], directory: Path) -> None:
    rank = dist.get_rank()
    for number, case in enumerate(cases):
        if case.compile.enable:
            torch._dynamo.reset()  # a block's graphs are kept, and limited in number
        result = pickle.dumps(parallel_run(case))
        (directory / f"{rank}.tmp").write_bytes(result)
        (directory / f"{rank}.tmp").rename(directory / f"{number}.{rank}")
        dist.barrier()  # a rank that fails ends the others: not before they have told this case


def selected(request: pytest.FixtureRequest) -> list[Case]:
    """The cases of all tests of a fixture's file that this run selects."""
    here = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in here if hasattr(item, "callspec")]  # type: ignore[attr-defined]
    return [found["case"] for found in parameters if "case" in found]


class Batches:
    """Cases of one world size that share processes, a few a launch: most cases take less time than
    what torch does but once, of starting ranks, compilers and DTensor's propagation of shardings.

    Args:
        cases: of all world sizes; none is refused.
    """

    SIZE = 6
    folder: Path | None = None
    """Where outcomes are kept for other processes and later runs of this code; None: nowhere."""

    def __init__(self, cases: Iterable[Case]) -> None:
        of_world: dict[int, list[Case]] = {}
        for case in {str(case): case for case in cases}.values():
            of_world.setdefault(case.world, []).append(case)
        self.batches = [
            of_world[world][i : i + self.SIZE]
            for world in sorted(of_world)
            for i in range(0, len(of_world[world]), self.SIZE)
        ]
        self._outcomes: dict[str, Outcome] = {}

    def cases(self) -> list[Case]:
        """All, in the order in which they run."""
        return [case for batch in self.batches for case in batch]

    def outcome(self, case: Case) -> Outcome:
        """What became of a case; runs its batch if that has not been run."""
        if str(case) not in self._outcomes:
            (batch,) = [batch for batch in self.batches if case in batch]
            found = self._kept(batch)
            if not found:
                found = run_batch(batch)
                self._keep(batch, found)
            self._outcomes.update(zip(map(str, batch), found, strict=True))
        return self._outcomes[str(case)]

    def _file(self, batch: Sequence[Case]) -> Path | None:
        name = hashlib.sha256(repr([str(case) for case in batch]).encode()).hexdigest()
        return self.folder and self.folder / f"{name[:16]}.json"

    def _kept(self, batch: Sequence[Case]) -> list[Outcome]:
        file = self._file(batch)
        kept = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else []
        return [Outcome(**each) for each in kept]

    def _keep(self, batch: Sequence[Case], found: Sequence[Outcome]) -> None:
        """Keep a batch's outcomes, if all have passed; other processes see the whole file."""
        file = self._file(batch)
        if file and not any(map(Outcome.wrong, found, batch)):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps([asdict(each) for each in found]))
