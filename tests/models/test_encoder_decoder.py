"""T5: an encoder, and a decoder with attention to its output; compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dtron.config import Data, RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.models import MODELS, from_hf, model_config, to_hf
from dtron.models.encoder_decoder import EncoderDecoder, greedy, relative_bias
from dtron.models.flops import FlopsModel, flops_per_token
from dtron.plan.exact import refusals
from dtron.setup.rules import MachineCandidate, ModelCandidate, all_broken
from tests.models.build import initialized, small_config, tokens, varied

SHAPE = {
    **{"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4},
    **{"num_layers": 2, "num_decoder_layers": 3, "dropout_rate": 0.0, "pad_token_id": None},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
}
VERSIONS = {
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "v1.0": {"feed_forward_proj": "relu", "num_layers": 1},
}
LENGTHS = {"encoder": 40, "decoder": 11}


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def reference(transformers: Any, settings: dict[str, Any]) -> Any:
    """A random T5 of transformers; norms are not 1."""
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SHAPE, **settings})
    model = transformers.T5ForConditionalGeneration(config)
    if settings.get("tie_word_embeddings") is False:  # transformers 5 ties them nevertheless
        model.lm_head.weight = torch.nn.Parameter(torch.empty(97, 32))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    return model.eval()


def inputs() -> tuple[Tensor, Tensor]:
    """Tokens of encoder and decoder."""
    return tokens(length=LENGTHS["encoder"]), tokens(length=LENGTHS["decoder"], seed=1)


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_gradients_and_files_equal_those_of_transformers(
    transformers: Any, tmp_path: Path, version: str
) -> None:
    theirs = reference(transformers, VERSIONS[version])
    theirs.save_pretrained(tmp_path / "hf")
    ours = from_hf(tmp_path / "hf", attention="math")
    encoder, decoder = inputs()
    found = ours(decoder, encoder_tokens=encoder)
    wanted = theirs(input_ids=encoder, decoder_input_ids=decoder).logits
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    to_hf(ours, tmp_path / "back", name="t5")
    back = type(theirs).from_pretrained(tmp_path / "back")
    for key, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    again = from_hf(tmp_path / "back").state_dict()
    assert all(torch.equal(again[key], value) for key, value in ours.state_dict().items())
    direction = torch.randn_like(found)
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    to_hf(ours, tmp_path / "gradients", name="t5")
    written = dict(type(theirs).from_pretrained(tmp_path / "gradients").named_parameters())
    for key, parameter in theirs.named_parameters():
        gap = (written[key] - parameter.grad).norm()
        assert gap <= 1e-5 * parameter.grad.norm() + 1e-6, key


def test_text_equals_that_of_transformers(transformers: Any, tmp_path: Path) -> None:
    """Greedy decoding; a sequence that has ended repeats its last token."""
    theirs = reference(transformers, VERSIONS["v1.1"])
    theirs.save_pretrained(tmp_path)
    ours, (encoder, _) = from_hf(tmp_path), inputs()
    assert isinstance(ours, EncoderDecoder)
    settings = {"do_sample": False, "decoder_start_token_id": 0, "max_new_tokens": 9}
    settings["use_cache"] = (
        False  # of transformers 5.24 fails with more decoder than encoder layers
    )
    free = theirs.generate(encoder, **settings, eos_token_id=None)[:, 1:]
    assert torch.equal(greedy(ours, encoder, 9), free)
    end = int(free[0, 3])
    found = greedy(ours, encoder, 9, end)
    for row, whole in zip(found, free, strict=True):
        stops = (whole == end).nonzero().flatten().tolist()
        first = stops[0] + 1 if stops else found.shape[1]
        assert torch.equal(row[:first], whole[: min(first, found.shape[1])])
        assert (row[first:] == end).all()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj = 'gated-relu' is not supported"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder = False is not supported"),
        ({"num_layers": None}, "num_layers is missing"),
    ],
)
def test_other_architectures_are_refused(keys: dict[str, Any], message: str) -> None:
    hf = MODELS["t5"].hf
    assert hf is not None
    with pytest.raises(CheckpointError, match=message):
        hf.read({**hf.write(MODELS["t5"].sizes["debug"]), **keys}, "config.json")


@pytest.mark.parametrize("causal", [True, False])
def test_queries_are_at_the_last_keys(causal: bool) -> None:
    """Biases of the last 3 of 9 tokens are the last rows; later tokens are masked if causal."""
    table = torch.randn(8, 4)
    whole = relative_bias(table, 9, 9, 12, causal)
    assert whole.shape == (1, 4, 9, 9)
    assert torch.equal(relative_bias(table, 3, 9, 12, causal), whole[:, :, -3:])
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert whole.isinf()[0, 0].equal(later if causal else torch.zeros_like(later))


def test_the_encoder_runs_once_for_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = varied(initialized("t5", small_config("t5"))).eval()
    assert isinstance(model, EncoderDecoder)
    (encoder, _), runs = inputs(), []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda x: runs.append(1) or encode(x))
    found = greedy(model, encoder, 5)
    whole = torch.cat([torch.zeros_like(found[:, :1]), found], 1)
    again = model(whole[:, :-1], encoder_tokens=encoder).argmax(-1)
    assert torch.equal(found, again)
    assert runs == [1]


def test_a_decoder_sees_earlier_tokens_and_an_encoder_all() -> None:
    model = varied(initialized("t5", small_config("t5"))).eval()
    encoder, decoder = inputs()
    logits = model(decoder, encoder_tokens=encoder)
    changed = decoder.clone()
    changed[:, 7] += 1
    same = (model(changed % 97, encoder_tokens=encoder) == logits).all(-1)
    assert same[:, :7].all()
    assert not same[:, 7:].any()
    encoder[:, -1] = (encoder[:, -1] + 1) % 97
    assert not (model(decoder, encoder_tokens=encoder) == logits).all(-1).any()


def test_flops_are_those_of_a_step() -> None:
    """Of matmuls alone: the model counts norms as if they were matmuls, 6 FLOPs a parameter."""
    config, data = small_config("t5", n_layers=3), Data(mask_fraction=0.3)
    spans = data.span_lengths(40)
    model = initialized("t5", config)
    x, read = tokens(length=spans.decoder), tokens(length=spans.encoder)
    with FlopCounterMode(display=False) as counter:
        model(x, encoder_tokens=read).sum().backward()
    dim = config.dim
    norms = 6 * dim * (spans.encoder * (2 + 1) + spans.decoder * (2 * 3 + 1)) / spans.text
    counted = flops_per_token(FlopsModel.of(config, spans=spans), spans.text, "full") - norms
    assert counter.get_total_flops() / (2 * spans.text) == pytest.approx(counted, rel=1e-3)


def test_exact_plans_are_refused() -> None:
    (reason,) = refusals(RunConfig.load(None, ["model.name=t5"]))
    assert reason.startswith("an encoder before a decoder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"encoder_layers": 4},
            "encoder_layers = 4 leaves no decoder in n_layers = 4; use at most",
        ),
        ({"window": 8}, "window = 8 conflicts with encoder_layers = 2; use 0"),
        ({"positions": "rope"}, 'positions = "rope" conflicts with encoder_layers = 2; use "rel'),
        ({"layer_pattern": "*-"}, 'layer_pattern = ".-" conflicts with encoder_layers = 2; use ""'),
        ({"relative_buckets": 6}, "relative_buckets = 6 needs a multiple of 4"),
        ({"encoder_layers": 0}, 'positions = "relative" conflicts with encoder_layers = 0; use "r'),
    ],
)
def test_contradictory_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config("t5", "debug", changes)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["parallel.cp=2"], "parallel.cp = 2 with model.override.encoder_layers = 2"),
        (["data.mask_documents=true"], "data.mask_documents = True with data.objective = "),
        (["data.packing=pad"], "data.packing = 'pad' with data.objective = "),
        (["data.objective=next_token"], 'does not fit model.override.encoder_layers = 2; use "sp'),
        (["train.sample_tokens=5"], "train.sample_tokens = 5 with data.objective = "),
        (["data.mask_token=x"], "data.mask_token = 'x' has no effect"),
        (
            ["parallel.tp=4", "train.seq_len=64"],
            "splits the 58 tokens of the encoder and the 14 of the decoder, of train.seq_len = 64, "
            "over parallel.tp = 4; use train.seq_len = ",
        ),
        (["model.attention=flash"], "does not support position biases"),
    ],
)
def test_runs_that_do_not_fit_are_refused(keys: list[str], message: str) -> None:
    words = ["model.name=t5", "train.global_batch=8", *keys]
    config = RunConfig.load(None, words)
    if "model.attention=flash" in keys:
        run = MachineCandidate(config, 4)
        with pytest.raises(ConfigError, match=message):
            assert run.attention
        return
    assert any(message in each for each in all_broken(ModelCandidate(config, 4)))


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        (
            "llama",
            {"encoder_layers": 1, "positions": "relative"},
            "has no encoder before a decoder",
        ),
        ("t5", {"encoder_layers": 0, "positions": "rope"}, "is an encoder-decoder; use 1 or more"),
    ],
)
def test_an_encoder_needs_its_family(name: str, override: dict[str, Any], message: str) -> None:
    words = [f"model.override.{key}={value}" for key, value in override.items()]
    run = ModelCandidate(RunConfig.load(None, [f"model.name={name}", *words]), 1)
    assert any(message in each for each in all_broken(run))
