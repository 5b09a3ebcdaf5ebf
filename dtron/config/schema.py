"""The sections of a run's config: typed keys, each with a docstring that `--help` prints.

Choices are Literals, units are in the names, values are frozen. Rules across several keys are in
`dtron/config/setting_rules.py`; `dtron/config/run_config.py` reads and writes a whole run.
"""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dtron.errors import ConfigError

MAX_RANKS = 2**20
MAX_LAYERS = 10_000
MAX_STEPS = 2**31 - 1
MAX_SEQUENCES = 2**26
MAX_TOKENS = 2**26
"""Most tokens per sequence."""
MAX_SECONDS = 30 * 86400
_VARIABLE = re.compile(r"\$[A-Za-z_{]")
_URL = re.compile(r"[A-Za-z][\w+.-]*://")


def _check_path(path: str) -> str:
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError("no such user has a home directory; write the whole path") from None
    if len(path.encode()) > 4000 or any(len(name.encode()) > 255 for name in path.split("/")):
        raise ValueError("a path has at most 4000 bytes, and each name in it 255")
    return path


def _check_no_variable(path: str) -> str:
    """Refuse $HOME and the like, which a folder would be named after."""
    if _VARIABLE.search(path):
        raise ValueError(
            "environment variables are not expanded; write the whole path, or ~ for the home "
            "folder (a shell expands variables of arguments, but not inside of '...')"
        )
    return path


def _check_local(path: str) -> str:
    if _URL.match(path):
        raise ValueError(
            "not a folder but a URL; use a folder, and checkpoint.dir, which takes URLs, for "
            "checkpoints in a store"
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
    """Keys that `dtron/setup/automatic.py` sets where they are unset or "auto"; until then, and on
    CPUs, they have their default."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse changes of a key, which code has read by then."""
        if name not in type(self).model_fields:
            return super().__setattr__(name, value)
        key = (
            name if type(self).__name__ == "RunConfig" else f"{type(self).__name__.lower()}.{name}"
        )
        raise ConfigError(
            f"{key} = {value!r}: a config cannot be changed; make another one, such as "
            f"RunConfig.load(FILE, ['{key}={value}'])"
        )

    @model_validator(mode="before")
    @classmethod
    def _unset_automatic(cls, values: Any) -> Any:
        """Leave out "auto" of the keys in `automatic`: code that reads a config never sees it."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if not (k in cls.automatic and v == "auto")}


class Run(Section):
    """The run directory."""

    dir: LocalPath = "runs/default"
    """Run directory, no URL: config, metrics, TensorBoard logs and checkpoints. A directory can be
    used again: files of the earlier run are kept, renamed with a number."""
    wait_seconds: float = Field(default=30.0, ge=0, le=86400)
    """Seconds that a start waits for another run in the same directory to end; then it fails."""


class Model(Section):
    """The model and its attention backend."""

    name: Text = "llama"
    """Model family, a key of dtron.models.MODELS: llama, qwen3, gpt, mixtral, qwen3_moe,
    deepseek_v3 or gpt_oss."""
    size: Text = "debug"
    """Size of the model; for llama debug, 1b, 3b, 8b, 70b or 405b. `initial`: take the family and
    the shape from `checkpoint.initial`."""
    override: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config that replace those of the size, in a table
    `[model.override]`."""
    attention: Literal["auto", "fa4", "cudnn", "flash_attn", "flash", "flex", "sdpa", "math"] = (
        "auto"
    )
    """Attention backend; `auto` takes the best one that supports the run, and logs its name."""


class Parallel(Section):
    """Parallelism degrees, numbers of ranks: world size = pp x dp_replicate x dp_shard x cp x
    tp."""

    automatic = frozenset(
        ("dispatcher", "zero", "reduce_by", "copy_engines", "async_tp", "schedule", "cp_method")
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
    """Expert parallelism: ranks, out of dp_shard x cp x tp, that hold different experts; tokens are
    dispatched to them. The other ranks of dp_shard x cp x tp shard each expert's parameters."""
    etp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Expert tensor parallelism: ranks, out of dp_shard x cp x tp, over which the hidden width of
    each expert is split; independent of tp."""
    dispatcher: Literal["all_to_all", "symmetric_memory", "deepep"] = "all_to_all"
    """With ep or etp > 1, how tokens are dispatched to their experts. `all_to_all`: NCCL all-to-all
    for dispatch and combine; the host waits for the GPU once per layer. `symmetric_memory`: ranks
    of one host read each other's memory, without such a wait; set `ep_capacity`. `deepep`: the
    library DeepEP, in bfloat16, if it is installed. `auto`: `symmetric_memory` on GPUs of one host
    if `ep_capacity` is enough for any load (`ep`), else `all_to_all`."""
    ep_capacity: float = Field(default=2.0, ge=1.0, le=1e6)
    """With `dispatcher = "symmetric_memory"`, the most token copies that a rank receives, as a
    multiple of an even load; buffers and activations of experts grow with it. The run stops when a
    rank would receive more; a value of ep is always enough."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage: what dp_shard shards. 3: parameters, gradients and optimizer state; parameters
    are gathered for each forward and backward. 2: gradients and optimizer state; parameters are
    gathered once per step. 1: optimizer state; gradients are reduced once per step. All stages
    shard 16 bytes per parameter (12 of float32 weights and AdamW moments, 4 of gradient). In
    addition, each rank holds 2 bytes per parameter in bfloat16 with 2 or 1, and the unsharded
    gradients in `reduce_dtype` with 1. `auto`: 2 on GPUs if it fits, else 3."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are reduced if a step has several micro-batches. `micro_batch`: after each
    one, so that gradients stay sharded. `step`: once per step, with less communication; each rank
    then holds the unsharded gradients (32 GB for 8B parameters in float32). `auto`: `step` for zero
    = 1 and for dp_shard = 1, else `micro_batch`."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are sent and summed over data-parallel ranks. bfloat16 halves the
    bytes. With several micro-batches, it is refused together with `reduce = "step"` or replicas,
    since micro-batches would be summed in bfloat16 too."""
    reduce_by: Literal["reduce_scatter", "all_to_all"] = "reduce_scatter"
    """How gradients are summed over dp_shard and cp. `all_to_all`: they are sent in `train.dtype`
    and summed in `reduce_dtype` by the receiver: the same sums as a reduce-scatter, from half the
    bytes. Refused where micro-batches are summed before the reduction (`reduce = "step"`). `auto`:
    `all_to_all` in bfloat16 on GPUs of one host with torch before 2.15, else `reduce_scatter`."""
    copy_engines: bool = False
    """Gather parameters, and send gradients with `reduce_by = "all_to_all"`, by the copy engines of
    the GPUs instead of NCCL kernels, so that overlapped matmuls keep all multiprocessors. For
    dp_shard x cp ranks on GPUs of one host. `auto`: true there with `reduce_by =
    "all_to_all"`."""
    prefetch: int = Field(default=1, ge=0, le=MAX_LAYERS)
    """How many FSDP units ahead parameters are gathered while the current unit computes, in forward
    and in backward. More overlaps more and holds more memory."""
    sequence_parallel: bool = True
    """With tp > 1, split the sequence over tp outside of attention and feed-forward: each rank
    computes and holds norms, dropout and residuals for 1 / tp of the tokens. false: for all."""
    async_tp: bool = False
    """With tp > 1 on GPUs, overlap tensor parallelism's all-gathers and reduce-scatters with the
    matmuls that need them, by symmetric memory. `auto`: true for a compiled dense model if tp is
    inside a host and the schedule does not split the backward."""
    schedule: PathText = "1F1B"
    """Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble, DualPipeV, or the path of a .csv file with a schedule of your own. `auto`:
    on GPUs, for dense models without tp and recomputation and with zero below 3, ZBVZeroBubble or
    else Interleaved1F1B if it fits model and memory; else 1F1B."""
    stages_per_rank: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Pipeline stages per rank; 0: the default of the schedule."""
    pp_layout: Text | list[LayerCount] | list[list[Text]] = ""
    """Layers of each pipeline stage: numbers of layers, a layout string such as `Ettt|tttL`, or a
    list of module names per stage; empty: balanced by matmul cost, the head included."""
    defer_head: int = Field(default=0, ge=0, le=MAX_SEQUENCES)
    """With pp > 1, the number of micro-batches whose weight gradients of the head are deferred
    until the pipeline drains; the gradient of each one's logits is held until then. For schedules
    that do not split the backward, such as 1F1B."""
    cp_method: CpMethod | list[CpMethod] = "ring"
    """With cp > 1, how attention sees the tokens of other ranks: ring, all_gather, ulysses
    (all-to-all over heads) or hierarchical (all-to-all within groups of `cp_inner` ranks, a ring
    between them). A list gives one method per layer. `auto`: on GPUs of one host ulysses, or else
    all_gather, for attention without windows; else ring."""
    cp_inner: int = Field(default=0, ge=0, le=MAX_RANKS)
    """Ranks per all-to-all group with `cp_method = "hierarchical"`; 0: the largest proper divisor
    of cp."""
    high_priority: list[Degree] = Field(default_factory=list)
    """Mesh axes whose NCCL collectives run on high-priority CUDA streams, such as ["tp"]."""
    timeout_seconds: int = Field(default=600, ge=1, le=MAX_SECONDS)
    """Seconds that a collective may wait for other ranks before the run is aborted."""

    def cp_methods(self) -> tuple[CpMethod, ...]:
        """`cp_method` as a tuple: one method for all layers, or one per layer."""
        return (self.cp_method,) if isinstance(self.cp_method, str) else tuple(self.cp_method)

    def reduces_once(self, sharded: bool) -> bool:
        """Whether gradients are reduced once per step: `reduce` with "auto" resolved.

        Args:
            sharded: parameters are sharded over several ranks.
        """
        if self.reduce == "auto":
            return self.zero == 1 or not sharded
        return self.reduce == "step"


class Train(Section):
    """The training loop: steps, batch sizes, precision, validation."""

    automatic = frozenset(("loss_chunks",))
    steps: int = Field(default=100, ge=1, le=MAX_STEPS)
    """Optimizer steps."""
    seq_len: int = Field(default=2048, ge=2, le=MAX_TOKENS)
    """Tokens per sequence."""
    global_batch: int = Field(default=8, ge=1, le=MAX_SEQUENCES)
    """Sequences per optimizer step, over all ranks and micro-batches."""
    micro_batch: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    """Sequences that a rank computes at once; gradients are accumulated until `global_batch`."""
    loss_chunks: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    """Number of chunks of a micro-batch's tokens in which head and loss are computed. More chunks
    save memory: only one chunk's logits and their gradient exist at a time. 1: all at once. `auto`:
    1, or on GPUs 4, 8 or 16 if the run needs it to fit."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of computation. Parameters are float32 in both cases; for AdamW's moments see
    `optim.moments`."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout. The same seed gives the same losses in
    every layout."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=1e30)
    """Gradient clipping: gradients are scaled down to this global norm; 0: no clipping."""
    max_skipped: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Number of steps in a row with non-finite gradients that ends the run, at the next logged
    step. Each such step is skipped."""
    eval_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between validations; 0: only after the last step."""
    eval_sequences: int = Field(default=64, ge=0, le=MAX_SEQUENCES)
    """Most held-out sequences per validation; 0: no validation."""
    sample_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Tokens of sample text to generate after the last step; 0: none."""
    sample_prompt: Text = "In the beginning"
    """Text that the sample continues."""
    gc_interval: int = Field(default=200, ge=1, le=MAX_STEPS)
    """Steps between Python's garbage collections, on all ranks at the same step, so that no rank
    waits for another's."""


class Data(Section):
    """Training data: source, tokenizer, packing."""

    source: Literal["files", "hf"] = "files"
    """`files`: JSONL or text files, tokenized once and cached. `hf`: a Hugging Face data set, which
    needs the extra `hf`."""
    paths: tuple[StatedPath, ...] = Field(default=("assets/kjv.jsonl.gz",), strict=False)
    """Files of `source = "files"`, relative to the working directory: .jsonl with one document per
    line, .txt with one document per file; each also as .gz."""
    text_key: Text = "text"
    """Key of a JSON line, or column of a Hugging Face data set, that holds the text."""
    tokenizer: StatedPath = "byte"
    """`byte`, or the path of a Hugging Face tokenizer.json or of its folder. If it is not set and
    `checkpoint.initial` has a tokenizer, that one is used."""
    eos_token: Text = ""
    """Token that ends a document; empty: the first usual one in the vocabulary, such as </s>."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of the documents that is held out for validation, chosen by a hash of their
    position. Copies of a held-out document are held out too."""
    packing: Literal["cut", "best_fit", "pad"] = "cut"
    """How documents become sequences. `cut`: documents are concatenated and cut every train.seq_len
    tokens; no padding, but most documents are split. `best_fit`: whole documents share a sequence
    (best-fit decreasing), padded. `pad`: one document per sequence, padded. The last two split only
    documents longer than a sequence, and no label is a token of another document."""
    mask_documents: bool = False
    """Restrict attention to each document, and restart positions at its first token."""
    max_document_mb: float = Field(default=128.0, gt=0, le=10_000)
    """Longest document or line of a file, in MB (10^6 bytes). A longer one is an error, so that no
    file can fill the memory."""
    cache_dir: LocalPath = "~/.cache/dtron"
    """Folder of tokenized data, which later runs use again."""
    hf_path: StatedPath = ""
    """Name or local path of the Hugging Face data set."""
    hf_name: Text = ""
    """Configuration of the Hugging Face data set, if it has several."""
    hf_split: Text = "train"
    """Split of the Hugging Face data set."""
    hf_streaming: bool = False
    """Read the Hugging Face data set as a stream instead of tokenizing it before the start. Then
    documents are not shuffled, and the first ones are held out for validation."""


class Optim(Section):
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """A key of dtron.training.optim.OPTIMIZERS. `sgd` has no momentum and no weight decay."""
    lr: float = Field(default=3e-4, gt=0, le=1e6)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay rate of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay rate of the second moment."""
    eps: float = Field(default=1e-8, gt=0, le=1.0)
    """AdamW's epsilon, which is added to the root of the second moment."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of AdamW's moments. bfloat16 saves 4 of their 8 bytes per parameter; it needs beta2 of
    0.99 at most, since bfloat16 rounds smaller changes away."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """AdamW's decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""


class Schedule(Section):
    """The learning rate schedule; lengths are fractions of train.steps."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Shape of the schedule, a key of dtron.config.learning_rate.SCHEDULES."""
    warmup: Warmup = Field(default=0.1, ge=0, le=1e9)
    """Fraction of the steps, below 1, in which the learning rate rises linearly from 0."""
    decay: float = Field(default=0.2, ge=0, le=1)
    """Fraction of the steps, at the end, in which the rate of `wsd` falls; for `wsd` only."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate divided by the peak, for linear, cosine and wsd."""


class Recompute(Section):
    """Activation checkpointing and offloading of blocks: less memory for more time."""

    mode: Literal["none", "full", "attention", "selective"] = "none"
    """What blocks keep for their backward; the rest is recomputed. `none`: everything. `full`: the
    block's input only. `attention`: also the outputs of attention, which cost most to recompute
    for long sequences. `selective`: also the outputs of matmuls."""
    every: int = Field(default=1, ge=1, le=MAX_LAYERS)
    """Recompute every n-th block only; 1: all blocks."""
    first: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Recompute the first n blocks only; 0: all. The first stage of a pipeline keeps activations of
    the most micro-batches."""
    offload: bool = False
    """Keep what blocks save for their backward in pinned host memory; copies overlap with the
    computation of the next block. On GPUs only."""

    def acts_on(self, block: int) -> bool:
        """Whether a block, by its index in the model, recomputes anything."""
        chosen = block % self.every == 0 and (not self.first or block < self.first)
        return chosen and self.mode != "none"


class Compile(Section):
    """torch.compile, block by block."""

    enable: bool = False
    """Compile every block and the loss."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`inductor`, or `aot_eager` to check graph capture without generating code."""


class Float8(Section):
    """float8 training: matmuls of linear layers in float8; weights, optimizer state and checkpoints
    keep their dtypes."""

    recipe: Literal["", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"] = ""
    """Scaling recipe, a key of dtron.float8.RECIPES; empty: no float8. `tensorwise`: one scale per
    tensor. `rowwise`: one per row, powers of two. `rowwise_with_gw_hp`: as rowwise, with weight
    gradients in `train.dtype`. `blockwise`: one per 1 x 128 activations and 128 x 128 weights, as
    DeepSeek-V3. `mxfp8`: one per 1 x 32 elements, powers of two. On hardware without the matmul
    it is emulated, slowly, with a warning."""
    scaling: Literal["dynamic", "delayed"] = "dynamic"
    """How scales are computed. `dynamic`: from the values that are cast. `delayed`, with
    `tensorwise` only: from the largest absolute values of the last `amax_history` steps, and for
    weights after each update; ranks then exchange scales once per step, not in each layer."""
    amax_history: int = Field(default=16, ge=1, le=4096)
    """With `scaling = "delayed"`, number of last steps whose largest absolute values set the
    scales."""
    filter: list[Text] | Literal["auto"] = Field(default_factory=list)
    """Patterns of the linear layers to convert, such as `blocks.*.ffn.*`; empty: all layers of the
    blocks whose dims are multiples of 16. `auto`: those among them that are faster in float8,
    as measured on the first rank's GPU when the run starts; all of them if float8 is emulated."""
    skip: list[Text] = Field(default_factory=list)
    """Patterns of linear layers that stay in `train.dtype`, such as `blocks.*.attn.w[kv]`."""
    skip_first: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of blocks at the start of the model that stay in `train.dtype`."""
    skip_last: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of blocks at the end of the model that stay in `train.dtype`."""
    output: bool = False
    """Convert the head (output projection) too."""
    experts: bool = False
    """Convert the matmuls of experts too: one scale per row of inputs and of weights with every
    recipe; weight gradients in `train.dtype`."""
    dispatch: bool = False
    """With ep or etp > 1, dispatch tokens to their experts in float8, and in the backward the
    gradients of the experts' outputs: one scale per 128 elements of a token. The combine is in
    `train.dtype`. For `all_to_all` and `symmetric_memory`, with any recipe or none."""
    all_gather: bool = False
    """Gather weights over dp_shard and cp in float8: half the bytes of bfloat16. They are cast from
    the float32 weights, not from bfloat16 copies. With `tensorwise` and `blockwise`; the scales of
    all weights are computed in one reduction after each update."""
    gather_inputs: bool = False
    """With parallel.sequence_parallel, gather the input of each attention and feed-forward over tp
    in float8: half the bytes of bfloat16. With `tensorwise` only."""
    report_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between reports of the accuracy of each layer's casts in the metrics: signal-to-noise
    ratio in dB, and the fractions that become zero or saturate. Such a step runs without
    torch.compile. A multiple of metrics.log_interval; 0: never."""


class Checkpoint(Section):
    """Saving, resuming, and initial weights."""

    dir: StatedPath = ""
    """Folder of this run's checkpoints, which all ranks share, or a URL that fsspec knows (`s3://`,
    `gs://`, ...); empty: RUN/checkpoints. No two runs may use the same."""
    interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between checkpoints in `dir`; 0: only after the last step."""
    fast_dir: StatedPath = ""
    """Second, faster checkpoint folder that all ranks share, such as the disk or /dev/shm of a run
    on one node. Checkpoints are written there first; those due by `interval` are copied to `dir`
    in the background. Empty: none."""
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
    """Allow a resumed run to have other training data or another tokenizer than the checkpoint; it
    continues at the same sequence number. Also allow another tokenizer than that of `initial`."""
    initial: StatedPath = ""
    """Initial weights of a run that does not resume: a Hugging Face folder, a run or a checkpoint.
    Only weights are read, no optimizer state. Empty: random initialization."""
    verify: bool = True
    """Compare the SHA-256 of every file of a checkpoint before it is loaded; each rank reads some
    of the files. false: check names and sizes only."""
    keep: int = Field(default=2, ge=0, le=MAX_STEPS)
    """Number of newest checkpoints that are kept in `dir`; 0: all."""
    keep_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """With `keep`, also keep the checkpoints of all steps that are multiples of this; 0: none."""
    mode: Literal["sync", "async"] = "sync"
    """`sync`: training waits until the checkpoint is written. `async`: the state is copied to host
    memory, as large as this rank's weights and optimizer state, and a separate process writes it
    in the background; the next optimizer step waits for the copy only."""
    timeout_seconds: int = Field(default=1800, ge=1, le=MAX_SECONDS)
    """Seconds that one rank may take for its part of a checkpoint; then the save fails on all
    ranks. Saves do not count towards `parallel.timeout_seconds`."""
    on_error: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint cannot be written, as on a full disk. `stop`: end the run.
    `continue`: log the error and train on to the next checkpoint."""


class Metrics(Section):
    """Metrics, TensorBoard logs and profiles."""

    log_interval: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Steps between rows of metrics.jsonl; validations write a row too. Only these steps wait for
    the GPU."""
    tensorboard: bool = True
    """Write TensorBoard logs."""
    profile_start: int = Field(default=0, ge=0, le=MAX_STEPS)
    """First step that torch.profiler records; 0: no profile."""
    profile_steps: int = Field(default=3, ge=1, le=1000)
    """Number of steps that torch.profiler records; the trace is written to RUN/trace/."""
    profile_shapes: bool = False
    """Record the input shapes of operators in the trace, which slows the recorded steps down."""
    batch_hash: bool = False
    """Add `batch` to each row of metrics.jsonl: a hash of all sequences since the last row, equal
    in every layout. Shows whether two runs train on the same data."""
    step_times: bool = False
    """Write the time of every step to RUN/steps.json when the run ends. On GPUs they are measured
    by CUDA events, which make no step wait."""


class Faults(Section):
    """Handling of signals, hangs, loss spikes, slow ranks and corrupted memory."""

    stop_seconds: int = Field(default=300, ge=0, le=MAX_SECONDS)
    """Seconds that a run may take to save and end after SIGTERM, SIGINT or SIGUSR1; then it is
    ended without a checkpoint, with exit code 74. 0: no limit."""
    hang_seconds: HangSeconds = Field(default=-1, ge=-1, le=MAX_SECONDS)
    """Hang watchdog: seconds without a finished step after which a rank logs where it hangs, writes
    its stacks to RUN/hangs/ and ends with exit code 75. Validations have the same limit, the start
    and the first step four times as much, saves checkpoint.timeout_seconds. -1: 0.9 times
    parallel.timeout_seconds; 0: no watchdog."""
    max_attempts: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Attempts in a row without a new checkpoint after which the job ends, even if torchrun's
    --max-restarts allows more. 0: no limit."""
    on_spike: Literal["", "warn", "skip_data", "rollback"] = ""
    """What to do when the loss is far above its running mean. `warn`: log it. `skip_data`: skip the
    optimizer step. `rollback`: also go back to a checkpoint from before the spike and skip all
    batches since then. Empty: no spike detection."""
    spike_window: int = Field(default=100, ge=2, le=MAX_STEPS)
    """Number of steps in the running mean and standard deviation of the loss."""
    spike_deviations: float = Field(default=8.0, gt=0, le=1e30)
    """Standard deviations above the running mean from which a loss is a spike."""
    rollback_steps: int = Field(default=1, ge=1, le=MAX_STEPS)
    """Least number of steps between a spike and the checkpoint to go back to."""
    max_rollbacks: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Most rollbacks of a run; the next spike ends it."""
    stragglers_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between logged tables of the slowest ranks; 0: none. Such a step waits for the GPU."""
    replicas_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between bitwise comparisons of parameters that several ranks hold copies of; 0:
    none."""
    on_corruption: Literal["stop", "warn"] = "stop"
    """What to do when copies of parameters differ between ranks."""
    verify_step: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Step (from 1) whose loss and gradients are computed twice and compared bit for bit; 0:
    none."""

    def watched_seconds(self, timeout_seconds: int) -> float:
        """`hang_seconds` with -1 resolved; 0: no watchdog."""
        return 0.9 * timeout_seconds if self.hang_seconds < 0 else self.hang_seconds


class Debug(Section):
    """Checks that slow a run down."""

    collectives: bool = False
    """Count the collectives of the first step and write calls and bytes per mesh axis to
    run.json."""
    deterministic: bool = False
    """Use deterministic kernels only, so that two equal runs give bitwise equal results."""
