"""Self-attention, and BACKENDS, the table of its implementations.

A backend is a row of BACKENDS: a function of local tensors, its requirements, its features, and the
form in which it takes documents. The table is in order of preference. `choose_backend` returns the
first row that supports the run, or raises an error that says why the requested row does not. A
model is built with one backend; there is no global setting.

Shapes: B sequences, T tokens, H query heads, G key/value heads (H a multiple of G; H / G query
heads share one), K = head_dim. Heads are (B, T, H, K), as the projections produce them.
Sources: FlashAttention arXiv:2205.14135, -2 arXiv:2307.08691, -3 arXiv:2407.08608; FlexAttention
arXiv:2412.05496; grouped queries arXiv:2305.13245.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dtron.errors import ConfigError, nearest
from dtron.kernels.attention import KERNELS, Tables, document_segments
from dtron.kernels.flash4 import flash4
from dtron.kernels.torch_internals import mark_dynamic
from dtron.models.config import DecoderConfig, LayerKind
from dtron.models.dropout import AttentionDropout
from dtron.models.layers import norm
from dtron.models.rope import apply_rope, yarn_mscale

Mask = Tensor | BlockMask | Tables | None  # None: no documents
WIDEST_FLASH = 256
"""Width of the widest heads that FlashAttention and cuDNN support. For wider ones torch has
FlexAttention and its memory-efficient kernel, which have no row in KERNELS."""


class AttentionCore(nn.Module):
    """Attention over given queries, keys and values; context parallelism replaces its forward.

    Args:
        window: sliding window of this layer, 0: no window; None: config.window.
    """

    def __init__(self, backend: "Backend", config: DecoderConfig, window: int | None = None):
        super().__init__()
        self.backend, self.scale = backend, score_scale(config)
        self.window = config.window if window is None else window
        self.softcap, self.causal = config.softcap, config.causal
        self.by_kernel = modifies_scores(config)

    @property
    def context_kernel(self) -> str:
        """Key in `dtron.kernels.attention.KERNELS`, for context parallelism."""
        return self.backend.kernel

    @property
    def scoring(self) -> tuple[int, float, float]:
        """(window, soft cap, scale) of this module, for context parallelism."""
        return self.window, self.softcap, self.scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sink: Tensor | None = None
    ) -> Tensor:
        """Compute attention.

        Args:
            q: (B, T, H, K).
            k: (B, T, G, K).
            v: (B, T, G, V), V = K unless the backend supports narrow values.
            mask: from the backend's `prepare`.
            sink: (H,), attention-sink scores; None: no sinks.
        Returns:
            (B, T, H, V).
        """
        if not self.by_kernel and not isinstance(mask, Mapping):
            return self.backend.run(q, k, v, mask, self.scale, self.causal)
        segments = mask["segments"][0] if isinstance(mask, Mapping) else None
        settings = (self.backend.kernel, self.scale, self.window, self.softcap, self.causal)
        return torch.ops.dtron.attention(q, k, v, sink, segments, *settings)[0]


class AttentionSinks(nn.Module):
    """One learned attention-sink score per head of the model.

    Attributes:
        head_shard: index of this rank's shard of the heads, which are sharded evenly.
    """

    def __init__(self, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))
        self.head_shard = 0

    def forward(self, q: Tensor) -> Tensor:
        """Return the scores (H,) of the heads of q (B, T, H, K)."""
        return self.weight.unflatten(0, (-1, q.shape[2]))[self.head_shard]


def modifies_scores(config: DecoderConfig) -> bool:
    """Whether attention has a window, a soft cap or sinks, which not every backend supports."""
    return bool(config.window or config.softcap or config.sinks)


def score_scale(config: DecoderConfig) -> float:
    """Return the factor on q k^T: 1 / sqrt(K), or 1 / sqrt(query_pre_attn_scalar) if it is set.

    Latent attention with YaRN multiplies it by YaRN's temperature, since scaled cosines and sines
    would scale only the rotated part of the score.
    """
    scale = (config.query_pre_attn_scalar or config.head_size) ** -0.5
    if config.kv_lora_rank and config.rope_scaling == "yarn":
        scale *= yarn_mscale(config.rope_scaling_factor, config.rope_mscale_all_dim) ** 2
    return scale


class Attention(nn.Module):
    """Multi-head self-attention, (B, T, D) -> (B, T, D), D the width of the model.

    The number of heads is read from the projections' outputs, so that the module also works with
    projections that are sharded over heads.

    Args:
        window: sliding window of this layer, 0: no window; None: config.window.
    """

    def __init__(self, config: DecoderConfig, backend: "Backend", window: int | None = None):
        super().__init__()
        self._build_projections(config)
        self.wg: nn.Linear | None = None
        if config.output_gate:
            self.wg = nn.Linear(config.dim, config.n_heads * config.v_head_size, bias=config.bias)
        self.drop = AttentionDropout(config.attention_dropout)
        self.core = AttentionCore(backend, config, window)
        self.sinks = AttentionSinks(config.n_heads) if config.sinks else None

    def _build_projections(self, config: DecoderConfig) -> None:
        size = config.head_size
        q_dim, kv_dim = config.n_heads * size, config.n_kv_heads * size
        self.wq = nn.Linear(config.dim, q_dim, bias=config.bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wv: nn.Linear | None = None
        if not config.keys_as_values:
            self.wv = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wo = nn.Linear(q_dim, config.dim, bias=config.bias)
        self.q_norm = norm(config, size) if config.qk_norm else None
        self.k_norm = norm(config, size) if config.qk_norm else None
        self.head_size, self.value_eps = size, config.norm_eps if config.value_norm else None

    def heads(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: (B, T, D) -> q (B, T, H, K), k and v (B, T, G, K)."""
        q, k = (w(x).unflatten(-1, (-1, self.head_size)) for w in (self.wq, self.wk))
        v = k if self.wv is None else self.wv(x).unflatten(-1, (-1, self.head_size))
        if self.value_eps is not None:
            v = F.rms_norm(v, (self.head_size,), eps=self.value_eps)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        return q, k, v

    def forward(self, x: Tensor, rope: Tensor | None, mask: Mask, keys: Tensor | None) -> Tensor:
        """Compute self-attention.

        Args:
            x: (B, T, D), normalised.
            rope: float32 (B or 1, T, K) from `rope_table`; None: no rotation.
            mask: from the backend's `prepare`; None: no documents.
            keys: int64 (B, T) dropout keys; required in training with attention dropout.
        """
        q, k, v = self.heads(x, rope)
        width = v.shape[-1]
        if width < q.shape[-1] and not self.core.backend.narrow_values:
            v = F.pad(v, (0, q.shape[-1] - width))
        if self.drop.p and self.training:
            assert keys is not None, "attention dropout needs dropout keys"
            scoring = self.core.scale, self.core.causal
            out = math_attention(q, k, v, mask, *scoring, self.drop, keys)
        else:
            out = self.core(q, k, v, mask, None if self.sinks is None else self.sinks(q))
        out = out[..., :width].flatten(-2)
        if self.wg is not None:
            out = out * torch.sigmoid(self.wg(x))
        return self.wo(out)


def math_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    causal: bool = True,
    drop: AttentionDropout | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v in plain PyTorch; the reference for all other backends.

    Args:
        q: (B, T, H, K).
        k: (B, S, G, K).
        v: (B, S, G, V).
        mask: bool (B, 1, T, S), True: attend; or floats (B or 1, H, T, S) that are added to the
            scores; None: all keys, or with `causal`, where S = T, the keys up to the query's own.
        scale: factor on q k^T.
        causal: used without a mask.
        drop: dropout of the attention weights; None: no dropout.
        keys: int64 (B, T) dropout keys of the queries.
    Returns:
        (B, T, H, V) in q's dtype; computed in float32 at least.
    """
    assert mask is None or isinstance(mask, Tensor), "this mask is for another backend"
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide).unflatten(2, (k.shape[2], -1)), k.to(wide), v.to(wide)
    scores = torch.einsum("btghk,bsgk->bghts", q * scale, k).flatten(1, 2)
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        additive = mask.is_floating_point()
        scores = scores + mask if additive else scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    if drop is not None and keys is not None:
        weights = drop(weights, keys)
    weights = weights.unflatten(1, (k.shape[2], -1))
    return torch.einsum("bghts,bsgk->btghk", weights, v).flatten(2, 3).to(dtype)


def _sdpa(
    kernel: SDPBackend | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Call torch's scaled_dot_product_attention with one kernel; None: torch chooses."""
    assert mask is None or isinstance(mask, Tensor), "this mask is for another backend"
    shared = q.shape[2] != k.shape[2]
    only = mask is not None or q.dtype == torch.float32 or q.shape[-1] > WIDEST_FLASH
    if shared and kernel is None and q.is_cuda and only:
        # The only fused CUDA kernel for masks, for float32 and for heads wider than 256 does not
        # support grouped queries; without a copy torch would fall back to unfused attention with
        # T * T scores in memory.
        group = q.shape[2] // k.shape[2]
        k, v, shared = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), False
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    attend = functools.partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=shared,
    )
    if kernel is None:  # torch may choose cuDNN
        out = attend(q, k, v).transpose(1, 2)
        return dense_gradient(out) if q.is_cuda else out
    with sdpa_kernel(kernel):
        out = attend(q, k, v).transpose(1, 2)
    return dense_gradient(out) if kernel is SDPBackend.CUDNN_ATTENTION else out


def dense_gradient(x: Tensor) -> Tensor:
    """Return x; the backward makes the gradient of x contiguous.

    cuDNN attention in torch 2.11 silently returns wrong gradients if the output's gradient is not
    dense, such as a slice of a tensor.
    """
    return _DenseGradient.apply(x)  # type: ignore[return-value]


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous()


def _flash4(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, causal: bool = True
) -> Tensor:
    return flash4(q, k, v, scale, causal=causal)[0]


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, causal: bool = True
) -> Tensor:
    """Call the flash-attn package: FlashAttention-3 if installed, else FlashAttention-2."""
    if _has_flash3():
        from flash_attn_interface import flash_attn_func
    else:
        from flash_attn.flash_attn_interface import flash_attn_func

    deterministic = torch.are_deterministic_algorithms_enabled()
    out = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, deterministic=deterministic)
    return out[0] if isinstance(out, tuple) else out  # early FlashAttention-3: (out, lse)


@torch.compiler.assume_constant_result  # dynamo cannot trace the look-up of a package
def _has_flash3() -> bool:
    return _capability() == 9 and _installed("flash_attn_interface")


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, causal: bool = True) -> Tensor:
    """Call FlexAttention; compile it here unless the caller is compiled."""
    assert isinstance(mask, BlockMask), "flex attention needs the BlockMask from its prepare"
    attend = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        attend = _compiled_flex()
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    shared = q.shape[1] != k.shape[1]
    out = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=shared)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)  # type: ignore[return-value]


@functools.cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)  # unfused it would materialise T * T booleans


def _no_documents(documents: Tensor | None, positions: Tensor, causal: bool = True) -> None:
    if documents is not None:
        raise ConfigError(
            "this model's attention backend does not support document masks (data.mask_documents); "
            "use model.attention = auto, fa4, flash, flex, sdpa or math"
        )


def _prepared(documents: Tables | None, positions: Tensor, causal: bool = True) -> Tables | None:
    """Return the document tables of context parallelism, with dynamic sizes."""
    return _dynamic(documents)


def _segments(
    documents: Tensor | Tables | None, positions: Tensor, causal: bool = True
) -> Tables | None:
    """Return document boundaries; compute them unless the caller has computed them on the host."""
    if isinstance(documents, Tensor):
        documents = {"segments": (document_segments(documents),)}
    return _dynamic(documents and {"segments": documents["segments"]})


def _dynamic(tables: Tables | None) -> Tables | None:
    """Make torch.compile treat sizes that differ between batches as dynamic.

    These sizes are, in each row of tables, the number of segments (last tensor) and the number of
    keys (second last tensor).
    """
    for row in (tables or {}).values():
        for table in row[-2:]:
            mark_dynamic(table, table.dim() - 1)
    return tables


def _dense_mask(documents: Tensor | None, positions: Tensor, causal: bool = True) -> Tensor | None:
    """Return the mask bool (B, 1, T, T): tokens attend to tokens of their document, with `causal`
    only to earlier ones."""
    if documents is None:
        return None
    seen = documents.unsqueeze(2) == documents.unsqueeze(1)
    return (seen.tril() if causal else seen).unsqueeze(1)


def _block_mask(documents: Tensor | None, positions: Tensor, causal: bool = True) -> BlockMask:
    """Return the mask of `_dense_mask` as a BlockMask; FlexAttention skips its empty blocks."""

    def precedes(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k if causal else q >= 0

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert documents is not None
        return precedes(b, h, q, k) & (documents[b, q] == documents[b, k])

    create = _compiled_block_mask() if positions.is_cuda else create_block_mask
    tokens, device = positions.shape[1], positions.device
    if documents is None:
        return create(precedes, None, None, tokens, tokens, device=device)
    return create(same_document, documents.shape[0], None, tokens, tokens, device=device)


@dataclass(frozen=True)
class AttentionNeeds:
    """What a run requires of its attention backend."""

    device_type: str
    """"cuda" or "cpu"."""
    dtype: torch.dtype
    """Dtype of computation."""
    head_dim: int
    documents: bool = False
    """Mask attention between documents."""
    dropout: bool = False
    deterministic: bool = False
    """Results must be bitwise reproducible. The caller calls
    `torch.use_deterministic_algorithms(True)`, which configures the kernels."""
    context: tuple[str, ...] = ()
    """Methods of context parallelism in use; empty: cp = 1."""
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    relative: bool = False
    """Add relative position biases to the scores."""
    full: "AttentionNeeds | None" = None
    """Requirements of layers without a window, if the sizes of their heads differ."""

    @classmethod
    def of(
        cls, config: DecoderConfig, device_type: str, dtype: torch.dtype, **others: Any
    ) -> "AttentionNeeds":
        """Return a model's requirements; `others`: values of documents, deterministic, context."""
        config, *full = config.attention_configs
        return cls(
            device_type,
            dtype,
            config.head_size,
            dropout=config.attention_dropout > 0,
            window=config.window,
            softcap=config.softcap,
            sinks=config.sinks,
            relative=config.positions == "relative",
            full=cls.of(full[0], device_type, dtype, **others) if full else None,
            **others,
        )

    @property
    def by_kernel(self) -> bool:
        """Whether attention calls a row of KERNELS instead of the backend's `run`."""
        return bool(self.context or self.window or self.softcap or self.sinks)


def _capability() -> int:
    """Return the major compute capability: 8 Ampere and Ada, 9 Hopper, 10 Blackwell."""
    return torch.cuda.get_device_capability()[0]


def _no_fused_kernel(needs: AttentionNeeds, capability: int, head_dim: int) -> str | None:
    """Return why a fused half-precision kernel cannot run here; None: it can run."""
    if needs.device_type != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    if _capability() < capability:
        return f"needs compute capability {capability}.0; this GPU has {_capability()}.x"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 or float16 only"
    if needs.head_dim % 8 or needs.head_dim > head_dim:
        return f"needs a head_dim that is a multiple of 8 and at most {head_dim}"
    return None


def _no_flash4(needs: AttentionNeeds) -> str | None:
    if reason := _no_fused_kernel(needs, capability=9, head_dim=WIDEST_FLASH):
        return reason
    if _capability() >= 10 and 128 < needs.head_dim < 256:
        return "needs a head_dim of at most 128, or 256, on this GPU"
    if needs.deterministic and _capability() >= 12:
        return "has no deterministic backward on this GPU"
    if not _installed("flash_attn.cute"):
        return "needs the package flash-attn-4 (pip install flash-attn-4)"
    return None


def _no_cudnn(needs: AttentionNeeds) -> str | None:
    if needs.deterministic:
        return "has no deterministic backward"
    if reason := _no_fused_kernel(needs, capability=9, head_dim=WIDEST_FLASH):
        return reason
    if _capability() != 9 and needs.head_dim > 128:
        return "needs a head_dim of at most 128 on this GPU"
    return None


def _no_flash_attn(needs: AttentionNeeds) -> str | None:
    if reason := _no_fused_kernel(needs, capability=8, head_dim=WIDEST_FLASH):
        return reason
    if not _has_flash3() and not _installed("flash_attn.flash_attn_interface"):
        return "needs the package flash-attn"
    return None


def _no_flex(needs: AttentionNeeds) -> str | None:
    if needs.device_type != "cuda" or not torch.cuda.is_available():
        return "trains on CUDA devices only"
    if needs.head_dim < 16:
        return "needs a head_dim of at least 16"
    return None


def _always(needs: AttentionNeeds) -> str | None:
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False


@dataclass(frozen=True)
class Backend:
    """One implementation of attention."""

    name: str
    """Value of `model.attention`."""
    run: Callable[..., Tensor]
    """(q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), prepared mask, scale, causal = True) ->
    (B, T, H, V)."""
    unavailable: Callable[[AttentionNeeds], str | None]
    """Returns why the backend cannot run; None: it can run."""
    prepare: Callable[..., Mask] = _no_documents
    """(documents int32 (B, T), tables or None; positions (B or 1, T); causal = True) -> mask for
    all blocks; called once per forward."""
    documents: bool = False
    """Whether the backend supports document masks."""
    dropout: bool = False
    """Whether the backend supports attention dropout."""
    relative: bool = False
    """Whether the backend supports masks of floats that are added to the scores, and computes their
    gradient."""
    automatic: bool = True
    """Whether `auto` may choose the backend without document masks."""
    packs: bool = True
    """Whether `auto` may choose the backend with document masks."""
    narrow_values: bool = False
    """Whether V may be less than K, as in latent attention; otherwise values are padded."""
    kernel: str = ""
    """Key in `dtron.kernels.attention.KERNELS`; context parallelism calls this kernel block by
    block. Empty: the backend has no kernel that returns the log-sum-exp."""
    full: "Backend | None" = None
    """Backend of layers without a window, in a model whose heads have other sizes there
    (`DecoderConfig.of_layer`); None: this one."""

    @property
    def names(self) -> str:
        """The name, and that of layers without a window if it is another."""
        return " and ".join(dict.fromkeys([self.name, (self.full or self).name]))

    def of_layer(self, kind: LayerKind) -> "Backend":
        """Return the backend of layers of this kind."""
        return self.full if kind.full and self.full is not None else self

    def masks(
        self, documents: Tensor | Tables | None, positions: Tensor, causal: bool = True
    ) -> tuple[Mask, Mask]:
        """Return the masks of layers with and without a window, from `prepare`."""
        mask = self.prepare(documents, positions, causal)
        if self.full is None or self.full.prepare is self.prepare:
            return mask, mask
        if isinstance(documents, Mapping) and not self.full.counts_documents:
            documents = documents[_DOCUMENTS][0]
        return mask, self.full.prepare(documents, positions, causal)

    @property
    def counts_documents(self) -> bool:
        """Whether the mask's shape depends on the number of documents of a micro-batch."""
        return self.prepare is _segments

    def described(self, documents: Tensor | Tables | None) -> Tensor | Tables | None:
        """Convert documents on the host to the form that `prepare` takes; return tables unchanged.

        Conversion on the device would synchronise the host with the device.
        """
        if not self.counts_documents or not isinstance(documents, Tensor):
            return documents
        tables = {"segments": (document_segments(documents),)}
        whole = self.full is not None and not self.full.counts_documents
        return {**tables, _DOCUMENTS: (documents,)} if whole else tables


_DOCUMENTS = "documents"
"""Key of the documents themselves in the tables of `Backend.described`."""

BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend(
            "fa4",
            _flash4,
            _no_flash4,
            _segments,
            True,
            packs=False,
            narrow_values=True,
            kernel="fa4",
        ),
        Backend(
            "cudnn",
            functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
            _no_cudnn,
            narrow_values=True,
            kernel="cudnn",
        ),
        Backend("flash_attn", _flash_attn, _no_flash_attn),
        Backend(
            "flash",
            functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
            functools.partial(_no_fused_kernel, capability=8, head_dim=WIDEST_FLASH),
            _segments,
            True,
            packs=False,
            kernel="flash",
        ),
        Backend(
            "flex",
            _flex,
            _no_flex,
            _block_mask,
            documents=True,
            automatic=False,
            narrow_values=True,
        ),
        Backend(
            "sdpa",
            functools.partial(_sdpa, None),
            _always,
            _dense_mask,
            documents=True,
            relative=True,
        ),
        Backend(
            "math",
            math_attention,
            _always,
            _dense_mask,
            documents=True,
            dropout=True,
            relative=True,
            narrow_values=True,
            kernel="math",
        ),
    )
}


def choose_backend(name: str, needs: AttentionNeeds) -> Backend:
    """Choose the row of BACKENDS for a model.

    Layers without a window whose heads have other sizes take the row if it supports them, else as
    `auto`.

    Args:
        name: a row's name, or `auto` for the first row that supports all needs.
    Raises:
        ConfigError: `name` is unknown or lacks a feature; the message has the reason and the names
            that can be used.
    """
    if needs.full is not None:
        row = choose_backend(name, replace(needs, full=None))
        able = name in BACKENDS and _reason(BACKENDS[name], needs.full) is None
        full = choose_backend(name if able else "auto", needs.full)
        return row if full == row else replace(row, full=full)
    reasons = {row.name: _reason(row, needs) for row in BACKENDS.values()}
    able = [row for row in BACKENDS.values() if reasons[row.name] is None]
    names = ", ".join(["auto", *(row.name for row in able)])
    if name == "auto":
        fast = [row for row in able if (row.packs if needs.documents else row.automatic)]
        chosen = able if needs.by_kernel else fast
        name = (chosen or able or [BACKENDS["math"]])[0].name
    if name not in BACKENDS:
        hint = nearest(name, BACKENDS)
        raise ConfigError(f"model.attention = {name} is not known{hint or f'; use {names}'}")
    if reasons[name] is not None:
        raise ConfigError(f"model.attention = {name} {reasons[name]}; available here: {names}")
    row = BACKENDS[name]
    if needs.context:
        # Context parallelism sends keys and values as one tensor.
        return replace(row, prepare=_prepared, narrow_values=False)
    return replace(row, prepare=_segments) if needs.by_kernel else row


def _reason(row: Backend, needs: AttentionNeeds) -> str | None:
    """Return why a row cannot run; None: it can."""
    return _lacks(row, needs) or row.unavailable(needs)


def _lacks(row: Backend, needs: AttentionNeeds) -> str | None:
    """Return which feature a row lacks; None: it supports all features."""
    if needs.by_kernel:
        return _kernel_lacks(row, needs)
    if needs.documents and not row.documents:
        return "does not support document masks (data.mask_documents)"
    if needs.dropout and not row.dropout:
        return "does not support attention dropout (model.override.attention_dropout)"
    if needs.relative and not row.relative:
        return 'does not support position biases (model.override.positions = "relative")'
    return None


def _kernel_lacks(row: Backend, needs: AttentionNeeds) -> str | None:
    keys = ("parallel.cp", *(f"model.override.{k}" for k in ("window", "softcap", "sinks")))
    asked = zip(keys, (needs.context, needs.window, needs.softcap, needs.sinks), strict=True)
    reason = next(key for key, value in asked if value)
    if not row.kernel:
        return f"returns no log-sum-exp, which {reason} needs"
    kernel = KERNELS[row.kernel]
    gathers = "all_gather" in needs.context
    lacks = [
        (needs.documents and not kernel.segments, f"document masks with {reason}"),
        (needs.dropout, f"attention dropout with {reason}"),
        (needs.window and not kernel.window, f"model.override.window = {needs.window}"),
        (needs.softcap and not kernel.softcap, f"model.override.softcap = {needs.softcap}"),
        (
            gathers and not kernel.aligned_at_end,
            'more keys than queries, as parallel.cp_method = "all_gather" needs',
        ),
    ]
    return next((f"does not support {what}" for broken, what in lacks if broken), None)
