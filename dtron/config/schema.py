"""The sections of a run's config: typed keys, each with a docstring that `--help` prints.

Choices are Literals, units are in the names, values are frozen. Rules across several keys are in
`dtron/config/setting_rules.py`; `dtron/config/run_config.py` reads and writes a whole run.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dtron.errors import ConfigError

MAX_RANKS = 2**20
MAX_LAYERS = 10_000
MAX_STEPS = 2**31 - 1
MAX_SEQUENCES = 2**26
MAX_TOKENS = 2**26
"""Maximum number of tokens per sequence."""
MAX_SECONDS = 30 * 86400
GRAPH_WARM_UP = 2
"""Steps of a start that run before one is recorded as a CUDA graph (`compile.cuda_graphs`)."""
_VARIABLE = re.compile(r"\$[A-Za-z_{]")
_URL = re.compile(r"[A-Za-z][\w+.-]*://")


def _check_path(path: str) -> str:
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError("the user after ~ has no home directory; write the whole path") from None
    if len(path.encode()) > 4000 or any(len(name.encode()) > 255 for name in path.split("/")):
        raise ValueError("a path has at most 4000 bytes, and each name in it 255")
    return path


def _check_no_variable(path: str) -> str:
    """Refuse variables such as $HOME, which would become part of a folder's name."""
    if _VARIABLE.search(path):
        raise ValueError(
            "environment variables are not expanded; write the whole path, or ~ for the home "
            "folder (a shell expands variables of arguments, but not inside of '...')"
        )
    return path


def _check_local(path: str) -> str:
    if _URL.match(path):
        raise ValueError(
            "not a folder but a URL; use a folder (only checkpoint.dir takes URLs, for checkpoints "
            "in an object store)"
        )
    return path


def _check_resume(resume: str) -> str:
    if resume != "latest" and resume.lower() in ("latest", "last", "newest", "true", "auto"):
        raise ValueError('write "latest", or the path of a run or checkpoint (./NAME for a folder)')
    return resume


def _check_warmup(warmup: float) -> float:
    if warmup < 1:
        return warmup
    if warmup == 1:
        raise ValueError(
            "the warm-up is a fraction of train.steps; with 1 the learning rate would only rise; "
            "use less than 1"
        )
    raise ValueError(
        f"the warm-up is a fraction of train.steps, below 1; for {warmup:g} steps write the value "
        f"of {warmup:g} / train.steps, which is 0.1 for train.steps = {10 * warmup:g}"
    )


def _check_hang_seconds(seconds: float) -> float:
    if seconds not in (-1, 0) and seconds < 0.1:
        raise ValueError("use -1, 0, or at least 0.1 seconds")
    return seconds


Text = Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]
"""Text without control characters, which TOML cannot hold; tabs and line breaks are allowed."""
PathText = Annotated[
    str, Field(max_length=4000, pattern=r"^[^\x00-\x1f\x7f]*$"), AfterValidator(_check_path)
]
StatedPath = Annotated[PathText, AfterValidator(_check_no_variable)]
LocalPath = Annotated[StatedPath, AfterValidator(_check_local)]
HangSeconds = Annotated[float, AfterValidator(_check_hang_seconds)]
Warmup = Annotated[float, AfterValidator(_check_warmup)]
LayerCount = Annotated[int, Field(ge=0, le=MAX_LAYERS)]

Degree = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
DEGREES: tuple[Degree, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
CpMethod = Literal["ring", "all_gather", "ulysses", "hierarchical"]
ExpertDegree = Literal["pp", "dp_replicate", "edp_shard", "ep", "etp"]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    automatic: ClassVar[frozenset[str]] = frozenset()
    """Keys that `dtron/setup/automatic.py` sets on GPUs if they are unset or "auto". Until then,
    and on CPUs, they have their defaults."""
    searched: ClassVar[frozenset[str]] = frozenset()
    """Keys of `automatic` for which "auto" is a value of its own until it is replaced."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change a key, since other code may have read its value."""
        if name not in type(self).model_fields:
            return super().__setattr__(name, value)
        key = (
            name if type(self).__name__ == "RunConfig" else f"{type(self).__name__.lower()}.{name}"
        )
        raise ConfigError(
            f"{key} = {value!r}: a config cannot be changed; make a new config, such as "
            f"RunConfig.load(FILE, ['{key}={value}'])"
        )

    @model_validator(mode="before")
    @classmethod
    def _unset_automatic(cls, values: Any) -> Any:
        """Drop the value "auto" of keys in `automatic`, so that other code never reads it."""
        if not isinstance(values, dict):
            return values
        dropped = cls.automatic - cls.searched
        return {k: v for k, v in values.items() if not (k in dropped and v == "auto")}


class Run(Section):
    """The run directory."""

    dir: LocalPath = "runs/default"
    """Run directory (not a URL) for config, metrics, TensorBoard logs and checkpoints. It can be
    used again: files of the earlier run are kept and renamed with a number."""
    wait_seconds: float = Field(default=30.0, ge=0, le=86400)
    """Seconds to wait at the start for another run in the same directory to end; then the start
    fails."""


class Model(Section):
    """The model and its attention backend."""

    name: Text = "llama"
    """Model family: llama, qwen3, qwen3_5, gemma3, gemma4, gpt, mixtral, qwen3_moe, qwen3_5_moe,
    deepseek_v3, gpt_oss, nemotron_h, bert, t5 or llava. Or a custom model: `MODULE:NAME`, a
    `dtron.models.ModelSpec` in a module of an installed package or of the working directory; or the
    name of an entry point of group `dtron.models`."""
    size: Text = "debug"
    """Size of the model; for llama debug, 1b, 3b, 8b, 70b or 405b. `initial`: take the family and
    the shape from `checkpoint.initial`."""
    override: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config that replace the fields of `size`, in a table
    `[model.override]`."""
    attention: Literal["auto", "fa4", "cudnn", "flash_attn", "flash", "flex", "sdpa", "math"] = (
        "auto"
    )
    """Attention backend; `auto` chooses the best backend that supports the run and logs its name.
    Layers whose heads have another width (`global_head_dim`) take it if it supports them, else the
    choice of `auto`."""


class Parallel(Section):
    """Parallelism degrees (numbers of ranks): world size = pp x dp_replicate x dp_shard x cp x
    tp."""

    automatic = frozenset(
        {
            *("accumulate_in_matmul", "async_tp", "copy_engines", "cp_method", "dispatcher"),
            *("reduce_by", "schedule", "zero"),
        }
    )
    dp_replicate: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Data-parallel replicas of the model; gradients are all-reduced between them."""
    dp_shard: int = Field(default=-1, ge=-1, le=MAX_RANKS)
    """Data-parallel ranks over which parameters, gradients and optimizer state are sharded (FSDP);
    -1: all ranks that the other degrees leave."""
    cp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Context parallelism: ranks over which each sequence is split. For long sequences."""
    tp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Tensor parallelism: ranks over which the heads and hidden units of each layer are split. Best
    within one host."""
    pp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Pipeline parallelism: ranks over which the layers are split."""
    ep: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Expert parallelism: ranks over which the experts are distributed; each token is dispatched to
    the ranks of its experts. ep x etp divides dp_shard x cp x tp; the quotient is the number of
    ranks that shard each expert's parameters."""
    etp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Expert tensor parallelism: ranks over which the hidden width of each expert is split. It is
    independent of tp; ep x etp divides dp_shard x cp x tp."""
    encoder_tp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Tensor parallelism of an encoder (of images), 1 or `tp`. 1: the cp x tp ranks of a
    micro-batch encode different images, and their outputs are gathered; parameters of the encoder
    are whole on each tp rank. `tp`: heads and hidden units of the encoder are split as the
    decoder's; for large encoders, or for less than one image per rank."""
    dispatcher: Literal[
        "all_to_all", "symmetric_memory", "bounded_all_to_all", "hierarchical", "deepep"
    ] = "all_to_all"
    """With ep or etp > 1, how tokens are dispatched to their experts. `all_to_all`: NCCL all-to-all
    for dispatch and combine; the host waits for the GPU once per layer. `symmetric_memory`: ranks
    of one host read each other's memory, without this wait. `bounded_all_to_all`: all-to-alls of a
    fixed size, over any hosts, without this wait; more bytes are sent, by `ep_capacity`.
    `hierarchical`: likewise, but a token is sent once to each host of its experts, and its results
    return as one sum per host. `deepep`: the library DeepEP, in bfloat16, if it is installed.
    `auto`: `symmetric_memory` with etp = 1 on GPUs of one host if `ep_capacity` is at least ep,
    which is enough for any load; else `all_to_all`."""
    ep_capacity: float = Field(default=2.0, ge=1.0, le=1e6)
    """The maximum number of token copies that a rank receives (`symmetric_memory`), that it sends
    to one rank (`bounded_all_to_all`), or of tokens that it sends to one host (`hierarchical`), as
    a multiple of a balanced load; buffers and activations of experts grow with it. If there are
    more, the run raises the capacity and repeats the steps; ep_capacity = ep is always enough."""
    ep_inner: int = Field(default=0, ge=0, le=MAX_RANKS)
    """With `dispatcher = "hierarchical"`, the number of neighbouring ep ranks in a host; 0: those
    with equal host names."""
    overlap_micro_batches: bool = False
    """With ep or etp > 1 and several micro-batches, run the forward of a micro-batch together with
    the backward of another, so that dispatch and combine overlap with computation. Takes the memory
    of two micro-batches' activations. Parameters must stay gathered and gradients be reduced once
    per step: zero = 1, or zero = 2 with `reduce = "step"`. In a pipeline only with `schedule =
    "DualPipeV"`."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage: what dp_shard shards. 3: parameters, gradients and optimizer state; parameters
    are gathered for each forward and backward. 2: gradients and optimizer state; parameters are
    gathered once per step. 1: optimizer state; gradients are reduced once per step. All stages
    shard 16 bytes per parameter (12 of float32 weights and AdamW moments, 4 of gradient). With 2
    and 1, each rank also holds the unsharded bfloat16 parameters (2 bytes per parameter); with 1,
    also the unsharded gradients in `reduce_dtype`. `auto`: 2 on GPUs if it fits, else 3."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are reduced if a step has several micro-batches. `micro_batch`: after each
    micro-batch; gradients stay sharded. `step`: once per step, with less communication; each rank
    then holds the unsharded gradients (32 GB for 8B parameters in float32). `auto`: `step` for zero
    = 1 and for dp_shard = 1, else `micro_batch`."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are sent and summed over data-parallel ranks. bfloat16 halves the
    communication. With several micro-batches and `reduce = "step"` or dp_replicate > 1, bfloat16 is
    refused, since micro-batches would be summed in bfloat16 too."""
    reduce_by: Literal["reduce_scatter", "all_to_all"] = "reduce_scatter"
    """How gradients are summed over dp_shard and cp. `all_to_all`: gradients are sent in
    `train.dtype`, and the receiver sums them in `reduce_dtype`: the sums of a reduce-scatter, half
    the bytes. Refused if micro-batches are summed before the reduction (`reduce = "step"`). `auto`:
    `all_to_all` in bfloat16 on GPUs of one host with torch before 2.15, else `reduce_scatter`."""
    copy_engines: bool = False
    """Use the copy engines of the GPUs instead of NCCL kernels to gather parameters and, with
    `reduce_by = "all_to_all"`, to send gradients. Overlapped matmuls then keep all multiprocessors.
    The dp_shard x cp ranks must be on GPUs of one host. `auto`: true for these ranks with
    `reduce_by = "all_to_all"`."""
    accumulate_in_matmul: bool = False
    """If gradients of several micro-batches are summed before their reduction: the matmul of a
    linear's or an expert's weight gradient adds to the float32 sum, without a bfloat16 gradient in
    between. Saves memory traffic and one rounding per micro-batch."""
    prefetch: int = Field(default=1, ge=0, le=MAX_LAYERS)
    """Number of FSDP units whose parameters are gathered ahead while the current unit computes, in
    forward and backward. A larger number overlaps more and needs more memory."""
    blocks_per_unit: int = Field(default=1, ge=1, le=MAX_LAYERS)
    """Number of neighbouring blocks per FSDP unit: their parameters are gathered, and their
    gradients reduced, by one collective. A larger number sends fewer and larger messages, and needs
    more memory. In a pipeline, blocks of one stage. At most the blocks of the largest stage."""
    sequence_parallel: bool = True
    """With tp > 1, split the sequence over tp outside of attention and feed-forward: each rank
    computes and holds norms, dropout and residuals for 1 / tp of the tokens. false: each rank does
    so for all tokens."""
    async_tp: bool = False
    """With tp > 1 on GPUs, overlap the all-gathers and reduce-scatters of tensor parallelism with
    their matmuls, through symmetric memory. `auto`: true for compiled blocks without latent
    attention if tp is inside a host and the schedule does not split the backward; models with
    experts also need `dispatcher = "symmetric_memory"` and no float8."""
    schedule: PathText = "1F1B"
    """Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble, DualPipeV, or the path of a .csv file with a custom schedule. `auto`: on GPUs,
    for dense models with tp = 1, no recomputation, and zero below 3 or dp_shard x cp = 1, the first
    of ZBVZeroBubble and Interleaved1F1B that fits model and memory; else 1F1B."""
    stages_per_rank: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Pipeline stages per rank; 0: the default of the schedule."""
    pp_layout: Text | list[LayerCount] | list[list[Text]] = ""
    """Layers of each pipeline stage: numbers of layers, a layout string such as `Ettt|tttL`, or a
    list of module names per stage; empty: stages of equal matmul cost, including the head."""
    defer_head: int = Field(default=0, ge=0, le=MAX_SEQUENCES)
    """With pp > 1, the number of micro-batches for which the head's weight gradients are deferred
    until the pipeline drains; the logits' gradients of these micro-batches are kept until then. For
    schedules that do not split the backward, such as 1F1B."""
    cp_method: CpMethod | list[CpMethod] = "ring"
    """With cp > 1, how attention gets the keys and values of other ranks: ring, all_gather, ulysses
    (all-to-all over heads) or hierarchical (all-to-all within groups of `cp_inner` ranks, a ring
    between the groups). A list gives one method per layer. `auto`: on GPUs of one host, for
    attention without windows and not latent, ulysses if it is legal, or all_gather; else ring."""
    cp_inner: int = Field(default=0, ge=0, le=MAX_RANKS)
    """Ranks per all-to-all group with `cp_method = "hierarchical"`; 0: the largest proper divisor
    of cp."""
    high_priority: list[Degree] = Field(default_factory=list)
    """Mesh axes whose NCCL collectives run on high-priority CUDA streams, such as ["tp"]."""
    timeout_seconds: int = Field(default=600, ge=1, le=MAX_SECONDS)
    """Seconds that a collective may wait for other ranks before the run is aborted."""

    @property
    def bounded(self) -> bool:
        """Whether the dispatcher has buffers of a fixed size, `ep_capacity`."""
        return self.dispatcher in ("symmetric_memory", "bounded_all_to_all", "hierarchical")

    def cp_methods(self) -> tuple[CpMethod, ...]:
        """Return `cp_method` as a tuple: one method for all layers, or one per layer."""
        return (self.cp_method,) if isinstance(self.cp_method, str) else tuple(self.cp_method)

    def reduces_once(self, sharded: bool) -> bool:
        """Whether gradients are reduced once per step: `reduce` with "auto" resolved.

        Args:
            sharded: whether parameters are sharded over several ranks.
        """
        if self.reduce == "auto":
            return self.zero == 1 or not sharded
        return self.reduce == "step"


class Train(Section):
    """The training loop: steps, batch sizes, precision, validation."""

    automatic = frozenset(("loss_chunks",))
    steps: int = Field(default=100, ge=1, le=MAX_STEPS)
    """Optimizer steps."""
    epochs: float = Field(default=0.0, ge=0, le=1e6)
    """Number of times to read the training data, in place of `steps`, which follow from it: the
    last step is that in which the last epoch ends. 0: `steps` decides."""
    tokens: int = Field(default=0, ge=0, le=10**17)
    """Number of tokens to train on, padding included, in place of `steps`: rounded up to whole
    steps of `global_batch` x `seq_len` tokens. 0: `steps` or `epochs` decides."""
    seq_len: int = Field(default=2048, ge=2, le=MAX_TOKENS)
    """Tokens per sequence."""
    global_batch: int = Field(default=8, ge=1, le=MAX_SEQUENCES)
    """Sequences per optimizer step, over all ranks and micro-batches."""
    micro_batch: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    """Sequences that a rank computes at once; gradients are accumulated until `global_batch`."""
    loss_chunks: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    """Number of chunks into which a micro-batch's tokens are split for head and loss. More chunks
    save memory: only one chunk's logits and their gradient exist at a time. 1: all at once. `auto`:
    1, or on GPUs the lowest of 4, 8 and 16 that fits if 1 does not fit, or if the vocabulary is no
    multiple of 8, whose matmuls are slow."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of computation. Parameters are float32 in both cases; for AdamW's moments see
    `optim.moments`."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout. The same seed gives the same losses in
    every layout."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=1e30)
    """Gradient clipping: gradients are scaled down to this global norm; 0: no clipping."""
    max_skipped: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Steps with non-finite gradients are skipped; this number of them in a row ends the run at the
    next logged step."""
    eval_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between validations; 0: only after the last step."""
    eval_sequences: int = Field(default=64, ge=0, le=MAX_SEQUENCES)
    """Maximum number of sequences of each validation set; 0: no validation."""
    stop_after: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Early stop: end the run after this number of validations in a row in which `checkpoint.best`
    has not improved; 0: train all steps."""
    sample_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Tokens of sample text to generate after the last step; 0: none."""
    sample_prompt: Text = "In the beginning"
    """Text that the sample continues."""
    gc_interval: int = Field(default=200, ge=1, le=MAX_STEPS)
    """Steps between Python's garbage collections. All ranks collect at the same step, so that no
    rank waits for the collection of another rank."""

    @property
    def evaluates(self) -> bool:
        """Whether the run has forwards without a backward: validations or sample text."""
        return self.eval_sequences > 0 or self.sample_tokens > 0


MOMENTS = {"adamw": (2, 2), "muon": (2, 1), "lion": (1, 1), "adamw8bit": (2, 2), "sgd": (0, 0)}
"""Moments by optimizer: of most parameters, and of the matrices of layers (hidden)."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0}
_BYTES_8BIT = 1 + 4 / 256
"""Bytes per element of a moment of AdamW8bit: a code, and a float32 scale for 256 elements."""


class OptimGroup(Section):
    """One table of `optim.groups`: parameters with their own learning rate or weight decay."""

    match: Annotated[Text, Field(min_length=1)]
    """Pattern of FQNs of parameters, or of modules that contain them; `*` is one component."""
    lr: float | None = Field(default=None, gt=0, le=1e6)
    """Peak learning rate, with the schedule of all others. Left out: `optim.lr`."""
    weight_decay: float | None = Field(default=None, ge=0, le=1e6)
    """Weight decay, of vectors too. Left out: `optim.weight_decay` for matrices, 0 for vectors."""


class Optim(Section):
    """The optimizer."""

    name: Text = "adamw"
    """adamw, muon, lion, adamw8bit or sgd. Or a custom optimizer: `MODULE:NAME`, a function in a
    module of an installed package or of the working directory; or the name of an entry point of
    group `dtron.optimizers`. `muon`: Muon for the matrices of layers, AdamW for
    the rest (embeddings, head, norms, biases, routers). `lion`: signs of the momentum.
    `adamw8bit`: AdamW with moments in 8 bits. `sgd` has no momentum and no weight decay."""
    lr: float = Field(default=3e-4, gt=0, le=1e6)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment of AdamW, also in Muon; weight of the momentum in Lion's
    update."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of the second moment of AdamW, also in Muon; decay rate of Lion's momentum."""
    eps: float = Field(default=1e-8, gt=0, le=1.0)
    """AdamW's epsilon, also in Muon, which is added to the square root of the second moment."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's decay rate of the momentum, which is Nesterov's."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How Muon scales the learning rate of a matrix (A, B), as torch.optim.Muon names it.
    `match_rms_adamw`: by 0.2 sqrt(max(A, B)), so that updates are as large as AdamW's, with its
    learning rates. `original`: by sqrt(max(1, A / B)), with learning rates of about 0.02."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of moments. bfloat16 saves half of their bytes: per parameter 4 of AdamW's 8, 2 of the
    4 of Muon's matrices and of Lion. beta2 and momentum must then be at most 0.99, since the
    smaller changes of larger ones are lost in bfloat16."""
    offload: float = Field(default=0.0, ge=0, le=1)
    """Fraction of AdamW's moments to keep in pinned host memory. The update copies them to the GPU
    and back, a part at a time. Results are bitwise the same. Parameters of fewer than 65,536
    elements per rank keep theirs on the GPU, as `optim.ema` does. On GPUs only."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights, such as 0.999: 4 more bytes per
    parameter, sharded as moments are. `dtron eval`, `generate` and `convert to-hf` use it with
    --ema. 0: none."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""
    groups: tuple[OptimGroup, ...] = Field(default=(), strict=False)
    """Parameters with their own `lr` or `weight_decay`: tables [[optim.groups]]. The first table
    that matches a parameter applies."""

    def state_bytes(self, hidden: bool) -> list[float]:
        """Return the bytes per element of each tensor of a parameter's state.

        Args:
            hidden: of a matrix of a layer, which Muon would update.
        """
        return self.moment_bytes(hidden) + self.average_bytes()

    def moment_bytes(self, hidden: bool) -> list[float]:
        """Return the bytes per element of each moment; `hidden` as of `state_bytes`."""
        number = MOMENTS.get(self.name, MOMENTS["adamw"])[hidden]  # a custom one is unknown
        each = _BYTES_8BIT if self.name == "adamw8bit" else _BYTES[self.moments]
        return [each] * number

    def average_bytes(self) -> list[float]:
        """Return the bytes per element of the average of the weights; empty: none."""
        return [4.0] if self.ema else []


class Schedule(Section):
    """The learning rate schedule; lengths are fractions of train.steps."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "exponential"] = "cosine"
    """Shape of the schedule, a key of dtron.config.learning_rate.SCHEDULES. `exponential` rises,
    for learning-rate range tests (`dtron bench lr`)."""
    warmup: Warmup = Field(default=0.1, ge=0, le=1e9)
    """Fraction of the steps, below 1, in which the learning rate rises linearly from 0."""
    decay: float = Field(default=0.2, ge=0, le=1)
    """Fraction of the steps, at the end of the run, in which the learning rate falls; for `wsd`
    only."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate divided by the peak, for linear, cosine and wsd; the first one for
    exponential."""


class Recompute(Section):
    """Activation checkpointing and offloading of blocks: less memory for more time."""

    automatic = searched = frozenset(("mode",))
    mode: Literal["none", "full", "attention", "selective", "auto"] = "none"
    """What blocks keep for their backward; the rest is recomputed. `none`: everything. `full`: the
    block's input only. `attention`: also the outputs of attention, which cost most to recompute
    for long sequences. `selective`: also the outputs of matmuls. `auto`, on GPUs: the fastest
    policy that fits, as the planner predicts: a mode for all blocks, every second, or the first
    quarter, half or three quarters, with `offload` or not. Unset, on GPUs: the first of `none`,
    `selective`, `attention` and `full` that fits, if no other key of this section is set."""
    every: int = Field(default=1, ge=1, le=MAX_LAYERS)
    """Recompute every n-th block only; 1: all blocks."""
    first: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Recompute the first n blocks only; 0: all. For pipelines, whose first stage keeps the
    activations of the most micro-batches."""
    modules: list[Annotated[Text, Field(min_length=1)]] = []
    """Names of modules of a block to recompute, each from its own input; empty: the whole block.
    dtron's models have `attn`, `delta`, `ffn` (dense), `ffn.experts` and `ffn.shared`."""
    ffn_chunks: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    """Compute the dense feed-forward of each block over this many chunks of the sequence, one after
    the other, and each again in the backward: its hidden states exist for one chunk at a time. For
    long sequences, with any `mode` but `selective`. 1: whole sequences."""
    offload: bool = False
    """Move the tensors that a block saves for its backward to pinned host memory; the copies
    overlap with the computation of the next block. On GPUs only."""

    def acts_on(self, block: int) -> bool:
        """Whether the block with this index in the model recomputes anything."""
        chosen = block % self.every == 0 and (not self.first or block < self.first)
        return chosen and self.mode not in ("none", "auto")


class Compile(Section):
    """torch.compile, block by block, and CUDA graphs."""

    automatic = frozenset(("cuda_graphs",))
    enable: bool = False
    """Compile every block and the loss."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`inductor`, or `aot_eager` to check graph capture without generating code."""
    cuda_graphs: Literal["off", "step"] = "off"
    """`step`: record the forwards and backwards of a step's micro-batches, with their collectives,
    as one CUDA graph in the third step, and replay it in each later one. The host then launches one
    graph instead of thousands of kernels, which pays where it is slower than the GPU: in small
    models and small micro-batches. The graph keeps the memory of activations and gradients. Unset,
    on one GPU: `step` for compiled blocks of gpt, llama, qwen3 and gemma3 with a built-in optimizer
    where the planner predicts that the host is slower, if it fits and no other setting excludes it;
    not with `train.epochs`."""
    cache_dir: LocalPath = ""
    """Folder for compiled graphs and kernels, which later starts use again: one that outlives the
    container, and which only you can write to, since its files are executed. Empty: torch's own,
    TORCHINDUCTOR_CACHE_DIR or a folder of the user in /tmp."""


class Float8(Section):
    """float8 training: matmuls of linear layers in float8; weights, optimizer state and checkpoints
    keep their dtypes."""

    recipe: Literal["", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"] = ""
    """Scaling recipe, a key of dtron.float8.RECIPES; empty: no float8. `tensorwise`: one scale per
    tensor. `rowwise`: one per row, a power of two. `rowwise_with_gw_hp`: as rowwise, with weight
    gradients in `train.dtype`. `blockwise`: one per 1 x 128 activations and 128 x 128 weights, as
    in DeepSeek-V3. `mxfp8`: one per 1 x 32 elements, a power of two. Hardware without the matmuls
    of a recipe emulates them, slowly; a warning is logged."""
    scaling: Literal["dynamic", "delayed"] = "dynamic"
    """How scales are computed. `dynamic`: from the values to cast. `delayed`, with `tensorwise`
    only: scales of inputs and gradients from their largest absolute values in the last
    `amax_history` steps, scales of weights after each update. Ranks then exchange scales once per
    step instead of in each layer."""
    amax_history: int = Field(default=16, ge=1, le=4096)
    """With `scaling = "delayed"`, the number of last steps whose largest absolute values determine
    the scales."""
    filter: list[Text] | Literal["auto"] = Field(default_factory=list)
    """Patterns of the linear layers to convert, such as `blocks.*.ffn.*`; empty: all layers of the
    blocks whose dims are multiples of 16. `auto`: only those of these layers that are faster in
    float8, measured on rank 0's GPU when the run starts; all of them if float8 is emulated."""
    skip: list[Text] = Field(default_factory=list)
    """Patterns of linear layers that stay in `train.dtype`, such as `blocks.*.attn.w[kv]`."""
    skip_first: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of blocks at the start of the model that stay in `train.dtype`."""
    skip_last: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of blocks at the end of the model that stay in `train.dtype`."""
    output: bool = False
    """Convert the head (output projection) too."""
    experts: bool = False
    """Convert the matmuls of experts too. With every recipe, their inputs and weights have one
    scale per row, and their weight gradients are computed in `train.dtype`."""
    dispatch: bool = False
    """With ep or etp > 1, send tokens to their experts in float8, and in the backward the gradients
    of the experts' outputs: one scale per 128 elements of a token. The combine is in `train.dtype`.
    For the dispatchers `all_to_all` and `symmetric_memory`, with any recipe or none."""
    all_gather: bool = False
    """Gather weights over dp_shard and cp in float8: half the bytes of bfloat16. The float32
    weights are cast directly, without bfloat16 copies. With `tensorwise` and `blockwise`; one
    reduction after each update computes the scales of all weights. If weights stay gathered, as
    with zero = 1 or 2 and on one rank, they are cast once per step, not once per micro-batch."""
    gather_inputs: bool = False
    """With parallel.sequence_parallel, gather the input of each attention and feed-forward over tp
    in float8: half the bytes of bfloat16. With `tensorwise` only."""
    report_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between reports, in the metrics, of the accuracy of each layer's casts: signal-to-noise
    ratio in dB, and the fractions of values that become zero or saturate. A step with a report runs
    without torch.compile. A multiple of metrics.log_interval; 0: never."""


class Lora(Section):
    """Low-rank adapters: train two narrow factors of each chosen matrix, and freeze all weights."""

    rank: int = Field(default=0, ge=0, le=2**16)
    """Rank of the adapters: W x + scale B A x, with A (rank, inputs) and B (outputs, rank), which
    starts at zero. All other weights are frozen. 0: no adapters, all weights are trained."""
    alpha: float = Field(default=16.0, gt=0, le=1e6)
    """Scale of the adapters: alpha / rank."""
    rank_stabilized: bool = False
    """Scale of alpha / sqrt(rank) instead, whose updates do not shrink with the rank (rsLoRA)."""
    dora: bool = False
    """DoRA: also train the length of each row of W + scale B A, separately from its direction. Only
    linear layers have it."""
    modules: tuple[Annotated[Text, Field(min_length=1)], ...] = Field(default=(), strict=False)
    """Patterns of the linear layers and stacked experts of the blocks that get adapters, or of
    modules that contain them, such as `blocks.*.attn.w[qv]` or `blocks.*.ffn.experts`; `*` is one
    component. Empty: all of attention and feed-forward, also of experts; never routers."""
    initial: StatedPath = ""
    """Folder of an adapter in PEFT's format, from which the adapters of a run that does not resume
    start. Empty: A is random and B zero."""

    if TYPE_CHECKING:  # pydantic defines it for frozen models

        def __hash__(self) -> int: ...

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class Checkpoint(Section):
    """Saving, resuming, and initial weights."""

    dir: StatedPath = ""
    """Folder of this run's checkpoints, which all ranks share, or a URL that fsspec knows (`s3://`,
    `gs://`, ...); empty: RUN/checkpoints. Each run needs its own folder."""
    interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between checkpoints in `dir`; 0: only after the last step."""
    fast_dir: StatedPath = ""
    """Second, faster checkpoint folder, which all ranks must share: for a run on one node, such as
    its local disk or /dev/shm. Checkpoints are written there first; those due by `interval` are
    copied to `dir` in the background. Empty: none."""
    fast_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between checkpoints in `fast_dir`, in addition to those of `interval`."""
    fast_keep: int = Field(default=1, ge=1, le=MAX_STEPS)
    """Number of newest checkpoints that are kept in `fast_dir`."""
    last: bool = True
    """Save a checkpoint after the last step."""
    resume: Annotated[StatedPath, AfterValidator(_check_resume)] = ""
    """What to resume from. `latest`: the newest checkpoint of this run, if there is one. Or the
    path or URL of a run or of one checkpoint. Empty: start from step 0. A job that torchrun
    restarts continues from its own newest checkpoint in any case."""
    allow_data_change: bool = False
    """Allow a resumed run to have other training data or another tokenizer than the checkpoint; the
    run continues at the same sequence number. Also allow another tokenizer than `initial` has."""
    initial: StatedPath = ""
    """Initial weights of a run that does not resume: a Hugging Face folder, a run or a checkpoint.
    Only weights are read, no optimizer state. Empty: random initialization."""
    verify: bool = True
    """Check the SHA-256 of every file of a checkpoint before loading; each rank reads some of the
    files. false: check names and sizes only."""
    keep: int = Field(default=2, ge=0, le=MAX_STEPS)
    """Number of newest checkpoints that are kept in `dir`; 0: all."""
    keep_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """With `keep`, also keep the checkpoints of steps that are multiples of this number; 0: none.
    """
    best: Text = ""
    """Keep the checkpoint with the lowest value of this metric, besides the `keep` newest:
    `validation_loss` or `validation_loss/NAME`. A validation that improves it saves a checkpoint,
    whose name is RUN/best. Empty: none."""
    mode: Literal["sync", "async"] = "sync"
    """`sync`: training waits until the checkpoint is written. `async`: the state is copied to host
    memory (the size of a rank's weights and optimizer state), and a separate process writes it in
    the background; the next optimizer step waits for the copy only."""
    timeout_seconds: int = Field(default=1800, ge=1, le=MAX_SECONDS)
    """Seconds that a rank may take to write its part of a checkpoint; after them, the save fails on
    all ranks. `parallel.timeout_seconds` does not apply to saves."""
    on_error: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint cannot be written, as on a full disk. `stop`: end the run.
    `continue`: log the error, and continue to train until the next checkpoint."""


class Metrics(Section):
    """Metrics, TensorBoard logs and profiles."""

    log_interval: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Steps between rows of metrics.jsonl; validations write a row too. Only these steps wait for
    the GPU."""
    tensorboard: bool = True
    """Write TensorBoard logs."""
    trackers: tuple[Text, ...] = Field(default=(), strict=False)
    """More trackers that get each row of metrics: `wandb`, `mlflow`, or `MODULE:NAME`, a custom
    function (dtron/run/trackers.py)."""
    profile_start: int = Field(default=0, ge=0, le=MAX_STEPS)
    """First step that torch.profiler records; 0: no profile."""
    profile_steps: int = Field(default=3, ge=1, le=1000)
    """Number of steps that torch.profiler records; the trace is written to RUN/trace/."""
    profile_shapes: bool = False
    """Record the input shapes of operators in the trace, which slows the recorded steps down."""
    profile_ranks: tuple[Annotated[int, Field(ge=0, le=MAX_RANKS)], ...] = Field(
        default=(), strict=False
    )
    """Ranks that torch.profiler records; empty: all."""
    nvtx: bool = False
    """Mark each module's forward and backward of each micro-batch, and the phases of a step, as
    NVTX ranges for Nsight Systems and in torch.profiler's traces. With `compile.enable` the marks
    are of whole forwards."""
    memory_snapshot: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Step whose memory each rank writes to RUN/memory/, by class and module, for `dtron memory
    RUN`; on GPUs also a snapshot of the allocator. If memory ends in that step, its activations are
    in the table as well. 0: only of a failed allocation."""
    batch_hash: bool = False
    """Add `batch` to each row of metrics.jsonl: a hash of all sequences since the last row, equal
    in every layout. Shows whether two runs train on the same data."""
    step_times: bool = False
    """Write the time of every step to RUN/steps.json when the run ends. On GPUs, CUDA events
    measure the times, without waiting in any step."""


class Faults(Section):
    """Handling of signals, hangs, loss spikes, slow ranks and corrupted memory."""

    stop_seconds: int = Field(default=300, ge=0, le=MAX_SECONDS)
    """Seconds that a run may take to save and end after SIGTERM, SIGINT or SIGUSR1; then the run
    ends without a checkpoint, with exit code 74. 0: no limit."""
    hang_seconds: HangSeconds = Field(default=-1, ge=-1, le=MAX_SECONDS)
    """Hang watchdog: seconds without a finished step after which a rank logs where it hangs, writes
    its stacks to RUN/hangs/ and ends with exit code 75. The limit is the same for a validation,
    four times as long for the start and for the first step, and checkpoint.timeout_seconds for a
    save. -1: 0.9 times parallel.timeout_seconds; 0: no watchdog."""
    max_attempts: int = Field(default=10, ge=0, le=MAX_STEPS)
    """End the job after this number of consecutive starts (including restarts) without a new
    checkpoint, even if torchrun's --max-restarts allows more. 0: no limit."""
    on_spike: Literal["", "warn", "skip_data", "rollback"] = ""
    """What to do when the loss is far above its running mean. `warn`: log it. `skip_data`: skip the
    optimizer step. `rollback`: also go back to a checkpoint from before the spike and skip all
    batches since then. Empty: no spike detection."""
    spike_window: int = Field(default=100, ge=2, le=MAX_STEPS)
    """Number of steps in the running mean and standard deviation of the loss."""
    spike_deviations: float = Field(default=8.0, gt=0, le=1e30)
    """A loss this number of standard deviations above the running mean is a spike."""
    rollback_steps: int = Field(default=1, ge=1, le=MAX_STEPS)
    """Minimum number of steps between a spike and the checkpoint to go back to."""
    max_rollbacks: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Maximum number of rollbacks of a run; the next spike ends the run."""
    stragglers_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between logged tables of the slowest ranks; 0: none. A step with a table waits for the
    GPU."""
    replicas_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between comparisons, bit for bit, of the copies that several ranks hold of a parameter;
    0: no comparison."""
    on_corruption: Literal["stop", "warn"] = "stop"
    """What to do when copies of parameters differ between ranks."""
    verify_step: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Step (counted from 1) whose loss and gradients are computed twice and compared bit for bit;
    0: no step."""

    def watched_seconds(self, timeout_seconds: int) -> float:
        """Return `hang_seconds` with -1 resolved; 0: no watchdog."""
        return 0.9 * timeout_seconds if self.hang_seconds < 0 else self.hang_seconds


class Debug(Section):
    """Checks that slow a run down."""

    collectives: bool = False
    """Count the collectives of the first step and write calls and bytes per mesh axis to
    run.json."""
    deterministic: bool = False
    """Use deterministic kernels only, so that two equal runs give bitwise equal results."""
