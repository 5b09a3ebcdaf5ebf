"""Adapters in checkpoints and PEFT's folders: exported, loaded by PEFT, imported, resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtron import cli
from dtron.checkpoint.convert import to_hf_folder, to_peft_folder
from dtron.checkpoint.initial_weights import open_initial
from dtron.config import RunConfig
from dtron.errors import CheckpointError
from dtron.lora.adapters import ADAPTERS, FACTORS, attach
from dtron.models import BACKENDS, MODELS, build_model
from tests.harness import run_ranks
from tests.training import test_trainer
from tests.training.test_trainer import contents, fit, losses

LORA = {"lora__rank": 4, "lora__alpha": 8.0, "optim__lr": 0.05, "checkpoint__interval": 2}
LORA |= {"lora__rank_stabilized": True, "train__steps": 4}
OURS = "model.blocks.1.ffn.down.lora_b"
THEIRS = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a Llama that has been trained for a step."""
    path = tmp_path_factory.mktemp("base")
    run_ranks(1, fit, test_trainer.tiny(path / "run", train__steps=1))
    run_ranks(1, to_hf_folder, path / "run/checkpoints/step-1", path / "llama")
    return path / "llama"


def lora(run_dir: Path, base: Path, **changes: Any) -> RunConfig:
    given = {"checkpoint__initial": str(base), "checkpoint__allow_data_change": True}
    return test_trainer.tiny(run_dir, **{**given, **LORA, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A run of four steps over tp, whose adapters are exported to `peft` and merged to `merged`."""
    path = tmp_path_factory.mktemp("lora")
    run_ranks(2, fit, lora(path / "run", base, parallel__tp=2, checkpoint__keep=0))
    run_ranks(1, _export, path)
    return path


def _export(path: Path) -> None:
    last = path / "run/checkpoints/step-4"
    to_peft_folder(last, path / "peft")
    to_hf_folder(last, path / "merged")


def test_peft_and_the_merged_export_give_equal_logits(base: Path, run: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    peft = pytest.importorskip("peft")
    tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = plain(tokens).logits
    adapted = peft.PeftModel.from_pretrained(plain, run / "peft")(tokens).logits
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "merged")(tokens).logits
    assert (adapted - before).norm() > 0.01 * before.norm()
    torch.testing.assert_close(adapted, merged, rtol=1e-5, atol=1e-5)
    config = json.loads((run / "peft/adapter_config.json").read_text())
    assert (config["r"], config["use_rslora"]) == (4, True)
    assert config["base_model_name_or_path"] == str(base)
    assert cli.commands(["serve-check", str(run / "run")]) == 0


@pytest.fixture(scope="module")
def dora(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """As `run`, with DoRA of a few steps over tp and FSDP."""
    path = tmp_path_factory.mktemp("dora")
    config = lora(path / "run", base, lora__dora=True, parallel__tp=2, checkpoint__keep=0)
    run_ranks(4, fit, config)
    run_ranks(1, _export, path)
    return path


def test_magnitudes_start_as_norms_and_are_resumed_to_the_bit(
    tmp_path: Path, base: Path, dora: Path
) -> None:
    """Also: a run from PEFT's folder equals one from the checkpoint that it was exported from."""
    more = {"lora__dora": True}
    config = lora(tmp_path / "first", base, **more, train__steps=1, optim__lr=1e-9)
    run_ranks(1, fit, config.changed(checkpoint={"interval": 1}))
    stored = contents(tmp_path / "first/checkpoints/step-1")
    names = [name for name in stored if name.startswith("model.") and "magnitude" in name]
    assert len(names) == 14
    for name in names:
        weight = stored[name.replace("lora_magnitude", "weight")]
        torch.testing.assert_close(stored[name], weight.norm(dim=1), rtol=1e-6, atol=1e-6)
    middle = {"checkpoint__resume": str(dora / "run/checkpoints/step-2")}
    run_ranks(4, fit, lora(tmp_path / "same", base, parallel__tp=2, **middle, **more))
    assert losses(tmp_path / "same") == losses(dora / "run")[2:]
    run_ranks(2, fit, lora(tmp_path / "other", base, parallel__zero=1, **middle, **more))
    assert losses(tmp_path / "other") == pytest.approx(losses(dora / "run")[2:], rel=1e-5)
    given = {"train__steps": 2, "lora__initial": str(dora / "peft")}
    run_ranks(1, fit, lora(tmp_path / "peft", base, **given, **more))
    run_ranks(1, fit, lora(tmp_path / "own", dora / "run", train__steps=2, **more))
    assert losses(tmp_path / "peft") == losses(tmp_path / "own")


def test_peft_computes_the_same_dora(base: Path, dora: Path) -> None:
    """Logits, merged weights, and the gradients of all parameters of the adapters."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    peft = pytest.importorskip("peft")
    tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = plain(tokens).logits
    theirs = peft.PeftModel.from_pretrained(plain, dora / "peft", is_trainable=True)
    adapted = theirs(tokens).logits
    merged = transformers.AutoModelForCausalLM.from_pretrained(dora / "merged")(tokens).logits
    assert (adapted - before).norm() > 0.01 * before.norm()
    torch.testing.assert_close(adapted, merged, rtol=1e-5, atol=1e-5)
    assert cli.commands(["serve-check", str(dora / "run")]) == 0
    model = build_model("llama", open_initial(dora / "run").config, BACKENDS["math"])
    attach(model, MODELS["llama"], open_initial(dora / "run").lora)
    stored = contents(dora / "run/checkpoints/step-4")
    model.load_state_dict({name: stored[f"model.{name}"] for name in model.state_dict()})
    logits = model(tokens)
    torch.testing.assert_close(logits, adapted, rtol=1e-5, atol=1e-5)
    for each in (logits, adapted):
        each.sin().sum().backward()
    other = dict(theirs.named_parameters())
    names = ("lora_A", "lora_B", "lora_magnitude_vector")
    for ours, name in zip(ADAPTERS, names, strict=True):
        found = model.get_parameter(f"blocks.1.ffn.down.{ours}").grad
        wanted = other[f"base_model.model.model.layers.1.mlp.down_proj.{name}.default.weight"].grad
        assert found is not None
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_wider_export_keeps_what_bfloat16_would_round(tmp_path: Path, base: Path) -> None:
    config = lora(tmp_path / "run", base, train__dtype="bfloat16", lora__modules=("blocks.1.ffn",))
    run_ranks(1, fit, config)
    last = tmp_path / "run/checkpoints/step-4"
    run_ranks(1, to_hf_folder, last, tmp_path / "wide", "float32")
    stored = contents(last)
    weight, a, b = (stored[f"{OURS.rpartition('.')[0]}.{x}"] for x in ("weight", *FACTORS))
    assert weight.dtype == torch.bfloat16
    found = load_file(tmp_path / "wide/model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(found, weight.float() + config.lora.scale * b @ a)


def test_only_adapters_have_moments_and_change(run: Path) -> None:
    first, last = (contents(run / f"run/checkpoints/step-{step}") for step in (2, 4))
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    changed = {name for name in changed if name.startswith("model.")}
    adapters = {name for name in first if name.endswith(("lora_a", "lora_b"))}
    assert changed == adapters
    assert len(adapters) == 28
    moments = [name for name in first if name.startswith("optimizer.") and "exp_avg" in name]
    assert moments
    assert all("lora_" in name for name in moments)


def test_runs_resume_to_the_bit_and_under_another_layout(
    tmp_path: Path, base: Path, run: Path
) -> None:
    whole = losses(run / "run")
    middle = {"checkpoint__resume": str(run / "run/checkpoints/step-2")}
    run_ranks(2, fit, lora(tmp_path / "same", base, parallel__tp=2, **middle))
    assert losses(tmp_path / "same") == whole[2:]
    run_ranks(2, fit, lora(tmp_path / "other", base, parallel__zero=2, **middle))
    assert losses(tmp_path / "other") == pytest.approx(whole[2:], rel=1e-5)
    with pytest.raises(AssertionError, match=r"lora\.alpha = 4\.0, but .* lora\.alpha = 8\.0"):
        run_ranks(1, fit, lora(tmp_path / "wrong", base, lora__alpha=4.0, **middle))


def test_training_starts_from_an_adapter_of_peft(tmp_path: Path, base: Path, run: Path) -> None:
    """The same as from the checkpoint that it was exported from, to the bit."""
    given = {"train__steps": 2, "lora__initial": str(run / "peft")}
    run_ranks(1, fit, lora(tmp_path / "peft", base, **given))
    run_ranks(1, fit, lora(tmp_path / "own", run / "run", train__steps=2))
    assert losses(tmp_path / "peft") == losses(tmp_path / "own")


def wrong_adapters(good: Path, path: Path) -> dict[str, Path]:
    """Adapters of other models, by what the error says."""
    found: dict[str, Path] = {}

    def add(message: str) -> Path:
        found[message] = path / str(len(found))
        shutil.copytree(good, found[message])
        return found[message]

    def change(folder: Path, name: str, value: Any) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
        save_file(tensors, folder / "adapter_model.safetensors")

    change(
        add(f"{THEIRS} has shape [48, 4], but the model needs [32, 4]"), THEIRS, torch.ones(48, 4)
    )
    change(add(f"{THEIRS} is missing"), THEIRS, None)
    change(add("model.layers.9.x is unexpected"), "model.layers.9.x", torch.ones(1))
    for key, value, message in (
        ("r", 8, "r = 8, but lora.rank = 4; set lora.rank=8"),
        ("lora_alpha", 16, "lora_alpha = 16, but lora.alpha = 8.0; set lora.alpha=16"),
        ("use_dora", True, "use_dora = True, but lora.dora = False; set lora.dora=true"),
        ("peft_type", "IA3", "peft_type = 'IA3' is not LORA"),
        ("alora_invocation_tokens", [1], "alora_invocation_tokens = [1] is not supported"),
        ("init_lora_weights", "pissa", "init_lora_weights = 'pissa' belongs to changed base"),
    ):
        file = add(f"adapter_config.json: {message}") / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}), encoding="utf-8")
    return found


def test_adapters_of_another_model_are_refused_with_file_and_tensor(
    tmp_path: Path, base: Path, run: Path
) -> None:
    for message, folder in wrong_adapters(run / "peft", tmp_path).items():
        config = lora(tmp_path / "run", base, lora__initial=str(folder))
        (found,) = run_ranks(1, refusal, config)
        assert message in found
        assert str(folder) in found


def refusal(config: RunConfig) -> str:
    with pytest.raises(CheckpointError) as raised:
        fit(config)
    return str(raised.value)


def test_adapters_are_neither_lost_nor_mixed_up(tmp_path: Path, base: Path, run: Path) -> None:
    for changes, message in (
        (
            {"lora__rank": 0, "lora__alpha": 16.0, "lora__rank_stabilized": False},
            "this run has none",
        ),
        ({"lora__rank": 2}, "set lora.rank=4"),
        ({"lora__modules": ("blocks.*.attn",)}, "set lora.modules=[]"),
        ({"lora__initial": str(run / "peft")}, "leave one of them out"),
    ):
        (found,) = run_ranks(1, refusal, lora(tmp_path / "x", run / "run", **changes))
        assert message in found
