"""The decoder as a whole: shapes, dtypes, tying, initialisation, stage cuts, compilation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dtron.errors import ConfigError
from dtron.models import BACKENDS, MODELS, DecoderConfig, build_model
from dtron.models.decoder import Decoder, init_parameter
from dtron.models.dropout import token_keys
from dtron.parallelisms.pipeline.stages import cut as split
from dtron.parallelisms.pipeline.stages import take_stage
from tests.models.build import initialized, small_config, tokens, varied

OTHERS = ("llava", "t5")
"""Families that read more than tokens: test_vision.py, test_encoder_decoder.py."""
NAMES = [name for name in MODELS if name not in OTHERS]
DENSE = ("llama", "qwen3", "qwen3_5", "gemma3", "gemma4", "gpt", "bert")
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1}


def keys(x: Tensor, step: int = 0) -> Tensor:
    return token_keys(7, step, torch.arange(x.shape[0]), torch.arange(x.shape[1]))


def loss_and_gradients(model: Decoder, x: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    labels = x.roll(-1, dims=1)
    loss = F.cross_entropy(model(x, **inputs).flatten(0, 1).float(), labels.flatten())
    loss.backward()
    gradients = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.named_parameters()))
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward(name, backend, dtype):
    config = small_config(name)
    model = initialized(name, config, BACKENDS[backend]).to(dtype)
    x = tokens()
    logits = model(x)
    assert logits.shape == (2, 24, 97)
    assert logits.dtype == dtype
    result = loss_and_gradients(model, x)
    assert abs(result["loss"].item() - math.log(97)) < 0.3
    assert all(tensor.isfinite().all() for tensor in result.values())


@pytest.mark.parametrize("name", NAMES)
def test_names_are_fixed(name):
    fqns = {fqn for fqn, _ in initialized(name, small_config(name)).named_parameters()}
    latent = ("wq_a", "q_a_norm", "wq_b", "wkv_a", "kv_a_norm", "wkv_b", "wo")
    projections = latent if name == "deepseek_v3" else ("wq", "wk", "wv", "wo")
    assert ("blocks.0.mamba.core.dt_bias" in fqns) == (name == "nemotron_h")
    mixture = {f"blocks.1.ffn.{w}" for w in ("router.weight", "experts.up", "experts.down")}
    attention = 2 if name == "nemotron_h" else 1
    keys_as_values = {"blocks.1.attn.wv.weight"} if name == "gemma4" else set()
    assert not fqns & keys_as_values
    assert ("blocks.1.scale.gamma" in fqns) == (name == "gemma4")
    assert fqns >= {f"blocks.{attention}.attn.{w}.weight" for w in projections} - keys_as_values
    assert fqns >= {"embed.weight", "norm.weight"}
    assert ("blocks.0.ffn.down.weight" in fqns) == (name in (*DENSE, "deepseek_v3"))
    assert fqns >= mixture if name not in DENSE else not fqns & mixture
    assert ("blocks.0.ffn.gate.weight" in fqns) == (
        name in ("llama", "qwen3", "qwen3_5", "gemma3", "gemma4", "deepseek_v3")
    )
    assert ("blocks.1.attn.q_norm.weight" in fqns) == (name.startswith(("qwen3", "gemma")))
    assert ("blocks.1.ffn_post_norm.weight" in fqns) == name.startswith("gemma")
    assert ("blocks.0.delta.w_qkv.weight" in fqns) == name.startswith("qwen3_5")
    assert ("blocks.1.ffn.shared.up.weight" in fqns) == (
        name in ("deepseek_v3", "qwen3_5_moe", "nemotron_h")
    )
    assert ("blocks.1.ffn.experts.down_bias" in fqns) == (name == "gpt_oss")
    assert ("position_embed.weight" in fqns) == (name in ("gpt", "bert"))
    tied = ("gpt", "bert", "qwen3", "qwen3_5", "gemma3", "gemma4")
    assert ("head.weight" in fqns) == (name not in tied)
    of_bert = {"type_embed.weight", "embed_norm.bias", "transform.dense.weight", "head.bias"}
    assert fqns >= of_bert if name == "bert" else not fqns & of_bert


@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_do_not_change_earlier_logits(name):
    model = varied(initialized(name, small_config(name), BACKENDS["sdpa"]))
    x = tokens()
    y = x.clone()
    y[:, 12:] = (y[:, 12:] + 1) % 97
    same = torch.isclose(model(x)[:, :12], model(y)[:, :12], rtol=1e-4, atol=1e-5)
    assert same.all() if model.config.causal else not same.all(-1).any()


@pytest.mark.parametrize("name", NAMES)
def test_positions_default_to_the_index(name):
    model = varied(initialized(name, small_config(name)))
    x = tokens()
    torch.testing.assert_close(model(x), model(x, positions=torch.arange(24).expand(2, -1)))


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("name", NAMES)
def test_masked_documents_equal_separate_documents(name, backend):
    model = varied(initialized(name, small_config(name), BACKENDS[backend]))
    x, lengths = tokens(), [5, 12, 7]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int().expand(2, -1)
    packed = model(x, positions=positions, documents=documents)
    separate = torch.cat([model(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(packed, model(x, positions=positions), atol=1e-3)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_grouped_queries_equal_repeated_heads(backend, kv_heads):
    grouped = varied(initialized("llama", small_config("llama", n_kv_heads=kv_heads)))
    full = initialized("llama", small_config("llama", n_kv_heads=4), BACKENDS[backend])
    state = grouped.state_dict()
    for fqn, weight in state.items():
        if ".wk." in fqn or ".wv." in fqn:
            heads = weight.unflatten(0, (kv_heads, -1))
            state[fqn] = heads.repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=1e-4, atol=1e-5)


def test_learned_positions_have_an_end():
    model = initialized("gpt", small_config("gpt", max_seq_len=16))
    with pytest.raises(ConfigError, match=r"max_seq_len = 16 is less than .* of 24 tokens; use 24"):
        model(tokens())


@pytest.mark.parametrize("name", NAMES)
def test_initialisation_by_name(name):
    bias = not name.startswith(("qwen3_5", "nemotron_h"))  # refuse them
    config = small_config(name, dim=128, bias=bias, norm_zero_centered=name == "llama")
    model = build_model(name, config, BACKENDS["math"])
    for fqn, parameter in model.named_parameters():
        full = torch.full(parameter.shape, torch.nan)
        init_parameter(config, fqn, full, torch.Generator().manual_seed(3))
        again = torch.empty(parameter.shape)
        init_parameter(config, fqn, again, torch.Generator().manual_seed(3))
        assert torch.equal(full, again)
        if ".mamba.core." in fqn:
            assert full.isfinite().all()  # tests/models/test_mamba.py has the ranges
        elif fqn.endswith("a_log"):
            assert ((full.exp() >= 0.01) & (full.exp() <= 16)).all()
        elif fqn.endswith("dt_bias"):
            assert (full == 1).all()
        elif fqn.endswith("bias"):
            assert (full == 0).all()
        elif "norm" in fqn.split(".")[-2]:
            assert (full == (0 if name == "llama" else 1)).all()
        elif full.numel() > 1000:
            residual = fqn.endswith(("wo.weight", "down.weight", "experts.down"))
            residual = residual and name != "bert"
            sums = config.n_layers * (1 if config.layer_pattern else 2)
            std = 0.02 / math.sqrt(sums) if residual else 0.02
            assert full.std().item() == pytest.approx(std, rel=0.05)
            assert abs(full.mean().item()) < std / 10


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_stages_chained_equal_the_whole(name, cut):
    dropout = {"dropout": 0.2} if name in ("gpt_oss", "gemma3", "gemma4") else DROPOUT
    config = small_config(name, n_layers=4, **dropout)
    whole = varied(initialized(name, config))
    layers = [f"blocks.{layer}" for layer in range(4)]
    embedding, head = MODELS[name].embedding(config), MODELS[name].head
    made = split(whole, [[*embedding, *layers[:cut]], [*layers[cut:], *head]])
    first, last = take_stage(whole, made, 0), take_stage(whole, made, 1)
    kept = {fqn for stage in (first, last) for fqn in stage.state_dict()}
    assert kept == set(whole.state_dict())
    x = tokens()
    inputs = {
        "positions": (torch.arange(24) % 9).expand(2, -1),
        "documents": (torch.arange(24) // 9).int().expand(2, -1),
        "dropout_keys": keys(x),
    }
    hidden = first(x, **inputs)
    assert hidden.shape == (2, 24, 64)
    torch.testing.assert_close(last(hidden, **inputs), whole(x, **inputs), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "deepseek_v3"])
def test_stages_without_the_mtp_block_skip_its_place(name):
    config = small_config(name, n_layers=2, mtp=1)
    whole = varied(initialized(name, config))
    embedding, head = MODELS[name].embedding(config), MODELS[name].head
    stages = [[*embedding, "blocks.0"], ["blocks.1", "blocks.2", *head, "mtp_embed"]]
    made = split(whole, stages)
    x = tokens()
    inputs = {"positions": torch.arange(24).unsqueeze(0), "mtp_tokens": x.roll(-1, 1).unsqueeze(-1)}
    hidden = take_stage(whole, made, 0)(x, **inputs)
    last = take_stage(whole, made, 1)(hidden, **inputs)
    for each, expected in zip(last, whole(x, **inputs), strict=True):
        torch.testing.assert_close(each, expected, rtol=0, atol=0)


def test_dropout_needs_keys_in_training_only():
    model = initialized("gpt", small_config("gpt", dropout=0.1))
    with pytest.raises(AssertionError, match="dropout_keys"):
        model(tokens())
    model.eval()(tokens())


def test_dropout_is_reproducible_and_changes_with_step_and_seed():
    model = varied(initialized("llama", small_config("llama", **DROPOUT)))
    x = tokens()
    first = model(x, dropout_keys=keys(x))
    assert torch.equal(first, model(x, dropout_keys=keys(x)))
    assert not torch.allclose(first, model(x, dropout_keys=keys(x, step=1)), atol=1e-2)
    assert not torch.allclose(first, model.eval()(x), atol=1e-2)


def test_dropout_does_not_depend_on_micro_batches():
    model = varied(initialized("llama", small_config("llama", **DROPOUT)))
    x = tokens(batch=3)
    k = keys(x)
    parts = [model(x[i : i + 1], dropout_keys=k[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(torch.cat(parts), model(x, dropout_keys=k), rtol=1e-4, atol=1e-5)


def test_dropout_is_the_same_under_recomputation():
    from torch.utils.checkpoint import checkpoint

    model = varied(initialized("llama", small_config("llama", **DROPOUT)))
    x = tokens()
    expected = loss_and_gradients(model, x, dropout_keys=keys(x))
    for block in model.blocks.values():
        run = block.forward
        block.forward = lambda *a, run=run: checkpoint(
            run, *a, use_reentrant=False, preserve_rng_state=False
        )
    found = loss_and_gradients(model, x, dropout_keys=keys(x))
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)


def compiled_blocks(model: Decoder) -> CompileCounterWithBackend:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks.values():
        block.compile(backend=counter, fullgraph=True)
    return counter


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("llama", {}),
        ("qwen3", {"norm_zero_centered": True}),
        ("gpt", {}),
        ("llama", DROPOUT),
        ("llama", {"sandwich_norms": True}),
        ("gpt", {"activation": "geglu", "dropout": 0.1}),
        ("mixtral", {"z_loss": 0.1}),
        ("qwen3_moe", {"balance": "global_batch", "jitter": 0.1}),
        ("qwen3_moe", {"capacity_factor": 1.0, "capacity_pad": True}),
        ("qwen3_moe", {"router": "sinkhorn", "renormalize": False}),
        ("deepseek_v3", {"first_dense_layers": 0, "ffn_dim": 0}),
        ("gpt_oss", {"full_attention_every": 0}),
    ],
)
def test_blocks_compile_once_to_one_graph(name, override):
    config: DecoderConfig = small_config(name, n_layers=3, **override)
    backend = BACKENDS["math" if config.attention_dropout else "sdpa"]
    model = varied(initialized(name, config, backend))
    x = tokens()
    expected = loss_and_gradients(model, x, dropout_keys=keys(x))
    counter = compiled_blocks(model)
    found = loss_and_gradients(model, x, dropout_keys=keys(x))
    assert counter.frame_count == 1, "blocks must share one compilation"
    for fqn in expected:
        torch.testing.assert_close(found[fqn], expected[fqn], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_blocks_compile_with_grouped_products(name):
    """In bfloat16, where torch.compile knows them; experts in turn, since rounding may choose."""
    model = varied(initialized(name, small_config(name, force_balance=True))).bfloat16()
    expected = loss_and_gradients(model, tokens())
    compiled_blocks(model)
    found = loss_and_gradients(model, tokens())
    for fqn, tensor in expected.items():
        scale = max(tensor.float().norm(), 1e-3)
        assert (found[fqn].float() - tensor.float()).norm() < 0.02 * scale, fqn


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3_5", "gemma3", "gemma4"])
def test_kinds_of_blocks_compile_once_each(name):
    model = varied(initialized(name, small_config(name, n_layers=6), BACKENDS["sdpa"]))
    counter = compiled_blocks(model)
    loss_and_gradients(model, tokens())
    assert counter.frame_count == 2


def test_blocks_compile_with_documents():
    model = varied(initialized("llama", small_config("llama", n_layers=3), BACKENDS["sdpa"]))
    documents = (torch.arange(24) // 7).int().expand(2, -1)
    expected = model(tokens(), documents=documents)
    counter = compiled_blocks(model)
    torch.testing.assert_close(model(tokens(), documents=documents), expected)
    assert counter.frame_count == 1
