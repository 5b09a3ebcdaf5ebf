"""The reference of parity equals transformers with the same weights, in float32.

Every layout is compared with `parity.reference`, dtron's own model in one process. Here that
process is compared with another implementation: its loss, its gradient norm, every gradient and
every parameter after a clipped step of SGD, by the rule of parity.py. Auxiliary losses of routers
are off, since transformers counts loads in another way.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtron.data import Batch
from dtron.models import MODELS, DecoderConfig, to_hf
from dtron.models.decoder import Decoder
from dtron.models.layers import ACTIVATIONS, Activation
from dtron.parallelisms.initialize import Initializer, initialize
from tests.models.build import delta_rule_by_token, with_trained_scalars
from tests.parallelisms import parity
from tests.parallelisms.parity import (
    DENSE,
    MAX_NORM,
    MIXTURES,
    SEED,
    Case,
    Outcome,
    compare,
    initializer,
    reference,
)

transformers = pytest.importorskip("transformers", minversion="5.0")

YARN = {
    **{"rope_scaling": "yarn", "rope_scaling_factor": 40.0, "rope_original_context": 32},
    **{"rope_mscale": 1.0, "rope_mscale_all_dim": 0.7},
}


def debug(name: str, **override: Any) -> Case:
    """The debug size of a family: 3 sequences of 48 tokens."""
    return case(name, 48, **{**MODELS[name].sizes["debug"].model_dump(), **override})


def case(name: str, seq_len: int, documents: bool = False, **override: Any) -> Case:
    """One step of 3 sequences without a balance loss."""
    plain = {"balance": "none", "balance_coefficient": 0.0}
    keys: dict[str, Any] = {"sequences": 3, "steps": 1, "documents": documents}
    return Case(name, override={**override, **plain}, seq_len=seq_len, **keys)


FAMILIES = [name for name in (*DENSE, *MIXTURES) if MODELS[name].hf is not None]
EVEN = {"gemma4": {"n_layers": 4}}
"""transformers gives the last layer of Gemma 4 full attention."""
CASES = {
    **{name: debug(name) for name in ("gpt_oss", "qwen3_moe")},
    **{
        f"{name}, parity's size, documents": case(name, 16, documents=True, **EVEN.get(name, {}))
        for name in FAMILIES
    },
    "llama, tied": debug("llama", tied=True),
    "qwen3, tied": debug("qwen3", tied=True),
    "gpt, untied": debug("gpt", tied=False),
    "deepseek_v3, YaRN": debug("deepseek_v3", **YARN),
    "deepseek_v3, YaRN, plain queries": debug("deepseek_v3", **YARN, q_lora_rank=0),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(CASES[name], tmp_path, monkeypatch)


def test_clamped_experts_equal_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss with biases about as large as the limits of its activation, which parity's weights
    never reach."""
    plain, clamped = ACTIVATIONS["clamped_swiglu"], []

    def function(gate: Tensor) -> Tensor:
        clamped.append(gate > 7)
        return plain.function(gate)

    def linear(up: Tensor) -> Tensor:
        assert plain.linear is not None
        clamped.append(up.abs() > 7)
        return plain.linear(up)

    monkeypatch.setitem(ACTIVATIONS, "clamped_swiglu", Activation(function, True, linear))
    monkeypatch.setattr(parity, "initializer", near_the_limits)
    monkeypatch.setattr(parity, "_REFERENCES", {})  # of these weights
    check(case("gpt_oss", 16), tmp_path, monkeypatch)
    assert all(each.any() and not each.all() for each in clamped)


def near_the_limits(case: Case, config: DecoderConfig) -> Initializer:
    """Parity's weights, but for larger biases of experts' inputs."""
    fill = initializer(case, config)

    def larger(fqn: str, full: Tensor, generator: torch.Generator) -> None:
        fill(fqn, full, generator)
        if fqn.endswith(("experts.gate_bias", "experts.up_bias")):
            full.mul_(700)  # of a standard deviation of 0.01

    return larger


def check(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless `parity.reference` equals transformers."""
    config, _ = case.resolved()
    theirs = loaded(case, config, drawn(case, config), folder / "weights")
    delta_rule_by_token(monkeypatch, theirs)
    found = {**reference(case)}
    wanted = found | of_transformers(case, theirs)
    for kind in ("gradients", "parameters"):  # written and loaded as weights, for their names
        written = loaded(case, config, found[kind], folder / kind)
        found[kind] = dict(written.named_parameters())
        assert found[kind].keys() == wanted[kind].keys()
    wrong = Outcome(compare([found], wanted)).wrong(case)
    assert not wrong, "; ".join(wrong)


def drawn(case: Case, config: DecoderConfig) -> dict[str, Tensor]:
    """The weights of `parity.reference`."""
    model = parity.build(case, config)
    initialize(model, SEED, parity.initializer(case, config))
    return model.state_dict()


def loaded(case: Case, config: DecoderConfig, values: dict[str, Tensor], folder: Path) -> Any:
    """A model of transformers with values of ours for parameters."""
    model = parity.build(case, config)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(values[fqn])
    to_hf(model, folder, name=case.model)
    kind = transformers.AutoModelForCausalLM if config.causal else transformers.AutoModelForMaskedLM
    theirs, info = kind.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    # Gemma's default; transformers gives no gradient to the padding token, as an input
    theirs.get_input_embeddings().padding_idx = None
    return with_trained_scalars(theirs).eval()


def of_transformers(case: Case, model: Any) -> dict[str, Any]:
    """What `parity.reference` returns of one step, without loads; tensors by the model's names."""
    batch = parity.make_batch(case, range(case.sequences), 0)
    n_valid = (batch.labels != -100).sum()
    total = torch.zeros(())
    for tokens, labels in sequences(batch):
        if not case.resolved()[0].causal:  # transformers' loss of masked tokens is another mean
            logits = model(tokens).logits.flatten(0, 1)
            losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            total = total + losses / n_valid
            continue
        keys = {"labels": labels, "shift_labels": labels, "num_items_in_batch": n_valid}
        total = total + model(tokens, use_cache=False, **keys).loss
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    torch.optim.SGD(model.parameters(), lr=case.config().optim.lr).step()
    return {
        "losses": [total.item()],
        "norms": [norm.item()],
        "gradients": gradients,
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
    }


def sequences(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of what attends to itself alone: the batch, or one document after the
    other."""
    if batch.documents is None:
        yield batch.tokens, batch.labels
        return
    assert not isinstance(batch.documents, Mapping), "sequences are whole"
    for tokens, labels, documents in zip(batch.tokens, batch.labels, batch.documents, strict=True):
        for number in documents.unique():
            yield tokens[documents == number][None], labels[documents == number][None]
