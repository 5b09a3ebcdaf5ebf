"""`dtron.huggingface`: under `fast_plan` models of transformers compute the same in each layout."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from dtron.config import Compile
from dtron.errors import ConfigError
from dtron.parallelisms import Mesh, parallelize
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers")


PAGE = Path(__file__).parents[2] / "docs/plug-in-hugging-face.md"

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16, "final_logit_softcapping": None},
    "GptOss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Apertus": {},
    "Bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "num_key_value_heads": 4},
    "Llama4": {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "Phimoe": {"sliding_window": 5, "num_local_experts": 4},
}
"""A soft cap and windows in every other layer; sinks and windows; parameters between layers that tp
shards; attention that does not call the interface; chunks, and windows, in the mask alone."""


def build(name: str, implementation: str) -> Any:
    """A small model with random weights, large enough that attention is far from uniform."""
    import transformers

    torch.manual_seed(0)
    section = {"Llama4": "Llama4Text"}.get(name, name)
    config = getattr(transformers, f"{section}Config")(
        **{**SIZES, **MODELS[name]}, attn_implementation=implementation
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
        else:
            parameter.data.add_(torch.randn_like(parameter) / 4)
    return model.train()


def tokens(rows: int = 4, length: int = 16) -> Tensor:
    return torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    """Of as many tokens in the first rows as in the last, so that a mean of means is the mean."""
    found = tokens()
    found[::2, :5] = -100
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in grads.items()}


@functools.cache
def reference(name: str, implementation: str = "eager") -> tuple[float, dict[str, Tensor]]:
    """transformers' own attention and loss, in one process."""
    model = build(name, implementation)
    loss = model(tokens(), labels=labels(), use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


def trained(name: str, tp: int, backend: str, chunks: int) -> tuple[float, dict[str, Tensor]]:
    """On one rank: (sum of the ranks' shares of the loss, whole gradients)."""
    from dtron.huggingface import fast_plan

    mesh = Mesh(tp=tp)
    compile = Compile.model_validate({"enable": bool(backend), "backend": backend or "inductor"})
    model = build(name, "dtron")
    plan = fast_plan(model, mesh, loss_chunks=chunks, compile=compile, dtype="float32")
    model = parallelize(model, mesh, plan)
    parts = mesh.size("dp_shard")
    mine = [x.chunk(parts)[mesh.rank("dp_shard")] for x in (tokens(), labels())]
    loss = model(mine[0], labels=mine[1], use_cache=False).loss / parts
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=mesh.group("dp_shard"))
    return total.item(), gradients(model)


def assert_equal(
    found: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]]
) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1].keys() == wanted[1].keys()
    floor = 1e-3 * max(g.norm() for g in wanted[1].values())
    for name, gradient in wanted[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm().clamp_min(floor)
        assert error < 1e-4, name


@pytest.mark.parametrize(
    ("name", "ranks", "tp", "backend", "chunks"),
    [
        ("Llama", 2, 1, "aot_eager", 3),
        ("Llama", 4, 2, "", 3),
        ("Qwen3", 2, 2, "aot_eager", 3),  # tied weights, norms of heads
        ("Qwen3", 2, 1, "", 1),
        ("Gemma2", 1, 1, "aot_eager", 3),
        ("GptOss", 2, 1, "", 3),
        ("GptOss", 2, 2, "", 3),  # sinks, in a module of replicated layers
    ],
)
def test_models_equal_transformers_own(
    name: str, ranks: int, tp: int, backend: str, chunks: int
) -> None:
    for found in run_ranks(ranks, trained, name, tp, backend, chunks):
        assert_equal(found, reference(name))


class HostWaits(TorchDispatchMode):
    """Counts operators that read a value of a tensor, for which the host waits on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def host_waits(name: str, prepared: bool) -> tuple[int, int]:
    """Return how often a step waits, and the number of FSDP units."""
    from dtron import AdamW
    from dtron.huggingface import fast_plan
    from dtron.parallelisms import clip_scale, global_norm

    mesh, model = Mesh(), build(name, "dtron" if prepared else "eager")
    if prepared:
        plan = fast_plan(model, mesh, compile=Compile(), dtype="float32")
        model = parallelize(model, mesh, plan)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=1e-3)
    with HostWaits() as waits:
        model(tokens(), labels=labels(), use_cache=False).loss.backward()
        optimizer.scale = clip_scale(global_norm(parameters, mesh), 1.0)
        optimizer.step()
    return waits.n, sum(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize(("name", "units"), [("Llama", 5), ("Qwen3", 3), ("Gemma2", 3)])
def test_a_step_never_waits_for_the_device(name: str, units: int) -> None:
    """Units: embedding, two blocks, head and root; with tied weights two blocks and the root."""
    assert run_ranks(1, host_waits, name, True) == [(0, units)]
    assert run_ranks(1, host_waits, name, False)[0][0] > 0  # transformers' own waits


def test_a_mask_of_one_element_is_not_read() -> None:
    from dtron.huggingface.attention import mask

    one, left = torch.ones((), dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    with HostWaits() as waits:
        found = mask(4, one.expand(2, 4), local_size=3)
    assert (waits.n, found.shape[:2]) == (0, (0, 3))
    left[1, 0] = False  # planted: padding before tokens
    with pytest.raises(ConfigError, match="padding before tokens"):
        mask(4, left)


def test_losses_divide_as_transformers_does() -> None:
    """By num_items_in_batch, with shifted labels, by position; without labels, logits."""
    wanted, found = build("Llama", "eager"), run_ranks(1, divided)[0]
    batch = {"input_ids": tokens(), "use_cache": False}
    shift = F.pad(labels(), (0, 1), value=-100)[:, 1:].contiguous()
    values = [
        wanted(**batch, labels=labels(), num_items_in_batch=7).loss,
        wanted(**batch, labels=labels(), shift_labels=shift).loss,
        wanted(tokens(), None, None, None, None, labels(), use_cache=False).loss,
        wanted(**batch, shift_labels=shift).logits,
        wanted(**batch).logits,
    ]
    for ours, theirs in zip(found, values, strict=True):
        torch.testing.assert_close(ours, theirs.detach())


def divided() -> list[Tensor]:
    from dtron.huggingface import fast_plan

    mesh, model = Mesh(), build("Llama", "dtron")
    plan = fast_plan(model, mesh, loss_chunks=3, compile=Compile(), dtype="float32")
    model = parallelize(model, mesh, plan)
    batch = {"input_ids": tokens(), "use_cache": False}
    shift = F.pad(labels(), (0, 1), value=-100)[:, 1:].contiguous()
    return [
        model(**batch, labels=labels(), num_items_in_batch=7).loss.detach(),
        model(**batch, labels=labels(), shift_labels=shift).loss.detach(),
        model(tokens(), None, None, None, None, labels(), use_cache=False).loss.detach(),
        model(**batch, shift_labels=shift).logits.detach(),
        model(**batch).logits.detach(),
    ]


def capped() -> None:
    from dtron.huggingface import fast_plan

    mesh, model = Mesh(), build("Gemma2", "dtron")
    model.config.final_logit_softcapping = 30.0
    model = parallelize(model, mesh, fast_plan(model, mesh, compile=Compile(), dtype="float32"))
    with pytest.raises(ConfigError, match="changes its logits after the head"):
        model(tokens(), labels=labels(), use_cache=False)


def test_logits_that_change_after_the_head_are_refused() -> None:
    run_ranks(1, capped)


def refused_call(more: dict[str, Any]) -> None:
    from dtron.huggingface import fast_plan

    mesh, model = Mesh(), build("Llama", "dtron")
    model = parallelize(model, mesh, fast_plan(model, mesh, compile=Compile(), dtype="float32"))
    with pytest.raises(ConfigError, match=next(iter(more))):
        model(tokens(), labels=labels(), use_cache=False, **more)


@pytest.mark.parametrize("more", [{"ignore_index": 0}, {"logits_to_keep": 4}])
def test_arguments_that_the_loss_in_chunks_lacks_are_refused(more: dict[str, Any]) -> None:
    run_ranks(1, refused_call, more)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("Bloom", 1, "BloomForCausalLM computes attention in its own code"),
        ("Llama4", 1, "windows or chunks of 4 tokens"),
        ("Phimoe", 1, "windows or chunks of 5 tokens"),
        ("Apertus", 2, "no tp style for model.layers.*.mlp.act_fn"),
    ],
)
def test_models_that_would_compute_something_else_are_refused(
    name: str, ranks: int, message: str
) -> None:
    run_ranks(ranks, refused_model, name, ranks, message)


def refused_model(name: str, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        trained(name, tp, "", 3)


def test_attention_code_of_a_model_cannot_use_the_mask() -> None:
    import dtron.huggingface  # noqa: F401

    with pytest.raises(RuntimeError, match="size"):
        build("Bloom", "dtron")(tokens(), use_cache=False)


def own_placements() -> None:
    from dtron.huggingface import fast_plan
    from dtron.huggingface.plan import placements
    from dtron.parallelisms import replicate

    mesh, model = Mesh(tp=2), build("Llama", "dtron")
    rules = placements(model)
    model._tp_plan = {"lm_head": "unknown"}
    assert fast_plan(model, mesh, placements=rules).placements == rules
    with pytest.raises(ConfigError, match="lm_head has no placement rule colwise"):
        fast_plan(model, mesh, placements={**rules, "lm_head": replicate()})


def test_placements_replace_those_of_the_model() -> None:
    run_ranks(2, own_placements)


def masked_language_model() -> None:
    from dtron.huggingface import fast_plan

    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    import transformers

    config = transformers.ModernBertConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, decoder_bias=False
    )
    model = transformers.ModernBertForMaskedLM(config)
    mesh = Mesh()
    with pytest.raises(ConfigError, match="ForMaskedLMLoss, not ForCausalLMLoss"):
        parallelize(model, mesh, fast_plan(model, mesh, compile=Compile(), dtype="float32"))


def test_another_loss_than_that_of_causal_models_is_refused() -> None:
    run_ranks(1, masked_language_model)


def float8_layers() -> list[str]:
    from dtron.huggingface import fast_plan

    mesh, model = Mesh(), build("Llama", "dtron")
    seen: list[str] = []

    def note(model: Any) -> None:
        seen.extend(type(m).__name__ for m in model.model.layers[0].mlp.children())

    plan = fast_plan(model, mesh, float8="rowwise", compile=Compile(), convert=note)
    model = parallelize(model, mesh, plan)
    loss = model(tokens(), labels=labels(), use_cache=False).loss
    loss.backward()
    assert loss.isfinite()
    return seen


def test_linear_layers_of_blocks_become_float8() -> None:
    assert run_ranks(1, float8_layers)[0][:3] == ["Float8Linear"] * 3


def logits(implementation: str, **more: Any) -> Tensor:
    import dtron.huggingface  # noqa: F401

    model = build("Llama", implementation)
    batch = {"input_ids": tokens(), **more}
    return model(**batch, use_cache=False).logits.detach()


def test_packed_documents_do_not_see_each_other() -> None:
    """Bounds as DataCollatorWithFlattening makes them; positions restart too."""
    row = tokens(1, 12)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = logits("dtron", input_ids=row, position_ids=positions, cu_seq_lens_q=bounds)
    alone = [logits("sdpa", input_ids=row[:, a:b]) for a, b in ((0, 5), (5, 12))]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


def test_padding_on_the_right_changes_no_token() -> None:
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[1, 10:] = 0
    found, wanted = logits("dtron", attention_mask=mask), logits("sdpa", attention_mask=mask)
    torch.testing.assert_close(found[mask > 0], wanted[mask > 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"attention_mask": torch.arange(16).repeat(4, 1).clamp(max=1)}, "padding before tokens"),
        ({"position_ids": (torch.arange(16) % 8).repeat(4, 1)}, "cu_seq_lens_q"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        logits("dtron", **more)


def test_a_mask_function_of_the_model_is_refused_with_packed_documents_too() -> None:
    from transformers.masking_utils import create_causal_mask

    config = build("Llama", "dtron").config
    given = {"config": config, "inputs_embeds": torch.zeros(1, 16, 32), "attention_mask": None}
    given |= {"past_key_values": None, "position_ids": (torch.arange(16) % 8)[None]}
    mask = create_causal_mask(**given)
    assert mask is not None
    assert mask.shape[0] == 1  # documents
    with pytest.raises(ConfigError, match="or_mask_function"):
        create_causal_mask(**given, or_mask_function=lambda _batch, _head, _q, kv: kv < 4)


def test_what_a_plan_does_not_fit_is_refused() -> None:
    from dtron.huggingface.plan import _head, _to_float8, placements

    model = build("Llama", "eager")
    model.lm_head = torch.nn.Linear(32, 96)
    with pytest.raises(ConfigError, match="no Linear without bias; use loss_chunks=1"):
        _head(model)
    model._tp_plan = {"lm_head": "colwise_packed"}
    with pytest.raises(ConfigError, match="colwise_packed"):
        placements(model)
    with pytest.raises(ConfigError, match="did you mean rowwise"):
        _to_float8("model.layers.*", "rowise", None, torch.bfloat16)  # type: ignore[arg-type]


def run_page() -> float:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    code = re.sub(r"^dist\.(init|destroy)_process_group\(\)$", "", code, flags=re.M)
    code = code.replace("fast_plan(model, mesh)", "fast_plan(model, mesh, compile=Compile())")
    names: dict[str, Any] = {"Compile": Compile}
    exec(code, names)
    return names["loss"].item()


def test_the_code_of_the_page_trains() -> None:
    for loss in run_ranks(2, run_page):
        assert loss < 4.0  # of 4.9 at the start


def test_both_sides_of_the_benchmark_compute_the_same() -> None:
    first, *others = run_ranks(1, variants)[0]
    assert others == pytest.approx([first] * 3, rel=1e-2)  # in bfloat16, after steps on equal data


def variants() -> list[float]:
    from benchmarks import hf_plugin

    mesh, losses = Mesh(), []
    for name in hf_plugin.VARIANTS[:-1]:
        step = hf_plugin.step_of(name, "debug", 16, mesh, Compile())
        batches = hf_plugin.random_batches(mesh, 256, (2, 16))
        losses.append(hf_plugin.measure(step, batches, 2, 1)[1])
    return losses
