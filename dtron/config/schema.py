"""The sections of a run's config: typed keys with a docstring each, which `--help` prints.

Choices are Literals, units are in the names, values are frozen. What depends on several keys is in
`dtron/config/rules.py`; `dtron/config/run_config.py` reads and writes a whole run.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_RANKS = 2**20
MAX_LAYERS = 10_000
MAX_STEPS = 2**31 - 1
MAX_SEQUENCES = 2**26
MAX_TOKENS = 2**26
"""Of a sequence."""
MAX_SECONDS = 30 * 86400


def _check_path(path: str) -> str:
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError("no such user has a home directory") from None
    if len(path.encode()) > 4000 or any(len(name.encode()) > 255 for name in path.split("/")):
        raise ValueError("a path has at most 4000 bytes, and each name in it 255")
    return path


def _check_hang_seconds(seconds: float) -> float:
    if seconds not in (-1, 0) and seconds < 0.1:
        raise ValueError("use -1, 0, or at least 0.1 seconds")
    return seconds


Text = Annotated[str, Field(max_length=10_000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]
"""Without control characters, which TOML cannot hold; but for tabs and line breaks."""
PathText = Annotated[
    str, Field(max_length=4000, pattern=r"^[^\x00-\x1f\x7f]*$"), AfterValidator(_check_path)
]
HangSeconds = Annotated[float, AfterValidator(_check_hang_seconds)]
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


class Run(Section):
    """Where a run lives."""

    dir: PathText = "runs/default"
    """Run directory: config, metrics, TensorBoard logs and checkpoints. Reusing one keeps what
    is in it: files of an earlier run are renamed with a number."""
    wait_seconds: float = Field(default=30.0, ge=0, le=86400)
    """How long a start waits for another run in the same directory to end before it is refused."""


class Model(Section):
    """Which model, and how its attention is computed."""

    name: Text = "llama"
    """A row of dtron.models.MODELS: llama, qwen3, gpt, mixtral, qwen3_moe, deepseek_v3 or
    gpt_oss."""
    size: Text = "debug"
    """A size of that model: for llama debug, 1b, 3b, 8b, 70b or 405b; or `initial`: name and shape
    of the model in `checkpoint.initial`."""
    override: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's own config that replace those of the size, as `[model.override]`."""
    attention: Literal["auto", "fa4", "cudnn", "flash_attn", "flash", "flex", "sdpa", "math"] = (
        "auto"
    )
    """Attention backend; `auto` takes the best one available and logs its name."""


class Parallel(Section):
    """Degrees of parallelism. World size = pp x dp_replicate x dp_shard x cp x tp."""

    dp_replicate: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Data-parallel replicas: gradients are all-reduced over this axis."""
    dp_shard: int = Field(default=-1, ge=-1, le=MAX_RANKS)
    """Data-parallel ranks that share parameters, gradients and optimizer state; -1: the rest."""
    cp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Context parallelism: ranks that share each sequence."""
    tp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Tensor parallelism: ranks that share each layer's heads and neurons."""
    pp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Pipeline parallelism: ranks that share the layers."""
    ep: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Expert parallelism: ranks of dp_shard x cp x tp that hold different experts, to which tokens
    travel. Those it leaves share each expert's parameters as dp_shard does."""
    etp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Ranks of dp_shard x cp x tp that share the width of each expert, whatever tp is."""
    dispatcher: Literal["all_to_all", "symmetric_memory", "deepep"] = "all_to_all"
    """With ep or etp > 1, how tokens get to their experts. `all_to_all`: an all-to-all each way,
    with one wait of the host a layer. `symmetric_memory`: ranks of one host read each other's
    memory, and the host waits for nothing; buffers are bounded by `ep_capacity`. `deepep`: by the
    library DeepEP, in bfloat16, where it is installed."""
    ep_capacity: float = Field(default=2.0, ge=1.0, le=1e6)
    """With `dispatcher = "symmetric_memory"`, rows that a rank takes at most, over those of even
    loads: what experts keep, and the memory that ranks share, grow with it. A run stops where loads
    need more; ep is enough for any."""
    zero: Literal[1, 2, 3] = 3
    """What dp_shard shards. 3: parameters, gradients, optimizer state; parameters are gathered
    for each forward and backward. 2: gradients and optimizer state; parameters are gathered once
    a step. 1: optimizer state; gradients are reduced once a step. Beside the sharded 16 bytes a
    parameter (12 of weights and AdamW moments in fp32, 4 of gradient), 2 and 1 hold 2 bytes a
    parameter in bfloat16, and 1 holds a whole gradient of `reduce_dtype` as well."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """When gradients are reduced under accumulation. `micro_batch`: each time, gradients stay
    sharded. `step`: once, the unsharded gradients of all parameters are held meanwhile (32 GB for
    8B parameters in float32). `auto`: `step` for zero = 1 and for pure replication
    (dp_shard = 1), else `micro_batch`."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over data-parallel ranks. bfloat16 halves the bytes; it
    is refused where it would sum micro-batches too: several of them with `step` or replicas."""
    reduce_by: Literal["reduce_scatter", "all_to_all"] = "reduce_scatter"
    """How gradients are summed over ranks that share parameters. `all_to_all`: they travel in the
    dtype of `train.dtype` and are summed in `reduce_dtype` where they arrive, the same sums from
    half the bytes. Refused where several micro-batches are summed before."""
    copy_engines: bool = False
    """Copy parameters, and gradients with `reduce_by = "all_to_all"`, from the memory of the ranks
    that share them, which are GPUs of one host: their copy engines then move what NCCL's kernels
    would, and the products beside it keep all multiprocessors."""
    prefetch: int = Field(default=1, ge=0, le=MAX_LAYERS)
    """How many units ahead parameters are gathered while the current one computes, in forward and
    in backward."""
    sequence_parallel: bool = True
    """With tp > 1, split the sequence over tp between attention and feed-forward: norms, dropout
    and residuals cost memory and time for T / tp tokens. Off, each rank holds all tokens."""
    async_tp: bool = False
    """With tp > 1 on GPUs, overlap tensor parallelism's all-gathers and reduce-scatters with the
    matrix products that need them (symmetric memory)."""
    schedule: PathText = "1F1B"
    """Pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble, DualPipeV, or the path of a .csv file with your own."""
    stages_per_rank: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Pipeline stages a rank; 0: what the schedule takes by default."""
    pp_layout: Text | list[LayerCount] | list[list[Text]] = ""
    """Which layers are in which stage: counts of layers, a layout string such as `Ettt|tttL`, or a
    list of module names for each stage; empty: balanced, the head counted by its size."""
    defer_head: int = Field(default=0, ge=0, le=MAX_SEQUENCES)
    """With pp > 1 and a schedule of whole backwards: of how many micro-batches the head's weight
    gradients are put off until the pipeline drains. Each holds its logits' gradient meanwhile."""
    cp_method: CpMethod | list[CpMethod] = "ring"
    """With cp > 1, how attention gets at the tokens of other ranks: ring, all_gather, ulysses
    (all-to-all over heads) or hierarchical (all-to-all inside, ring outside); a list has one for
    each layer."""
    cp_inner: int = Field(default=0, ge=0, le=MAX_RANKS)
    """Ranks of the all-to-all of `cp_method = "hierarchical"`; 0: the largest proper divisor of
    cp."""
    high_priority: list[Degree] = Field(default_factory=list)
    """Mesh axes whose NCCL collectives run on streams of high priority, on GPUs."""
    timeout_seconds: int = Field(default=600, ge=1, le=MAX_SECONDS)
    """How long a collective may wait for its peers before the run is aborted."""

    def cp_methods(self) -> tuple[CpMethod, ...]:
        """`cp_method` as a tuple: one for all layers, or one for each."""
        return (self.cp_method,) if isinstance(self.cp_method, str) else tuple(self.cp_method)

    def reduces_once(self, sharded: bool) -> bool:
        """Whether gradients are reduced once a step: `reduce` resolved, with ranks that share
        parameters or without."""
        if self.reduce == "auto":
            return self.zero == 1 or not sharded
        return self.reduce == "step"


class Train(Section):
    """The loop: how many steps of how many sequences, in which precision."""

    steps: int = Field(default=100, ge=1, le=MAX_STEPS)
    """Optimizer steps."""
    seq_len: int = Field(default=2048, ge=2, le=MAX_TOKENS)
    """Tokens a sequence."""
    global_batch: int = Field(default=8, ge=1, le=MAX_SEQUENCES)
    """Sequences a step, over all ranks and micro-batches."""
    micro_batch: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    """Sequences a rank computes at once."""
    loss_chunks: int = Field(default=1, ge=1, le=MAX_SEQUENCES)
    """Head and loss are computed in this many chunks of a micro-batch's tokens, of whose logits and
    their gradient one chunk exists at a time; 1: all logits at once."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of computation. Parameters and optimizer state are float32 in both cases."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout. The same seed gives the same losses in
    every layout."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=1e30)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    max_skipped: int = Field(default=10, ge=1, le=MAX_STEPS)
    """A step whose gradients are not finite is skipped; this many in a row end the run, at the next
    logged row."""
    eval_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between validations on the held-out split; 0: only after the last step."""
    eval_sequences: int = Field(default=64, ge=0, le=MAX_SEQUENCES)
    """Held-out sequences a validation takes, if there are so many; 0: no validation."""
    sample_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Tokens of text to generate after the last step."""
    sample_prompt: Text = "In the beginning"
    """What the generated text starts with."""
    gc_interval: int = Field(default=200, ge=1, le=MAX_STEPS)
    """Steps between garbage collections, which all ranks do at the same step."""


class Data(Section):
    """What is trained on."""

    source: Literal["files", "hf"] = "files"
    """`files`: JSONL or text files, tokenized once and cached. `hf`: a Hugging Face data set
    (needs the extra `hf`)."""
    paths: tuple[PathText, ...] = Field(default=("assets/kjv.jsonl.gz",), strict=False)
    """Files of `source = "files"`, relative to the working directory: .jsonl with one document a
    line, .txt with one document a file, both also as .gz."""
    text_key: Text = "text"
    """Key of a JSON line, or column of a Hugging Face data set, that holds the text."""
    tokenizer: PathText = "byte"
    """`byte`, or the path of a Hugging Face tokenizer.json or of its folder; where it is not set,
    that of `checkpoint.initial`, if it has one."""
    eos_token: Text = ""
    """Token that ends a document; empty: the tokenizer's usual one."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of documents held out for validation, chosen by a hash of their position; copies of a
    document are on its side."""
    packing: Literal["cut", "best_fit", "pad"] = "cut"
    """How documents become sequences. `cut`: laid end to end and cut every train.seq_len tokens; no
    padding, and most documents are split. `best_fit`: whole documents share a sequence where they
    fit best, and what is left is padding. `pad`: one document a sequence, padded. With the last two
    only documents longer than a sequence are split, and no label crosses to another document."""
    mask_documents: bool = False
    """Keep attention inside each document and restart positions there."""
    max_document_mb: float = Field(default=128.0, gt=0, le=10_000)
    """Longest document or line of a file, in million bytes; a longer one is an error, so that no
    file fills the memory."""
    cache_dir: PathText = "~/.cache/dtron"
    """Where tokenized data is kept."""
    hf_path: PathText = ""
    """Name or local path of the Hugging Face data set."""
    hf_name: Text = ""
    """Its configuration, if it has several."""
    hf_split: Text = "train"
    """Its split."""
    hf_streaming: bool = False
    """Read it as a stream instead of tokenizing it once; documents then come in stream order and
    the first ones are the held-out split."""


class Optim(Section):
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """A row of dtron.training.optim.OPTIMIZERS. `sgd` is plain: no momentum, no decay."""
    lr: float = Field(default=3e-4, ge=0, le=1e6)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0, le=1.0)
    """AdamW's epsilon."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which AdamW keeps its moments. bfloat16 saves 4 of their 8 bytes a parameter; beta2
    is then 0.99 at most, because bfloat16 does not see smaller changes."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""


class Schedule(Section):
    """The learning rate as a function of the step; lengths are fractions of train.steps."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """A row of dtron.config.learning_rate.SCHEDULES."""
    warmup: float = Field(default=0.1, ge=0, le=1)
    """Share of the steps over which the rate rises linearly from 0."""
    decay: float = Field(default=0.2, ge=0, le=1)
    """Share of the steps over which `wsd` falls at the end; no other schedule reads it."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """Last learning rate over peak, for linear, cosine and wsd."""


class Recompute(Section):
    """What blocks keep for their backward, and where: memory for time."""

    mode: Literal["none", "full", "attention", "selective"] = "none"
    """`full`: keep a block's input only. `attention`: and the outputs of attention, which for long
    sequences cost most to compute again. `selective`: and the results of matrix products."""
    every: int = Field(default=1, ge=1, le=MAX_LAYERS)
    """Recompute every n-th block; 1: all of them."""
    offload: bool = False
    """Keep what blocks need for their backward in pinned host memory instead, copied beside the
    computation of the next block. On GPUs."""


class Compile(Section):
    """torch.compile, block by block."""

    enable: bool = False
    """Compile every block and the loss."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`inductor`, or `aot_eager` to check graph capture without generating code."""


class Float8(Section):
    """float8 training: linear layers multiply in 8 bits; weights, optimizer state and checkpoints
    stay what they are."""

    recipe: Literal["", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"] = ""
    """A row of dtron.float8.RECIPES; empty: no float8. `tensorwise`: one scale a tensor. `rowwise`:
    one a row, powers of two. `rowwise_with_gw_hp`: the same, weight gradients in `train.dtype`.
    `blockwise`: 1 x 128 activations and 128 x 128 weights, as DeepSeek-V3. `mxfp8`: 1 x 32, powers
    of two. Where the hardware does not multiply them, they are emulated, slowly, and the log shows
    so."""
    scaling: Literal["dynamic", "delayed"] = "dynamic"
    """When the scales of inputs and gradients are known. `dynamic`: by their own values. `delayed`,
    with `tensorwise`: before the step, by the largest values of the last `amax_history` steps;
    those of weights after each update. Ranks share scales once a step then, not in each layer."""
    amax_history: int = Field(default=16, ge=1, le=4096)
    """Steps whose largest values count in delayed scales."""
    filter: list[Text] | Literal["auto"] = Field(default_factory=list)
    """Patterns of the linear layers to convert, such as `blocks.*.ffn.*`; empty: all those of the
    blocks whose dims are multiples of 16. `auto`: of these, the ones that are faster in float8 by
    a measurement on the first rank's GPU when the run starts; all where products are emulated."""
    skip: list[Text] = Field(default_factory=list)
    """Patterns of linear layers that stay in `train.dtype`, such as `blocks.*.attn.w[kv]`."""
    skip_first: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """How many of the first blocks stay in `train.dtype`."""
    skip_last: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """How many of the last blocks stay in `train.dtype`."""
    output: bool = False
    """Convert the head too."""
    experts: bool = False
    """Multiply the rows of experts in float8 too: a scale a row of inputs and matrices, whatever
    the recipe; weight gradients in `train.dtype`."""
    dispatch: bool = False
    """With ep or etp > 1, send rows to their experts in float8, and in the backward the gradients
    of results: a scale for each 128 elements of a row. What comes back travels in `train.dtype`.
    With `all_to_all` and `symmetric_memory`, and with any recipe or none."""
    all_gather: bool = False
    """Gather weights over data-parallel ranks in float8: half the bytes of bfloat16. With
    `tensorwise`; scales of all weights are computed in one reduction after each update. Needs the
    extra `float8`."""
    gather_inputs: bool = False
    """With sequence parallelism, gather the input of each attention and feed-forward in float8:
    half the bytes of bfloat16. With `tensorwise`."""
    report_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Logged steps at which metrics say how accurate the casts of each layer are: its
    signal-to-noise ratio in dB, and which share of it becomes zero or saturates. These steps run
    without compilation. A multiple of metrics.log_interval; 0: never."""


class Checkpoint(Section):
    """Saving and resuming."""

    dir: PathText = ""
    """Where checkpoints go, as a folder that all ranks share or a URL that fsspec knows (`s3://`,
    `gs://`, ...), of this run alone; empty: RUN/checkpoints."""
    interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between checkpoints; 0: only after the last step."""
    fast_dir: PathText = ""
    """A faster folder that all ranks share, such as the disk or /dev/shm of a run's only node:
    checkpoints are written there, and copied to `dir` where they are due there; empty: none."""
    fast_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between checkpoints in `fast_dir`; those of `interval` come by it too."""
    fast_keep: int = Field(default=1, ge=1, le=MAX_STEPS)
    """How many of the newest checkpoints are kept in `fast_dir`."""
    last: bool = True
    """Save after the last step."""
    resume: PathText = ""
    """`latest` (of this run; starts afresh if there is none), or the path or URL of a run or of one
    checkpoint; empty: start afresh. Where torchrun restarts a job, it goes on from the newest
    checkpoint that the job has written."""
    allow_data_change: bool = False
    """Resume although the training data or the tokenizer differ from those of the checkpoint, at
    the same sequence number; or start with another tokenizer than that of `initial`."""
    initial: PathText = ""
    """Where a run that does not resume takes its weights from: a Hugging Face folder, a run, or a
    checkpoint, of whose state nothing else is taken; empty: they are drawn."""
    verify: bool = True
    """Before a checkpoint is loaded, compare the checksum of each of its files, which the ranks
    share; false: their names and sizes alone."""
    keep: int = Field(default=2, ge=0, le=MAX_STEPS)
    """How many of the newest checkpoints are kept; 0: all."""
    keep_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Checkpoints of steps that this divides are kept beside them; 0: none."""
    mode: Literal["sync", "async"] = "sync"
    """`async`: the state is copied to host memory (of the size of this rank's weights and optimizer
    state), which a process of its own writes; the next update waits for the copy alone. `sync`:
    training waits until it is written."""
    timeout_seconds: int = Field(default=1800, ge=1, le=MAX_SECONDS)
    """How long a rank's disk or store may take for its part of a checkpoint before the save is
    given up, on all ranks; `parallel.timeout_seconds` is for training alone."""
    on_error: Literal["stop", "continue"] = "stop"
    """A checkpoint that cannot be written, as on a full disk, ends the run, or is reported and
    tried again at the next one."""


class Metrics(Section):
    """What is logged."""

    log_interval: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Steps between rows of metrics.jsonl; validations write a row too. The device is waited for at
    these steps alone."""
    tensorboard: bool = True
    """Write TensorBoard logs."""
    profile_start: int = Field(default=0, ge=0, le=MAX_STEPS)
    """First step of a torch.profiler window; 0: no profile."""
    profile_steps: int = Field(default=3, ge=1, le=1000)
    """Length of that window; the trace goes to RUN/trace/."""
    profile_shapes: bool = False
    """Keep the shapes of operators' inputs in the trace, at some cost while it is taken."""
    batch_hash: bool = False
    """Add to each row `batch`, a hash of all sequences since the last one, the same in every
    layout."""
    step_times: bool = False
    """Write the time of every step to RUN/steps.json when the run ends. On GPUs an event is put
    behind each step and read at the end: nothing is waited for."""


class Faults(Section):
    """What is done about signals, hangs, loss spikes, slow ranks and corrupted memory."""

    stop_seconds: int = Field(default=300, ge=0, le=MAX_SECONDS)
    """After SIGTERM, SIGINT or SIGUSR1: seconds in which the run has to have saved and ended; then
    it is ended without, with exit code 74. 0: as long as it takes."""
    hang_seconds: HangSeconds = Field(default=-1, ge=-1, le=MAX_SECONDS)
    """Seconds without a finished step, after which a rank says where it is, writes its stacks to
    RUN/hangs/ and ends with exit code 75. A validation between steps has as long, a save what
    checkpoint.timeout_seconds says; the start, in which ranks meet and build the model, and the
    first step have four times that. -1: nine tenths of
    parallel.timeout_seconds; 0: never."""
    max_attempts: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Attempts in a row without a new checkpoint, after which the job is ended, whatever
    torchrun's --max-restarts says. 0: any number."""
    on_spike: Literal["", "warn", "skip_data", "rollback"] = ""
    """What is done about a loss that is far above those before. `skip_data`: its step is not taken.
    `rollback`: and the run goes back to a checkpoint from before it; all batches since then are
    left out. Empty: nothing."""
    spike_window: int = Field(default=100, ge=2, le=MAX_STEPS)
    """Steps over which the loss's mean and deviation run."""
    spike_deviations: float = Field(default=8.0, gt=0, le=1e30)
    """How many deviations above the mean a loss is a spike."""
    rollback_steps: int = Field(default=1, ge=1, le=MAX_STEPS)
    """The checkpoint to go back to is at least this many steps older than the spike."""
    max_rollbacks: int = Field(default=3, ge=1, le=MAX_STEPS)
    """The run ends at the next spike after so many."""
    stragglers_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between tables of the slowest ranks; 0: none. Such a step waits for the device."""
    replicas_interval: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between comparisons of the parameters that several ranks hold; 0: none."""
    on_corruption: Literal["stop", "warn"] = "stop"
    """What is done when they differ."""
    verify_step: int = Field(default=0, ge=0, le=MAX_STEPS)
    """A step whose loss and gradients are computed twice and compared bit for bit; 0: none."""

    def watched_seconds(self, timeout_seconds: int) -> float:
        """`hang_seconds`, resolved; 0: no watchdog."""
        return 0.9 * timeout_seconds if self.hang_seconds < 0 else self.hang_seconds


class Debug(Section):
    """Costly checks."""

    collectives: bool = False
    """Count the collectives of the first step, calls and bytes by axis, into run.json."""
    deterministic: bool = False
    """Deterministic kernels: the same run twice gives the same bits."""
