"""`attn_implementation="dtron"`: dtron's attention kernels for models of transformers.

transformers calls an attention function by name, with queries (B, H, T, K) and keys and values
(B, G, T, K): B sequences, H query heads, G key/value heads, T tokens, K = head_dim. It calls a mask
function of the same name once per forward, outside of compiled blocks.

The kernel is the first row of BACKENDS that supports the call on this device: FlashAttention-4,
cuDNN, FlashAttention-2, or torch's scaled_dot_product_attention.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dtron.errors import ConfigError
from dtron.models.attention import BACKENDS, AttentionNeeds, choose_backend

NAME = "dtron"


def register() -> None:
    """Register the attention and mask functions with transformers, under the name "dtron".

    Raises:
        ConfigError: transformers is not installed, or is older than 4.53.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ConfigError(
            "dtron.huggingface needs transformers >= 4.53; pip install 'dtron[hf]'"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Return a description of the mask of a forward, which `attention` compares with its arguments.

    Attention code that adds or slices it as a mask fails, rather than attend to all tokens.

    Args:
        kv_length: number of keys T.
        attention_mask: bool (B, T), False for padding; None: no padding.
        local_size: size of a sliding window or a chunk; None: all earlier keys are seen.
        allow_is_causal_skip: false: more than a causal mask and `local_size`, such as the documents
            of packed sequences, whose `position_ids` restart.
        use_vmap: whether the model passes a mask function of its own (`or_mask_function` or
            `and_mask_function`), which transformers evaluates by vmap.
    Returns:
        bool (d, w, 0, 0), empty: d = 1 if allow_is_causal_skip is false, else 0; w = local_size, or
        0 if it hides no key.
    Raises:
        ConfigError: a mask function of the model, or padding before tokens. Padding after them is
            seen by no token.
    """
    if use_vmap:
        raise ConfigError(
            'attn_implementation = "dtron": the model passes or_mask_function or '
            "and_mask_function, and dtron's kernels know causal masks, windows and documents "
            'only; use attn_implementation = "sdpa"'
        )
    if attention_mask is not None and _has_padding_before_tokens(attention_mask):
        raise ConfigError(
            'attn_implementation = "dtron": attention_mask has padding before tokens; pad on the '
            'right (tokenizer.padding_side = "right"), or use attn_implementation = "sdpa"'
        )
    window = local_size if local_size is not None and local_size < kv_length else 0
    return torch.empty(int(not allow_is_causal_skip), window, 0, 0, dtype=torch.bool, device=device)


def _has_padding_before_tokens(attention_mask: Tensor) -> bool:
    """Whether a token (B, T) is True after one that is False. On a GPU the host waits for this."""
    if not attention_mask.stride(1):  # all tokens of a sequence are one element
        return False
    return bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any())


def pass_empty_mask(model: Any) -> None:
    """Let the model's forward not look for packed sequences in its own positions, in place.

    Without attention_mask and position_ids, transformers compares positions that it has just made,
    and the host waits for the result in each forward. A mask without padding avoids that: a hook
    passes one of True (B, T) that is one element in memory, which `mask` need not read either.
    """
    forward = inspect.signature(model.forward)
    if "attention_mask" not in forward.parameters:
        return

    def fill(_: nn.Module, args: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        given = {**forward.bind_partial(*args).arguments, **values}
        names = ("attention_mask", "position_ids", "past_key_values")
        tokens = given.get("input_ids")
        if tokens is None or any(given.get(name) is not None for name in names):
            return None
        if len(args) > list(forward.parameters).index("attention_mask"):
            return None  # None was passed by position
        one = torch.ones((), dtype=torch.bool, device=tokens.device)
        return args, {**values, "attention_mask": one.expand(tokens.shape)}

    model.register_forward_pre_hook(fill, with_kwargs=True)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention.

    Args:
        query: (B, H, T, K).
        key: (B, G, T, K).
        value: (B, G, T, K).
        attention_mask: result of `mask`.
        scaling: factor of q k^T; None: 1 / sqrt(K).
        sliding_window: maximum number of keys that a query sees; None: all keys.
        softcap: c: scores s become c tanh(s / c).
        s_aux: (H,), attention-sink scores.
        cu_seq_lens_q: int32 (n + 1,), bounds of n packed documents, for B = 1, as
            DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them.
    Returns:
        (B, T, H, K), and None for the weights.
    Raises:
        ConfigError: dropout, attention that is not causal, more keys than queries, a mask that
            differs from the arguments, or packed documents without their bounds.
    """
    _check(module, query, key, dropout, is_causal, others)
    _check_mask(key.shape[2], attention_mask, sliding_window or 0, query.shape[0], cu_seq_lens_q)
    window, cap = sliding_window or 0, softcap or 0.0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = (cu_seq_lens_q is not None, window, cap, s_aux is not None)
    name = _backend(query.device.type, query.dtype, query.shape[-1], *asked)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not any(asked):
        return BACKENDS[name].run(q, k, v, None, scale), None
    segments = None if cu_seq_lens_q is None else torch.stack([cu_seq_lens_q] * 2).int()
    settings = (BACKENDS[name].kernel, scale, window, cap, True)
    return torch.ops.dtron.attention(q, k, v, s_aux, segments, *settings)[0], None


_UNSUPPORTED = ("position_bias", "sinks", "indices", "block_indices")
"""Arguments that change the result: biases of scores, other sinks, and selected keys."""


def _check(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    dropout: float,
    is_causal: bool | None,
    others: Mapping[str, Any],
) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if dropout:
        _refuse("has no dropout; set attention_dropout = 0 in the model's config")
    if not causal:
        _refuse("computes causal attention only")
    if key.shape[2] != query.shape[2]:
        _refuse("trains, and has no cache; set use_cache = False")
    if unsupported:
        _refuse(f"has no {unsupported[0]}, which {type(module).__name__} passes")


def _check_mask(
    n_keys: int, mask: Tensor | None, window: int, n_sequences: int, bounds: Tensor | None
) -> None:
    if bounds is not None and n_sequences != 1:
        _refuse(f"needs packed documents in one row, but cu_seq_lens_q has {n_sequences} rows")
    if mask is None:
        return
    if mask.numel() or mask.dim() != 4:
        _refuse("takes an attention_mask (B, T) of padding, no other mask")
    if mask.shape[0] and bounds is None:
        _refuse(
            "needs the bounds of packed documents or a causal mask; pass cu_seq_lens_q, as "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True) does"
        )
    if mask.shape[1] != (window if window < n_keys else 0):
        _refuse(
            f"gets sliding_window = {window} from the model, whose mask has windows or chunks of "
            f"{mask.shape[1]} tokens (0: none); set it to more than all tokens in the config"
        )


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f'attn_implementation = "dtron" {reason}, or use "sdpa"')


@torch.compiler.assume_constant_result
def _backend(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    documents: bool,
    window: int,
    softcap: float,
    sinks: bool,
) -> str:
    """Return the name of the row of BACKENDS; compiled code calls it once, while it is traced."""
    # With documents their bounds go to the row's kernel, as in a ring.
    context = ("ring",) if documents else ()
    features = {"window": window, "softcap": softcap, "sinks": sinks}
    needs = AttentionNeeds(device_type, dtype, head_dim, documents, context=context, **features)
    return choose_backend("auto", needs).name
