"""Models in Hugging Face's format: read, written, and refused where dtron's are others."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dtron.errors import CheckpointError
from dtron.models import MODELS, build_model, from_hf, hf_folder, model_config, to_hf
from dtron.models.attention import BACKENDS
from dtron.models.config import DecoderConfig
from dtron.models.hf import Name, differences
from dtron.models.hf_export import Export
from dtron.models.hf_weights import Family, Folder
from tests.models.build import initialized, small_config, tokens, varied

transformers = pytest.importorskip("transformers", minversion="5.0")

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "num_key_value_heads": 2, "eos_token_id": 3}
SMALL |= {"bos_token_id": 2}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 |= {"bos_token_id": 2, "eos_token_id": 3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 1000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"rope_theta": 500.0}

RANDOM: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "plain", {}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", "tied", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ("llama", "llama3", {"rope_parameters": LLAMA3}),
    ("llama", "yarn", {"rope_parameters": YARN}),
    ("llama", "yarn attention", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    ("llama", "yarn mscale", {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.4}}),
    ("qwen3", "plain", {"head_dim": 16, "num_key_value_heads": 1}),
    ("qwen3", "tied", {"tie_word_embeddings": True, "head_dim": 8}),
    (
        "qwen3",
        "window",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    ("gpt", "tied", {}),
    ("gpt", "untied", {"tie_word_embeddings": False, "n_inner": 80}),
]
CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "gpt": "GPT2"}


def reference(name: str, settings: dict[str, Any]) -> Any:
    """A random model of transformers; norms and biases are not 1 and 0."""
    base = GPT2 if name == "gpt" else SMALL
    config = getattr(transformers, f"{CLASSES[name]}Config")(**{**base, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if name == "gpt" else f"{CLASSES[name]}ForCausalLM"
    model = getattr(transformers, kind)(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


NAMED = [name for name, spec in MODELS.items() if spec.hf is not None]


@pytest.mark.parametrize(("name", "case", "settings"), RANDOM, ids=lambda v: v if v else "")
def test_logits_and_gradients_equal_those_of_transformers(
    tmp_path: Path, name: str, case: str, settings: dict[str, Any]
) -> None:
    theirs = reference(name, settings)
    theirs.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf", attention="math")
    x, direction = tokens(length=40), torch.randn(2, 40, 97)
    found, wanted = ours(x), theirs(x).logits
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    # a gradient is one of theirs: write ours as weights and compare with theirs by name
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    to_hf(ours, tmp_path / "gradients", name=name)
    written = load_file(tmp_path / "gradients/model.safetensors")
    expected = {key: p.grad for key, p in theirs.named_parameters()}
    assert written.keys() == expected.keys()
    for key, gradient in expected.items():
        assert (written[key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, key


@pytest.mark.parametrize(("name", "case", "settings"), RANDOM, ids=lambda v: v if v else "")
def test_the_way_there_and_back_keeps_every_bit(
    tmp_path: Path, name: str, case: str, settings: dict[str, Any]
) -> None:
    dtype = torch.bfloat16 if case == "plain" else torch.float32
    theirs = reference(name, settings).to(dtype)
    theirs.save_pretrained(tmp_path / "hf")
    model = from_hf(tmp_path / "hf")
    to_hf(model, tmp_path / "back", name=name, file_bytes=20_000)
    again = type(theirs).from_pretrained(tmp_path / "back", dtype="auto")
    state, other = theirs.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in state.items())
    assert {value.dtype for value in other.values()} == {dtype}
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    wanted, found = theirs.config.to_dict(), again.config.to_dict()
    passing = {"_name_or_path", "transformers_version", "bos_token_id", "eos_token_id"}
    passing |= {"max_window_layers", "n_inner", "dtype", "max_position_embeddings"}
    for key in wanted.keys() - passing:
        if key == "rope_parameters":  # default values may be spelled out
            assert wanted[key].items() <= found[key].items()
        else:
            assert found[key] == wanted[key], key


@pytest.mark.parametrize("name", NAMED)
def test_sizes_have_a_name_in_hugging_faces_format(name: str) -> None:
    """Every size of every model is written and read again as the same model."""
    hf = MODELS[name].hf
    assert hf is not None
    for config in MODELS[name].sizes.values():
        assert not differences(config, hf.read(hf.write(config), "config.json"))


@pytest.mark.parametrize("name", NAMED)
def test_a_model_of_ours_is_loaded_by_transformers(tmp_path: Path, name: str) -> None:
    config = small_config(name, tied=False, norm_zero_centered=True)
    model = varied(initialized(name, config))
    to_hf(model, tmp_path / "hf", name=name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    x = tokens()
    expected = model.eval()(x)
    assert (theirs(x).logits - expected).norm() / expected.norm() < 1e-5


def test_config_of_transformers_4(tmp_path: Path) -> None:
    """rope_theta and rope_scaling beside each other, torch_dtype, and no head_dim."""
    reference("llama", {"rope_parameters": LLAMA3}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    newer = json.loads(path.read_text())
    older = {k: v for k, v in newer.items() if k not in ("rope_parameters", "dtype", "head_dim")}
    rope = {**newer["rope_parameters"]}
    older |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": "float32"}
    want = hf_folder(tmp_path).config
    for spelling in ({}, {"type": "llama3"}):
        older["rope_scaling"] |= spelling
        path.write_text(json.dumps(older))
        assert not differences(want, hf_folder(tmp_path).config)
    assert want.rope_theta == 1000.0
    assert want.rope_scaling_factor == 8.0


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("llama", {"mlp_bias": True}, "attention_bias = False with mlp_bias = True"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"sliding_window": 8}, "sliding_window = 8 is not known to dtron's llama"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    ("llama", {"rope_scaling": {**LLAMA3, "short_factor": [1.0]}}, "short_factor"),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "factor of rope_type = 'yarn' is missing"),
    ("llama", {"rope_theta": 7.0}, "rope_theta is both"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ("llama", {"num_attention_heads": 3}, "n_kv_heads = 2 does not divide n_heads = 3"),
    ("llama", {"model_type": "mamba"}, "model_type = 'mamba'"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "layers"),
    ("gpt", {"activation_function": "relu"}, "activation_function = 'relu'"),
    ("gpt", {"embd_pdrop": 0.1}, "embd_pdrop = 0.1"),
    ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_the_model_does_not_do_is_refused_by_name(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    reference(name, {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = {**json.loads(path.read_text()), **change}
    content.pop("layer_types", None)
    if "rope_scaling" in change:
        content.pop("rope_parameters")
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")) as error:
        from_hf(tmp_path)
    assert "config.json" in str(error.value)


EXPORTS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"softcap": 30.0}, r"override\.softcap = 30\.0"),
    ("llama", {"window": 8}, r"override\.window = 8"),
    ("llama", {"sinks": True}, r"override\.sinks = True"),
    ("llama", {"activation": "gelu"}, r"override\.activation = 'gelu'"),
    ("qwen3", {"bias": True}, r"override\.bias = True"),
    ("gpt", {"n_kv_heads": 2}, r"override\.n_kv_heads = 2 \(it has 4\)"),
    ("gpt", {"positions": "rope"}, r"override\.positions = 'rope'"),
    ("gpt", {"head_dim": 32}, r"override\.head_dim = 32"),
]


@pytest.mark.parametrize(("name", "override", "message"), EXPORTS)
def test_what_transformers_cannot_express_is_refused_by_name(
    tmp_path: Path, name: str, override: dict[str, Any], message: str
) -> None:
    with torch.device("meta"):
        model = build_model(name, small_config(name, **override), BACKENDS["math"])
    with pytest.raises(CheckpointError, match=message):
        to_hf(model, tmp_path / "out", name=name)
    assert not (tmp_path / "out").exists()


def rewritten(path: Path, change: Any) -> None:
    """Change the tensors of a folder's only file."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_tensor_too_many_too_few_or_of_another_shape_is_named(tmp_path: Path) -> None:
    reference("llama", {}).save_pretrained(tmp_path)
    key = "model.layers.1.mlp.up_proj.weight"

    rewritten(tmp_path, lambda t: t.update({"model.layers.7.extra": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.extra is left over"):
        from_hf(tmp_path)
    rewritten(tmp_path, lambda t: (t.pop("model.layers.7.extra"), t.pop(key)))
    with pytest.raises(CheckpointError, match=rf"{key} is missing"):
        from_hf(tmp_path)
    rewritten(tmp_path, lambda t: t.update({key: torch.zeros(48, 31)}))
    with pytest.raises(CheckpointError, match=rf"{key} has shape \[48, 31\].*\[48, 32\]"):
        from_hf(tmp_path)
    rewritten(tmp_path, lambda t: t.update({key: torch.zeros(48, 32)}))
    from_hf(tmp_path)


def test_a_tied_head_that_is_stored_too_has_to_be_the_embedding(tmp_path: Path) -> None:
    reference("qwen3", {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    model = from_hf(tmp_path)
    assert model.get_submodule("head").weight is model.get_submodule("embed").weight
    rewritten(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        from_hf(tmp_path)


def test_gpt2_as_it_was_released(tmp_path: Path) -> None:
    """Without the prefix of the model with a head, and with masks among the weights."""
    theirs = reference("gpt", {})
    theirs.transformer.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda t: t.update({"h.0.attn.bias": torch.ones(1, 1, 64, 64)}))
    assert "h.0.attn.bias" in load_file(tmp_path / "model.safetensors")
    x = tokens()
    assert torch.allclose(from_hf(tmp_path)(x), theirs(x).logits, atol=1e-5)


def test_only_the_slices_that_are_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference("gpt", {}).save_pretrained(tmp_path)
    folder, elements = hf_folder(tmp_path), []
    plain = Folder._slice

    def counted(self: Folder, theirs: str, region: Any) -> torch.Tensor:
        part = plain(self, theirs, region)
        elements.append(part.numel())
        return part

    monkeypatch.setattr(Folder, "_slice", counted)
    whole = from_hf(tmp_path).get_parameter("blocks.1.attn.wk.weight")
    elements.clear()
    part = folder.read("blocks.1.attn.wk.weight", (slice(8, 24), slice(4, 12)))
    assert torch.equal(part, whole[8:24, 4:12])
    assert elements == [16 * 8]


class Stacked(nn.Module):
    """Two experts as one tensor, as models with experts have them."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.up = nn.Parameter(torch.arange(24.0).view(2, 4, 3))
        self.gate = nn.Parameter(-torch.arange(24.0).view(2, 4, 3))


def part_of(state: dict[str, torch.Tensor], fqn: str, region: Any) -> torch.Tensor:
    return state[fqn][region]


def test_stacked_and_interleaved_tensors(tmp_path: Path) -> None:
    """What mixtures of experts need of a Name: one of ours is several of theirs; rows in turn."""
    config = model_config("llama", "debug")
    turns = [lambda _c, n, i=i: range(i, 2 * n, 2) for i in (0, 1)]
    tables = {
        "apart": (Name("up", "e.{expert}.up"), Name("gate", "e.{expert}.gate", transposed=True)),
        "turns": (
            Name("up", "both", True, turns[0], 1),
            Name("gate", "both", True, turns[1], 1),
        ),
    }
    for case, names in tables.items():
        llama = MODELS["llama"].hf
        assert llama is not None
        hf = replace(llama, names=names)
        model = Stacked(config)
        out = tmp_path / case
        out.mkdir()
        state = model.state_dict()
        export = Export(hf, config, model, lambda _: torch.float32, partial(part_of, state), 10**6)
        export.write(out, [0])
        export.write_json(out)
        tensors = load_file(out / "model.safetensors")
        if case == "apart":
            assert torch.equal(tensors["e.1.gate"], model.gate[1].T)
        else:
            assert tensors["both"].shape == (2, 3, 8)
            assert torch.equal(tensors["both"][..., 1::2].transpose(1, 2), model.gate)
        folder = Folder(out, {"llama": Family("llama", hf, Stacked)})
        part = (slice(1, 2), slice(1, 3), slice(0, 2))
        for fqn, value in state.items():
            assert torch.equal(folder.read(fqn, part), value[part])
