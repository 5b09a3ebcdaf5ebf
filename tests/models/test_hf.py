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
from dtron.models.hf import WeightName, differences
from dtron.models.hf_export import HFExport
from dtron.models.hf_weights import HFFamily, HFFolder
from tests.models.build import (
    delta_rule_by_token,
    initialized,
    small_config,
    tokens,
    varied,
    with_trained_scalars,
)

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
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
SLOW = {"rope_type": "default", "rope_theta": 500.0}
PROPORTIONAL: dict[str, Any] = {
    "full_attention": {**LINEAR, "rope_type": "proportional", "partial_rotary_factor": 0.7},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
EXPERTS = {"num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12, "num_key_value_heads": 4, "first_k_dense_replace": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
# at 1e-6 the norm of a delta rule's small outputs amplifies float32 rounding, in both programs
DELTA |= {"linear_value_head_dim": 12, "head_dim": 16, "rms_norm_eps": 1e-3}
BERT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 48, "max_position_embeddings": 64, "layer_norm_eps": 1e-5}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT |= {"pad_token_id": None}  # transformers gives the row of this token no gradient
SHAPES: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "llama": SMALL,
    "qwen3": SMALL,
    "qwen3_5": {**SMALL, **DELTA, "num_hidden_layers": 4},
    # transformers gives no gradient to the padding token
    "gemma3": {**SMALL, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"query_pre_attn_scalar": 12, "pad_token_id": None},
    "gemma4": {
        **{**SMALL, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": None},
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0},
    },
    "gpt": GPT2,
    "mixtral": {**SMALL, **EXPERTS, "num_local_experts": 4},
    # intermediate_size, which no layer has, is as wide as the experts of a token
    "qwen3_moe": {**SMALL, **EXPERTS, "num_experts": 6, "moe_intermediate_size": 24},
    "qwen3_5_moe": {
        **{k: v for k, v in SMALL.items() if k != "intermediate_size"},
        **{**EXPERTS, **DELTA, "num_hidden_layers": 4, "num_experts": 6},
        **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48},
    },
    "deepseek_v3": {
        **{**SMALL, **EXPERTS, **LATENT},
        "n_routed_experts": 8,
        "moe_intermediate_size": 20,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {**SMALL, **EXPERTS, "num_local_experts": 4, "head_dim": 8, "sliding_window": 9},
    "nemotron_h": {
        **{**SMALL, **EXPERTS, "num_hidden_layers": 4, "head_dim": 8, "n_routed_experts": 6},
        **{"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 48},
        **{"mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 10},
        **{"routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-3},
        **{"pad_token_id": None},
    },
}

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
    ("qwen3_5", "plain", {}),
    (
        "qwen3_5",
        "tied",
        {"tie_word_embeddings": True, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 1}
        | {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    ("gemma3", "plain", {}),
    (
        "gemma3",
        "untied",
        {"tie_word_embeddings": False, "final_logit_softcapping": 3.0, "num_key_value_heads": 1}
        | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_local_base_freq": 50.0},
    ),
    ("gemma3", "all windows", {"layer_types": ["sliding_attention"] * 4, "rope_theta": 500.0}),
    ("gemma3", "no windows", {"layer_types": ["full_attention"] * 4, "sliding_window": 4096}),
    ("gemma4", "plain", {}),
    (
        "gemma4",
        "own values",
        {"attention_k_eq_v": False, "tie_word_embeddings": False, "global_head_dim": 8}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": SLOW}},
    ),
    (
        "gemma4",
        "by layer",
        {"attention_k_eq_v": False, "rope_parameters": PROPORTIONAL}
        | {"per_layer_config": {i: {"head_dim": 12, "num_key_value_heads": 1} for i in (1, 3)}},
    ),
    (
        "gemma4",
        "no windows",
        {"layer_types": ["full_attention"] * 4, "sliding_window": 512, "global_head_dim": 8}
        | {"num_global_key_value_heads": None},
    ),
    (
        "llama",
        "linear",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    ("gpt", "tied", {}),
    ("gpt", "untied", {"tie_word_embeddings": False, "n_inner": 80}),
    ("bert", "plain", {}),
    ("bert", "one token type", {"type_vocab_size": 1, "hidden_act": "gelu_new"}),
    ("mixtral", "plain", {"head_dim": 8}),
    ("mixtral", "window", {"sliding_window": 7, "head_dim": 16, "rms_norm_eps": 1e-3}),
    ("qwen3_moe", "plain", {"head_dim": 16, "norm_topk_prob": True}),
    ("qwen3_moe", "not renormalised", {"head_dim": 8, "num_key_value_heads": 1}),
    ("qwen3_moe", "window", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7}),
    ("qwen3_5_moe", "plain", {}),
    (
        "qwen3_5_moe",
        "tied",
        {"tie_word_embeddings": True, "num_experts_per_tok": 3, "num_key_value_heads": 1}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    ("deepseek_v3", "plain", {}),
    (
        "deepseek_v3",
        "Moonlight",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-3},
    ),
    (
        "deepseek_v3",
        "yarn",
        {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "intermediate_size": 40,
        },
    ),
    ("nemotron_h", "plain", {}),
    (
        "nemotron_h",
        "dense",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2}
        | {"conv_kernel": 3, "n_groups": 4, "time_step_min": 0.5, "n_routed_experts": 8}
        | {"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
        | {"routed_scaling_factor": 1.0},
    ),
    ("gpt_oss", "plain", {"num_hidden_layers": 4}),
    ("gpt_oss", "all windows", {"layer_types": ["sliding_attention"] * 2}),
    (
        "gpt_oss",
        "no yarn",
        {"sliding_window": 128, "layer_types": ["full_attention"] * 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
]
CLASSES = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "gpt": "GPT2",
    "bert": "Bert",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "nemotron_h": "NemotronH",
}


HYBRIDS = [name for name in CLASSES if name.startswith("qwen3_5")]


def reference(name: str, settings: dict[str, Any]) -> Any:
    """A random model of transformers; norms and biases are not 1 and 0."""
    suffix = "TextConfig" if name.startswith(("qwen3_5", "gemma")) else "Config"
    config = getattr(transformers, f"{CLASSES[name]}{suffix}")(**{**SHAPES[name], **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    kinds = {"gpt": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}
    kind = kinds.get(name, f"{CLASSES[name]}ForCausalLM")
    model = with_trained_scalars(getattr(transformers, kind)(config))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer += 0.1 * torch.randn_like(buffer)
    return model.eval()


def outputs_of_scalars(model: Any) -> dict[str, Any]:
    """{name of a layer's scalar: (output of the layer, with its gradient; scalar)}, once it ran."""
    found: dict[str, Any] = {}

    def keep(name: str, module: Any, inputs: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        found[f"{name}.layer_scalar"] = out, module.layer_scalar

    for name, module in model.named_modules():
        if hasattr(module, "layer_scalar"):
            module.register_forward_hook(partial(keep, name))
    return found


def assert_same_tensors(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtypes: bool = True
) -> None:
    """The same names and values, to the bit; and the same dtypes, but without ``dtypes``."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key
        assert not dtypes or found[key].dtype == tensor.dtype, key


def stored_as(model: Any, dtype: torch.dtype) -> Any:
    """Its parameters in this dtype; buffers stay, as in training."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def loaded(kind: Any, path: Path) -> Any:
    """What transformers makes of a folder, in which nothing is missing or left over."""
    model, info = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return with_trained_scalars(model)


def is_deepseek_v2(config: DecoderConfig) -> bool:
    """Sizes of deepseek_v3 that transformers has as another architecture."""
    return bool(config.kv_lora_rank) and config.router == "softmax"


@pytest.mark.parametrize(("name", "case", "settings"), RANDOM, ids=lambda v: v if v else "")
def test_logits_and_gradients_equal_those_of_transformers(
    tmp_path: Path, name: str, case: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = reference(name, settings)
    delta_rule_by_token(monkeypatch, theirs)
    theirs.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf", attention="math")
    scaled = outputs_of_scalars(theirs)
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
    written = dict(loaded(type(theirs), tmp_path / "gradients").named_parameters())
    expected = {key: p.grad for key, p in theirs.named_parameters()}
    assert written.keys() == expected.keys()
    for key, gradient in expected.items():
        size = gradient.norm()
        if key in scaled:  # a sum of products that cancel: as exact as the norm of its terms
            out, scalar = scaled[key]
            size = (out.grad * out / scalar).norm()
        assert (written[key] - gradient).norm() <= 1e-5 * size + 1e-6, key


VISION = {"hidden_size": 32, "intermediate_size": 32}
QWEN_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
MULTIMODAL = {
    **dict.fromkeys(HYBRIDS, QWEN_VISION),
    "gemma3": {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    "gemma4": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    | {"head_dim": 16},
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_language_model_of_a_multimodal_folder_is_read(tmp_path: Path, name: str) -> None:
    """As transformers writes them: the config inside, tensors of vision besides, and no weights of
    the MTP layer that the config of a hybrid has."""
    text = {**SHAPES[name], **({"mtp_num_hidden_layers": 1} if name in HYBRIDS else {})}
    text |= {"pad_token_id": 0} if name == "gemma4" else {}  # it replaces tokens of images
    kind = getattr(transformers, f"{CLASSES[name]}Config")
    config = kind(text_config=text, vision_config={**VISION, **MULTIMODAL[name]})
    theirs = getattr(transformers, f"{CLASSES[name]}ForConditionalGeneration")(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf", attention="math")
    x = tokens(length=40)
    torch.testing.assert_close(ours(x), theirs(input_ids=x).logits, rtol=1e-4, atol=1e-5)
    assert ours.config.tied == config.tie_word_embeddings  # type: ignore[union-attr]
    assert ours.config.mtp == 0  # type: ignore[union-attr]


def mtp_of(main: Any) -> Any:
    """The MTP layer of a folder as transformers reads it, which knows no key of Qwen3.5 for it."""
    text = main.config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    return transformers.modeling_layers.MtpModel.from_pretrained(main).eval()


@pytest.mark.parametrize("name", HYBRIDS)
def test_mtp_of_qwen3_5_equals_transformers(tmp_path: Path, name: str) -> None:
    """By the published names: logits of the second token, and gradients of the MTP layer."""
    config = small_config(name, mtp=1, tied=False, norm_eps=1e-3)
    ours = varied(initialized(name, config)).eval()
    to_hf(ours, tmp_path / "hf", name=name)
    main = loaded(getattr(transformers, f"{CLASSES[name]}ForCausalLM"), tmp_path / "hf")
    theirs, x = mtp_of(main), tokens()
    hidden, at = main.model(x).last_hidden_state[:, :-1], torch.arange(x.shape[1] - 1)[None]
    wanted = main.lm_head(theirs.forward_layer(0, hidden, at, None, input_ids=x[:, 1:]))
    ahead = torch.nn.functional.pad(x[:, 1:], (0, 1)).unsqueeze(-1)
    found = ours(x, mtp_tokens=ahead)[1][:, :-1]
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    direction = torch.randn(wanted.shape)
    for logits in (found, wanted):
        (logits * direction).sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    to_hf(ours, tmp_path / "gradients", name=name)
    written = mtp_of(loaded(type(main), tmp_path / "gradients"))
    gradients = {key: p.grad for key, p in theirs.layers.named_parameters()}
    assert len(gradients) == {"qwen3_5": 15, "qwen3_5_moe": 19}[name]  # as released
    for key, parameter in written.layers.named_parameters():
        assert (parameter - gradients[key]).norm() <= 1e-5 * gradients[key].norm() + 1e-6, key


@pytest.mark.parametrize("fused", [("model.",), ("model.", "mtp.")], ids=["3.5", "3.6"])
def test_released_layouts_of_experts_are_read(tmp_path: Path, fused: tuple[str, ...]) -> None:
    """All experts of a layer in two tensors; those of MTP one by one (Qwen3.5) or too (3.6)."""
    config = small_config("qwen3_5_moe", mtp=1)
    model = varied(initialized("qwen3_5_moe", config))
    folder = tmp_path / "hf"
    to_hf(model, folder, name="qwen3_5_moe")
    written = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "text_config": written}
    (folder / "config.json").write_text(json.dumps(outer), encoding="utf-8")

    def release(tensors: dict[str, torch.Tensor]) -> None:
        layers = {key.partition("experts.")[0] for key in tensors if ".experts." in key}
        for mlp in (layer for layer in layers if layer.startswith(fused)):
            gate, up, down = (
                torch.stack([tensors.pop(f"{mlp}experts.{i}.{w}_proj.weight") for i in range(8)])
                for w in ("gate", "up", "down")
            )
            tensors[f"{mlp}experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{mlp}experts.down_proj"] = down
        for key in [key for key in tensors if key.startswith("model.")]:
            tensors["model.language_model." + key.removeprefix("model.")] = tensors.pop(key)
        tensors["model.visual.norm"] = torch.zeros(2)

    rewritten(folder, release)
    again = from_hf(folder)
    assert_same_tensors(again.state_dict(), model.state_dict())


def folder_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    return {key: t for file in path.glob("*.safetensors") for key, t in load_file(file).items()}


@pytest.mark.parametrize(("name", "case", "settings"), RANDOM, ids=lambda v: v if v else "")
def test_the_way_there_and_back_keeps_every_bit(
    tmp_path: Path, name: str, case: str, settings: dict[str, Any]
) -> None:
    dtype = torch.bfloat16 if case == "plain" else torch.float32
    theirs = stored_as(reference(name, settings), dtype)
    theirs.save_pretrained(tmp_path / "hf")
    model = from_hf(tmp_path / "hf")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    to_hf(model, tmp_path / "back", name=name, file_bytes=20_000)
    # transformers may load some weights, such as routers, in another dtype than the stored one
    there, back = (loaded(type(theirs), tmp_path / folder) for folder in ("hf", "back"))
    assert_same_tensors(theirs.state_dict(), back.state_dict(), dtypes=False)
    assert_same_tensors(there.state_dict(), back.state_dict())
    assert_same_tensors(folder_tensors(tmp_path / "hf"), folder_tensors(tmp_path / "back"))
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    wanted, found = theirs.config.to_dict(), back.config.to_dict()
    passing = {"_name_or_path", "transformers_version", "bos_token_id", "eos_token_id"}
    passing |= {"max_window_layers", "n_inner", "dtype", "max_position_embeddings"}
    passing |= {"pad_token_id", "_sliding_window_pattern"}
    for key in wanted.keys() - passing:
        if key == "rope_parameters":  # default values may be spelled out
            assert wanted[key].items() <= found[key].items()
        else:
            assert found[key] == wanted[key], key


@pytest.mark.parametrize("name", MODELS)
def test_sizes_have_a_name_in_hugging_faces_format(name: str) -> None:
    """Every size of every model is written and read again as the same model, but DeepSeek-V2."""
    hf = MODELS[name].hf
    assert hf is not None
    for size, config in MODELS[name].sizes.items():
        if is_deepseek_v2(config):
            assert size in ("16b", "236b")
            with pytest.raises(CheckpointError, match=r"cannot express model\.override\..*router"):
                hf.write(config)
            continue
        assert not differences(config, hf.read(hf.write(config), "config.json"))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_ours_is_loaded_by_transformers(tmp_path: Path, name: str) -> None:
    config = small_config(name, tied=name == "bert", norm_zero_centered=True)
    model = varied(initialized(name, config))
    to_hf(model, tmp_path / "hf", name=name)
    kinds = {"llava": "ImageTextToText", "t5": "Seq2SeqLM", "bert": "MaskedLM"}
    kind = getattr(transformers, f"AutoModelFor{kinds.get(name, 'CausalLM')}")
    theirs = kind.from_pretrained(tmp_path / "hf").eval()
    x = tokens()
    read = {"encoder_tokens": x} if config.encoder_layers else {}
    expected = model.eval()(x, **read)
    others = {"decoder_input_ids": x} if read else {}
    assert (theirs(x, **others).logits - expected).norm() / expected.norm() < 1e-5


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


# config.json of the released 4b model; transformers 4 wrote only what differs from its defaults
RELEASED_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def test_a_released_gemma_config_is_the_published_size() -> None:
    hf = MODELS["gemma3"].hf
    assert hf is not None
    text = RELEASED_4B["text_config"]
    assert not differences(hf.read(text, "config.json"), model_config("gemma3", "4b"))
    assert (
        hf.write(model_config("gemma3", "1b", {"n_layers": 4, "full_attention_every": 0}))[
            "layer_types"
        ]
        == ["sliding_attention"] * 4
    )


KINDS = ["sliding_attention", "full_attention"] * 2
REFUSED_GEMMA4: list[tuple[dict[str, Any], str]] = [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
    ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8 is not supported"),
    ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2"),
    ({"enable_moe_block": True}, "enable_moe_block = True"),
    ({"use_double_wide_mlp": True}, "use_double_wide_mlp = True"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"sliding_window": None, "layer_types": KINDS}, "sliding_window = None"),
    ({"layer_types": KINDS[:3]}, "layer_types has 3 layers; num_hidden_layers = 4"),
    (
        {"layer_types": KINDS, "per_layer_config": {"1": {"head_dim": 16}}},
        "per_layer_config differs between layers",
    ),
    (
        {"per_layer_config": {"1": {"intermediate_size": 4}}},
        "intermediate_size of per_layer_config",
    ),
    (
        {"layer_types": KINDS, "rope_parameters": {"full_attention": LINEAR}},
        "rope_theta of rope_parameters.sliding_attention is missing",
    ),
    (
        {"layer_types": KINDS, "rope_parameters": {"full_attention": YARN, KINDS[0]: SLOW}},
        "rope_type = 'yarn' of rope_parameters.full_attention",
    ),
    (
        {"layer_types": KINDS, "rope_parameters": {"full_attention": LLAMA3, KINDS[0]: SLOW}},
        "rope_type = 'llama3' of rope_parameters.full_attention",
    ),
    (
        {"layer_types": KINDS, "rope_parameters": dict.fromkeys(KINDS, LINEAR)},
        "rope_parameters.sliding_attention scales frequencies",
    ),
    (
        {"layer_types": KINDS, "rope_parameters": {**PROPORTIONAL, "rope_theta": 5.0}},
        "rope_parameters.rope_theta is not supported",
    ),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("llama", {"mlp_bias": True}, "attention_bias = False with mlp_bias = True"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"sliding_window": 8}, "sliding_window = 8 is unknown to dtron's llama"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
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
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (
        "mixtral",
        {"num_experts_per_tok": 5},
        "experts_per_token = 5 is not between 1 and n_experts = 4",
    ),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = "),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ("qwen3_moe", {"num_experts": 5}, "num_experts = 5 and num_local_experts = 6"),
    ("qwen3_moe", {"num_local_experts": None}, "do not give one number of experts"),
    ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers = 1"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
    (
        "deepseek_v3",
        {"rope_scaling": {**YARN, "mscale_all_dim": 0.7}},
        "mscale_all_dim = 0.7 without mscale",
    ),
    (
        "deepseek_v3",
        {"rope_scaling": {**YARN, "mscale_all_dim": 0.7, "mscale": 1.0, "attention_factor": 1.2}},
        "mscale_all_dim = 0.7 with attention_factor",
    ),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters of sliding_attention scale frequencies",
    ),
    (
        "gemma3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "rope_parameters has rope_theta, rope_type",
    ),
    *(("gemma4", change, message) for change, message in REFUSED_GEMMA4),
    ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised by 'mxfp4'"),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
    (
        "qwen3_5",
        {"full_attention_interval": 9},
        "full_attention_interval = 9 with num_hidden_layers = 4",
    ),
    ("qwen3_5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2 is not supported"),
    ("qwen3_5_moe", {"shared_expert_intermediate_size": 30}, "is not a multiple of moe_interm"),
    ("nemotron_h", {"moe_shared_expert_intermediate_size": 30}, "is not a multiple of moe_interm"),
    ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size = 8 is not supported"),
    ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 is not support"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_the_model_does_not_do_is_refused_by_name(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    reference(name, {}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = {**json.loads(path.read_text()), **change}
    if "layer_types" not in change:
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
    ("llama", {"rope_fraction": 0.5}, r"override\.rope_fraction = 0\.5"),
    ("llama", {"query_pre_attn_scalar": 8}, r"override\.query_pre_attn_scalar = 8"),
    ("qwen3", {"bias": True}, r"override\.bias = True"),
    ("gemma3", {"softcap": 30.0}, r"override\.softcap = 30\.0"),
    ("gemma3", {"sandwich_norms": False}, r"override\.sandwich_norms = False"),
    ("gemma4", {"value_norm": False}, r"override\.value_norm = False"),
    ("gemma4", {"layer_scalars": False}, r"override\.layer_scalars = False"),
    ("gemma4", {"full_attention_every": 2, "n_layers": 3}, "does not divide n_layers = 3"),
    (
        "gemma4",
        {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_global_fraction": 1.0},
        "rope_type = 'yarn'",
    ),
    ("gpt", {"n_kv_heads": 2}, r"override\.n_kv_heads = 2 \(it has 4\)"),
    ("gpt", {"positions": "rope"}, r"override\.positions = 'rope'"),
    ("gpt", {"head_dim": 32}, r"override\.head_dim = 32"),
    ("mixtral", {"renormalize": False}, r"override\.renormalize = False"),
    ("mixtral", {"n_shared_experts": 1}, r"override\.n_shared_experts = 1"),
    ("qwen3_moe", {"router": "sinkhorn", "renormalize": False}, r"override\.router = 'sinkhorn'"),
    ("deepseek_v3", {"bias_speed": 0.0}, r"override\.bias_speed = 0\.0 \(it has 0\.001\)"),
    ("gpt_oss", {"routed_scaling": 2.0}, r"override\.routed_scaling = 2\.0"),
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
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.extra is unexpected"):
        from_hf(tmp_path)
    rewritten(tmp_path, lambda t: (t.pop("model.layers.7.extra"), t.pop(key)))
    with pytest.raises(CheckpointError, match=rf"{key} is missing"):
        from_hf(tmp_path)
    rewritten(tmp_path, lambda t: t.update({key: torch.zeros(48, 31)}))
    with pytest.raises(CheckpointError, match=rf"{key} has shape \[48, 31\].*\[48, 32\]"):
        from_hf(tmp_path)
    rewritten(tmp_path, lambda t: t.update({key: torch.zeros(48, 32)}))
    from_hf(tmp_path)


def test_a_tensor_of_an_expert_is_named(tmp_path: Path) -> None:
    reference("qwen3_moe", {}).save_pretrained(tmp_path)
    key = "model.layers.1.mlp.experts.4.up_proj.weight"
    taken = []
    rewritten(tmp_path, lambda t: taken.append(t.pop(key)))
    with pytest.raises(CheckpointError, match=rf"{key} is missing"):
        from_hf(tmp_path)
    more = {key: taken[0], key.replace("4", "6"): taken[0].clone()}
    rewritten(tmp_path, lambda t: t.update(more))
    with pytest.raises(CheckpointError, match=r"experts\.6\.up_proj\.weight is unexpected"):
        from_hf(tmp_path)


def test_layers_that_predict_mtp_tokens(tmp_path: Path) -> None:
    """Their names and the copies of embedding and head are those of the release; transformers
    neither reads nor writes them."""
    theirs = reference("deepseek_v3", {"num_nextn_predict_layers": 1})
    theirs.save_pretrained(tmp_path / "hf")
    assert hf_folder(tmp_path / "hf").config.mtp == 0
    main = from_hf(tmp_path / "hf")
    config = main.config.model_copy(update={"mtp": 1})  # type: ignore[operator]
    model = build_model("deepseek_v3", config, BACKENDS["math"])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.load_state_dict(main.state_dict(), strict=False)
    to_hf(model, tmp_path / "back", name="deepseek_v3")
    tensors = folder_tensors(tmp_path / "back")
    layer = "model.layers.2"
    for name, shape in {"eh_proj": (32, 64), "enorm": (32,), "shared_head.norm": (32,)}.items():
        assert tensors[f"{layer}.{name}.weight"].shape == shape
    embedding, head = (tensors[f"{n}.weight"] for n in ("model.embed_tokens", "lm_head"))
    assert torch.equal(tensors[f"{layer}.embed_tokens.weight"], embedding)
    assert torch.equal(tensors[f"{layer}.shared_head.head.weight"], head)
    back, x = from_hf(tmp_path / "back"), tokens()
    ahead = x.roll(-1, 1).unsqueeze(-1)
    for ours, again in zip(
        model.eval()(x, mtp_tokens=ahead), back(x, mtp_tokens=ahead), strict=True
    ):
        assert torch.allclose(ours, again, atol=1e-6)
    assert torch.allclose(back(x), theirs(x).logits, atol=1e-5)
    kept = type(theirs).from_pretrained(tmp_path / "back")
    assert torch.equal(kept(x).logits, theirs(x).logits)
    path = tmp_path / "back"
    rewritten(path, lambda t: t.update({f"{layer}.embed_tokens.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight differs from model\.embed"):
        from_hf(path)
    more = {f"{layer}.embed_tokens.weight": embedding, "model.layers.3.enorm.weight": head[0]}
    rewritten(path, lambda t: t.update({key: value.clone() for key, value in more.items()}))
    with pytest.raises(CheckpointError, match=r"layers\.3\.enorm\.weight is unexpected"):
        from_hf(path)


def test_biases_of_experts_stay_float32(tmp_path: Path) -> None:
    theirs = reference("deepseek_v3", {})
    theirs.save_pretrained(tmp_path / "hf")
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = theirs.state_dict()[key]
    model = from_hf(tmp_path / "hf", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.get_buffer("blocks.1.ffn.router.expert_bias"), bias)
    to_hf(model, tmp_path / "back", name="deepseek_v3", dtype=torch.float16)
    tensors = folder_tensors(tmp_path / "back")
    assert torch.equal(tensors.pop(key), bias)
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    # a file may hold it narrower
    rewritten(tmp_path / "hf", lambda t: t.update({key: t[key].bfloat16()}))
    narrow = from_hf(tmp_path / "hf").get_buffer("blocks.1.ffn.router.expert_bias")
    assert torch.equal(narrow, bias.bfloat16().float())


def test_rotary_positions_that_a_folder_does_not_mention(tmp_path: Path) -> None:
    """Are those of the architecture, and refused where transformers 4 and 5 differ."""
    for name in ("mixtral", "gpt_oss"):
        reference(name, {}).save_pretrained(tmp_path / name)
        path = tmp_path / name / "config.json"
        content = json.loads(path.read_text())
        del content["rope_parameters"]
        path.write_text(json.dumps(content))
    assert hf_folder(tmp_path / "mixtral").config.rope_theta == 1e6
    with pytest.raises(CheckpointError, match="neither rope_parameters"):
        hf_folder(tmp_path / "gpt_oss")


def test_how_a_mixture_is_trained_does_not_make_it_another_one() -> None:
    config = small_config("deepseek_v3")
    trained = {"balance": "none", "balance_coefficient": 0.0, "z_loss": 0.1, "jitter": 0.1}
    trained |= {"capacity_factor": 2.0, "capacity_pad": True, "bias_speed": 0.1}
    assert not differences(config, config.model_copy(update=trained))
    for change in ({"bias_speed": 0.0}, {"routed_scaling": 1.0}, {"top_groups": 1}):
        ((key, _, _),) = differences(config, config.model_copy(update=change))
        assert change.keys() == {key}
    halved = {"nope_head_dim": 20, "rope_head_dim": 4}
    named = [key for key, _, _ in differences(config, config.model_copy(update=halved))]
    assert named == list(halved)


OLDER_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
RELEASED: list[tuple[str, str, dict[str, Any]]] = [
    (
        "mixtral",
        "8x7b",
        {"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768}
        | {"num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False}
        | {"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02}
        | {"sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000},
    ),
    (
        "qwen3_moe",
        "30b-a3b",
        {"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048}
        | {"intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48}
        | {"mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8}
        | {"num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False}
        | {"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0}
        | {"router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False}
        | {"tie_word_embeddings": False, "vocab_size": 151936},
    ),
    (
        "deepseek_v3",
        "671b",
        {"attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168}
        | {"intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840}
        | {"moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True}
        | {"num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61}
        | {"num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06}
        | {
            "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
            | OLDER_YARN
        }
        | {"rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"}
        | {"topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280},
    ),
    (
        "deepseek_v3",
        "16b-a3b",
        {"attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "hidden_size": 2048}
        | {"first_k_dense_replace": 1, "intermediate_size": 11264, "kv_lora_rank": 512}
        | {"max_position_embeddings": 8192, "moe_intermediate_size": 1408, "moe_layer_freq": 1}
        | {"n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True}
        | {"num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27}
        | {"num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05}
        | {"rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446}
        | {"scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False}
        | {"topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840},
    ),
    (
        "gpt_oss",
        "20b",
        {"attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880}
        | {"initial_context_length": 4096, "intermediate_size": 2880, "num_hidden_layers": 24}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088}
        | {"max_position_embeddings": 131072, "num_attention_heads": 64}
        | {"num_experts_per_tok": 4, "num_key_value_heads": 8, "num_local_experts": 32}
        | {"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 150000}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False} | OLDER_YARN}
        | {"router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0}
        | {"tie_word_embeddings": False},
    ),
    (
        "nemotron_h",
        "30b-a3b",
        {"attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2}
        | {"head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688, "intermediate_size": 1856}
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
        | {"layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu"}
        | {"mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32"}
        | {"max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2"}
        | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
        | {"n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1}
        | {"norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32}
        | {"num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2}
        | {"num_logits_to_keep": 1, "partial_rotary_factor": 1.0, "rope_theta": 10000}
        | {"rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None}
        | {"routed_scaling_factor": 2.5, "ssm_state_size": 128, "tie_word_embeddings": False}
        | {"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001}
        | {"topk_group": 1, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True}
        | {"vocab_size": 131072},
    ),
    (
        "nemotron_h",
        "8b",
        {"attention_bias": False, "attention_head_dim": 128, "chunk_size": 256, "conv_kernel": 4}
        | {"expand": 2, "hidden_dropout": 0.0, "hidden_size": 4096, "intermediate_size": 21504}
        | {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}
        | {"layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu"}
        | {"mamba_num_heads": 128, "max_position_embeddings": 8192, "mlp_hidden_act": "relu2"}
        | {"n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52}
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "ssm_state_size": 128}
        | {"tie_word_embeddings": False, "vocab_size": 131072},
    ),
]


@pytest.mark.parametrize(("name", "size", "given"), RELEASED, ids=lambda v: v if v else "")
def test_released_configurations(name: str, size: str, given: dict[str, Any]) -> None:
    """As transformers 4 wrote them, apart from how weights are quantised."""
    hf = MODELS[name].hf
    assert hf is not None
    shared = {"model_type": name, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    shared |= {"attention_dropout": 0.0, "use_cache": True, "initializer_range": 0.02}
    if name == "nemotron_h":
        del shared["hidden_act"]
    assert not differences(hf.read({**shared, **given}, "config.json"), MODELS[name].sizes[size])


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
    plain = HFFolder._slice

    def counted(self: HFFolder, theirs: str, region: Any) -> torch.Tensor:
        part = plain(self, theirs, region)
        elements.append(part.numel())
        return part

    monkeypatch.setattr(HFFolder, "_slice", counted)
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
        "apart": (
            WeightName("up", "e.{expert}.up"),
            WeightName("gate", "e.{expert}.gate", transposed=True),
        ),
        "turns": (
            WeightName("up", "both", True, turns[0], 1),
            WeightName("gate", "both", True, turns[1], 1),
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
        export = HFExport(
            hf, config, model, lambda _: torch.float32, partial(part_of, state), 10**6
        )
        export.write(out, [0])
        export.write_json(out)
        tensors = load_file(out / "model.safetensors")
        if case == "apart":
            assert torch.equal(tensors["e.1.gate"], model.gate[1].T)
        else:
            assert tensors["both"].shape == (2, 3, 8)
            assert torch.equal(tensors["both"][..., 1::2].transpose(1, 2), model.gate)
        folder = HFFolder(out, {"llama": HFFamily("llama", hf, Stacked)})
        part = (slice(1, 2), slice(1, 3), slice(0, 2))
        for fqn, value in state.items():
            assert torch.equal(folder.read(fqn, part), value[part])
