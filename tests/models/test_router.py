"""Which experts are chosen, with what weights, and how loads are evened."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.models.decoder import Decoder
from dtron.models.dropout import token_keys
from dtron.models.router import ROUTERS, Router, routers, sinkhorn, update_expert_bias
from tests.models.build import initialized, small_config, tokens, varied

PLAIN: dict[str, Any] = {
    "router": "softmax",
    "renormalize": False,
    "balance": "none",
    "balance_coefficient": 0.0,
}


def router_of(**override: Any) -> Router:
    """8 experts, 2 a token, dim 64; weights of size 1."""
    router = Router(small_config("mixtral", **{**PLAIN, **override}))
    generator = torch.Generator().manual_seed(0)
    for parameter in router.parameters():
        parameter.data.normal_(generator=generator)
    return router


def hidden(batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    return 0.1 * torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(seed))


def logits_of(router: Router, x: Tensor) -> Tensor:
    return x @ router.weight.T


def test_softmax_with_and_without_renormalisation():
    router, x = router_of(), hidden()
    shares = logits_of(router, x).softmax(-1)
    weights, chosen, counts, losses = router(x)
    torch.testing.assert_close(weights, shares.topk(2).values)
    assert torch.equal(chosen, shares.topk(2).indices)
    assert torch.equal(counts, chosen.flatten().bincount(minlength=8))
    assert not losses.any()
    renormalized = router_of(renormalize=True)(x).weights
    torch.testing.assert_close(renormalized, weights / weights.sum(-1, keepdim=True))
    scaled = router_of(renormalize=True, routed_scaling=2.5)(x).weights
    torch.testing.assert_close(scaled.sum(-1), torch.full((2, 12), 2.5))


def test_softmax_of_the_chosen_is_renormalised_softmax():
    x = hidden()
    one, other = router_of(renormalize=True)(x), router_of(router="topk_softmax")(x)
    assert torch.equal(one.chosen, other.chosen)
    torch.testing.assert_close(one.weights, other.weights)


def test_learned_bias_is_a_part_of_the_logits():
    router, x = router_of(router="topk_softmax", bias=True), hidden()
    assert router.bias is not None
    logits = logits_of(router, x) + router.bias
    torch.testing.assert_close(router(x).weights, logits.topk(2).values.softmax(-1))


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_expert_bias_chooses_but_does_not_weigh(name):
    router, x = router_of(router=name, bias_speed=0.1), hidden()
    plain = router_of(router=name)
    assert router.expert_bias is not None
    assert torch.equal(router(x).chosen, plain(x).chosen)
    router.expert_bias[3] = 10.0
    found = router(x)
    assert (found.chosen == 3).any(-1).all()
    logits = logits_of(router, x)
    scores = logits.sigmoid() if name == "sigmoid" else logits.softmax(-1)
    torch.testing.assert_close(found.weights, scores.gather(-1, found.chosen))


@pytest.mark.parametrize(("name", "ranked_by"), [("softmax", 1), ("sigmoid", 2)])
def test_groups_limit_the_choice(name, ranked_by):
    router = router_of(router=name, n_groups=4, top_groups=2, bias_speed=0.1, experts_per_token=3)
    assert router.expert_bias is not None
    router.expert_bias += torch.linspace(-0.1, 0.1, 8)
    x = hidden()
    logits = logits_of(router, x)
    scores = (logits.sigmoid() if name == "sigmoid" else logits.softmax(-1)) + router.expert_bias
    for token, chosen in zip(scores.flatten(0, 1), router(x).chosen.flatten(0, 1), strict=True):
        groups = [sorted(group, reverse=True) for group in token.view(4, 2).tolist()]
        best = sorted(range(4), key=lambda g: sum(groups[g][:ranked_by]), reverse=True)[:2]
        allowed = [2 * g + i for g in best for i in (0, 1)]
        wanted = sorted(allowed, key=lambda e: token[e].item(), reverse=True)[:3]
        assert chosen.tolist() == wanted


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "topk_softmax", "sinkhorn"])
def test_ties_choose_different_experts(name):
    router = router_of(router=name)
    found = router(torch.zeros(2, 5, 64))
    assert (found.chosen[..., 0] != found.chosen[..., 1]).all()
    torch.testing.assert_close(found.weights[..., 0], found.weights[..., 1])
    assert torch.equal(found.chosen[:1], router(torch.zeros(1, 5, 64)).chosen)


def test_sinkhorn_evens_loads():
    router, x = router_of(router="sinkhorn"), hidden(4, 64)
    router.weight.data[0] += 0.5 * x.mean((0, 1)) / x.mean((0, 1)).norm() ** 2  # a favourite
    evened = sinkhorn(logits_of(router, x)).exp()
    torch.testing.assert_close(evened.sum(-1), torch.ones(4, 64))
    torch.testing.assert_close(evened.sum((0, 1)), torch.full((8,), 32.0), rtol=0.05, atol=0)
    counts = router(x).counts
    assert counts.max() < router.eval()(x).counts.max()
    logits = logits_of(router, x)
    assert torch.equal(router(x).chosen, logits.topk(2).indices)
    torch.testing.assert_close(router(x).weights, logits.topk(2).values.sigmoid())


def test_routing_is_in_float32():
    router = router_of().bfloat16()
    x = hidden().bfloat16()
    weights = router(x).weights
    assert weights.dtype == torch.float32
    exact = (x.float() @ router.weight.float().T).softmax(-1)
    torch.testing.assert_close(weights, exact.topk(2).values)


def test_buffers_keep_dtype_and_values():
    router = router_of(bias_speed=0.1)
    assert router.expert_bias is not None
    router.expert_bias += 1 / 3
    for moved in (router.bfloat16(), router.double(), router.to("meta")):
        assert moved.expert_bias is not None
        assert moved.expert_bias.dtype == torch.float32
        assert (moved.expert_bias == torch.tensor(1 / 3)).all()
        assert moved.counts.dtype == torch.int64
    assert set(router.state_dict()) == {"weight", "expert_bias"}


def test_jitter_is_keyed_by_token():
    router, x = router_of(jitter=0.3), hidden()
    keys = token_keys(7, 0, torch.arange(2), torch.arange(12))
    first = router(x, keys).weights
    assert torch.equal(first, router(x, keys).weights)
    torch.testing.assert_close(router(x[1:], keys[1:]).weights, first[1:])
    assert not torch.allclose(first, router(x, keys + 1).weights)
    router.eval()
    torch.testing.assert_close(router(x).weights, logits_of(router, x).softmax(-1).topk(2).values)


def test_forced_balance_is_even():
    router = router_of(force_balance=True)
    found = router(hidden(2, 16))
    assert (found.counts == 8).all()
    assert torch.equal(found.chosen[0, :5], torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]))
    shares = logits_of(router, hidden(2, 16)).softmax(-1)
    torch.testing.assert_close(found.weights, shares.gather(-1, found.chosen))


def balance_by_hand(shares: Tensor, chosen: Tensor, loads: Tensor) -> Tensor:
    """E sum f_e p_e of tokens (N, E) and their choices (N, k), with loads of earlier tokens."""
    total = torch.tensor(0.0, dtype=shares.dtype)
    for expert in range(8):
        count = (chosen == expert).sum() + loads[expert]
        total = total + count / (chosen.numel() + loads.sum()) * shares[:, expert].mean()
    return 8 * total


@pytest.mark.parametrize("balance", ["sequence", "micro_batch", "global_batch"])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "topk_softmax"])
def test_balance_and_z_loss_are_their_formulas(name, balance):
    settings = {"router": name, "balance": balance, "balance_coefficient": 0.7, "z_loss": 0.3}
    router, x = router_of(**settings).double(), hidden().double().requires_grad_()
    router.loss_divisor.fill_(4.0)
    before = torch.arange(8) if balance == "global_batch" else torch.zeros(8, dtype=torch.int64)
    router.counts += before
    weights, chosen, counts, losses = router(x, None, router.loads())
    logits = logits_of(router, x)
    shares = logits.softmax(-1)
    if name == "sigmoid":
        shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    if balance == "sequence":
        each = [balance_by_hand(shares[i], chosen[i], before) for i in range(2)]
        wanted = torch.stack(each).mean()
    else:
        wanted = balance_by_hand(shares.flatten(0, 1), chosen.flatten(0, 1), before)
    z = logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(losses, torch.stack([wanted, z]).detach().float())
    assert torch.equal(counts, chosen.flatten().bincount(minlength=8))
    # the gradient: that of what weights do, and of the losses
    target = torch.randn(weights.shape, generator=torch.Generator().manual_seed(5)).double()
    found = torch.autograd.grad((weights * target).sum(), (x, router.weight), retain_graph=True)
    router.balance_coefficient = router.z_loss = 0.0
    plain = (router(x).weights * target).sum() + 0.25 * (0.7 * wanted + 0.3 * z)
    for one, other in zip(found, torch.autograd.grad(plain, (x, router.weight)), strict=True):
        torch.testing.assert_close(one, other)


def test_balance_gradient_by_finite_differences():
    router = router_of(balance="micro_batch", balance_coefficient=1.0).double()
    x, step = hidden().double(), 1e-6
    router(x).weights.mul(0).sum().backward()
    gradient = router.weight.grad
    assert gradient is not None
    for index in [(0, 0), (3, 17), (7, 63)]:
        values = []
        for sign in (1, -1):
            moved = router.weight.detach().clone()
            moved[index] += sign * step
            shares = (x @ moved.T).softmax(-1).flatten(0, 1)
            chosen = (x @ moved.T).flatten(0, 1).topk(2).indices
            values.append(balance_by_hand(shares, chosen, torch.zeros(8)))
        slope = (values[0] - values[1]) / (2 * step)
        torch.testing.assert_close(gradient[index], slope, rtol=1e-5, atol=1e-9)


def test_even_loads_have_a_loss_of_one():
    router = router_of(balance="sequence", balance_coefficient=0.1, force_balance=True)
    router.weight.data.zero_()
    assert router(hidden(2, 16)).losses[0] == 1


def test_losses_do_not_act_in_evaluation():
    router, x = router_of(balance="sequence", balance_coefficient=0.1, z_loss=0.1), hidden()
    trained = router(x)
    router.eval()
    found = router(x)
    assert not found.losses.any()
    assert torch.equal(found.weights, trained.weights)


def test_biases_follow_the_sign_of_the_load():
    first, second = (router_of(bias_speed=0.25) for _ in range(2))
    first.record(torch.tensor([3, 1, 2, 2, 2, 2, 2, 2]), torch.zeros(2))
    second.record(torch.tensor([0, 0, 0, 0, 0, 0, 0, 8]), torch.zeros(2))
    counts = update_expert_bias([first, second])
    assert counts.tolist() == [[3, 1, 2, 2, 2, 2, 2, 2], [0] * 7 + [8]]
    assert first.expert_bias is not None
    assert second.expert_bias is not None
    assert first.expert_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]
    assert second.expert_bias.tolist() == [0.25] * 7 + [-0.25]
    assert not first.counts.any()
    assert not update_expert_bias([first]).any()
    assert first.expert_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]
    first.record(torch.tensor([0, 0, 0, 0, 0, 0, 0, 1]), torch.zeros(2))
    update_expert_bias([first], lambda counts: counts.copy_(torch.eye(8, dtype=torch.int64)[:1]))
    assert first.expert_bias.tolist() == [-0.5, 0.5, *[0.25] * 6]
    first.record(torch.tensor([8, 0, 0, 0, 0, 0, 0, 0]), torch.zeros(2))
    update_expert_bias([first], taken=torch.tensor(False))  # a step that was skipped
    assert first.expert_bias.tolist() == [-0.5, 0.5, *[0.25] * 6]
    assert not first.counts.any()


def test_biases_even_loads_over_steps():
    router, x = router_of(router="sigmoid", bias_speed=0.01), hidden(4, 64)
    router.weight.data[0] += 0.5 * x.mean((0, 1)) / x.mean((0, 1)).norm() ** 2
    loads = []
    for _ in range(100):
        found = router(x)
        router.record(found.counts, found.losses)
        loads.append(update_expert_bias([router]).max().item())
    assert loads[0] > 1.5 * 64
    assert loads[-1] < 1.2 * 64


def counted(mode: str, compile: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Counts and losses of two micro-batches, and gradients, by mode of recomputation."""
    from dtron.config import Compile, Recompute
    from dtron.parallelisms.compile import compile_blocks
    from dtron.parallelisms.recompute import recompute

    torch._dynamo.reset()
    config = small_config(
        "deepseek_v3", balance="global_batch", balance_coefficient=0.5, z_loss=0.1
    )
    model = varied(initialized("deepseek_v3", config))
    blocks, settings = dict(model.blocks.items()), Recompute.model_validate({"mode": mode})
    numbered = [(int(name), block) for name, block in blocks.items()]
    if mode != "full":
        recompute(numbered, settings)
    if compile:
        options = Compile(enable=True, backend="aot_eager")
        compile_blocks(blocks, options, forward_only=mode == "full")
    if mode == "full":
        recompute(numbered, settings)
    outputs = [model(tokens(seed=seed)) for seed in (0, 1)]  # both forwards before a backward
    for out in outputs:
        out.logsumexp(-1).mean().backward()
    (router,) = routers([model])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [router.counts, router.losses], gradients


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("mode", ["none", "full", "attention", "selective"])
def test_recomputation_does_not_count_again(mode, compile):
    """Nor sees other loads: those of a later micro-batch would change the gradient."""
    state, gradients = counted(mode, compile)
    wanted_state, wanted = counted("none")
    assert state[0].sum() == 2 * 2 * 24 * 2
    for one, other in zip([*state, *gradients], [*wanted_state, *wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_counts_are_of_training_alone():
    model: Decoder = initialized("mixtral", small_config("mixtral"))
    with torch.no_grad():
        model(tokens())
    model.eval()
    model(tokens())
    assert not any(router.counts.any() for router in routers([model]))
    model.train()
    model(tokens())
    assert all(router.counts.sum() == 2 * 24 * 2 for router in routers([model]))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("balance", ["none", "sequence", "micro_batch"])
def test_padding_chooses_nothing_and_is_in_no_mean(name: str, balance: str) -> None:
    """What is said of a sequence with padding is what is said of it without."""
    settings = {"balance": balance, "balance_coefficient": 0.3 * (balance != "none")}
    router = router_of(router=name, z_loss=0.1, **settings)
    x, filled = hidden(1, 12), 7
    real = torch.arange(12).expand(1, -1) < filled
    alone, padded = router(x[:, :filled]), router(x, real=real)
    assert torch.equal(padded.chosen[:, :filled], alone.chosen)
    assert (padded.chosen[:, filled:] == router.n_experts).all()
    assert torch.equal(padded.counts, alone.counts)
    torch.testing.assert_close(padded.losses, alone.losses)
    assert alone.losses[0].count_nonzero() == (balance != "none")
    torch.testing.assert_close(padded.weights[:, :filled], alone.weights)
    gradients = []
    for out, n in ((alone, filled), (padded, filled)):
        out.weights[:, :n].square().sum().backward()
        assert router.weight.grad is not None
        gradients.append(router.weight.grad.clone())
        router.weight.grad = None
    torch.testing.assert_close(*gradients)
