"""Counter-based dropout: right rates, no correlation along any counter, the same in any layout."""

import itertools

import pytest
import torch
from torch import Tensor

from dtron.models.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FFN_OUTPUT,
    ROUTER,
    attention_dropout,
    dropout,
    fold,
    keep_mask,
    mix,
    token_keys,
    uniform,
)

FEATURES = 512


def keys(seed: int = 0, step: int = 0, layer: int = 0, sequences: int = 4, tokens: int = 256):
    base = token_keys(seed, step, torch.arange(sequences), torch.arange(tokens))
    return fold(base, layer)


def mask(p: float = 0.5, site: int = ATTENTION_OUTPUT, **which: int) -> Tensor:
    return keep_mask(p, keys(**which), site, FEATURES).double()


def correlation(a: Tensor, b: Tensor) -> float:
    """In units of its standard deviation, 1 / sqrt(n), under independence."""
    a, b = a - a.mean(), b - b.mean()
    return ((a * b).mean() / (a.std() * b.std()) * a.numel() ** 0.5).item()


def excess(counts: Tensor, expected: float, variance: float) -> float:
    """Chi-square of counts, as standard deviations above its mean."""
    chi2 = ((counts - expected).square() / variance).sum()
    n = counts.numel()
    return ((chi2 - n) / (2 * n) ** 0.5).item()


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_rates_overall_by_feature_and_by_token(p):
    kept = mask(p)
    n = kept.numel()
    spread = (p * (1 - p)) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < 4 * spread / n**0.5
    if p == 0.001:
        return  # too few drops a row for the normal approximation below
    by_feature, by_token = kept.sum((0, 1)), kept.sum(2)
    each = kept.shape[0] * kept.shape[1]
    assert abs(excess(by_feature, each * (1 - p), each * p * (1 - p))) < 4.5
    assert abs(excess(by_token, FEATURES * (1 - p), FEATURES * p * (1 - p))) < 4.5


def test_hashes_are_uniform():
    values = mix(keys().unsqueeze(-1) ^ fold(torch.arange(FEATURES), 1))
    assert int(values.min()) >= 0
    assert int(values.max()) < 2**32
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(((values >> shift) & 255).flatten(), minlength=256).double()
        expected = values.numel() / 256
        assert abs(excess(counts, expected, expected)) < 4.5


def test_mix_is_a_bijection_and_never_overflows():
    x = torch.cat([torch.arange(2**16), 2**32 - 1 - torch.arange(2**16)])
    assert mix(x).unique().numel() == x.numel()
    exact = int(x[-1])  # the same in Python's unbounded integers
    exact = (exact ^ (exact >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    exact = (exact ^ (exact >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    assert int(mix(x)[-1]) == exact ^ (exact >> 15)


def test_every_input_bit_of_a_key_flips_every_output_bit_half_the_time():
    x = torch.randint(0, 2**32, (20_000,), generator=torch.Generator().manual_seed(0))
    for bit in range(32):
        flipped = mix(x) ^ mix(x ^ (1 << bit))
        rates = torch.stack([(flipped >> out & 1).double().mean() for out in range(32)])
        assert (rates - 0.5).abs().max() < 0.03


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_no_correlation_between_counters(p):
    kept = mask(p)
    pairs = {
        "layer": (kept, mask(p, layer=1)),
        "layers 1, 2": (mask(p, layer=1), mask(p, layer=2)),
        "step": (kept, mask(p, step=1)),
        "seed": (kept, mask(p, seed=1)),
        "site": (kept, mask(p, site=FFN_OUTPUT)),
        "site of the embedding": (kept, mask(p, site=EMBEDDING)),
        "layer against site": (mask(p, layer=1), mask(p, site=FFN_OUTPUT)),
        "step against layer": (mask(p, step=1), mask(p, layer=1)),
        "sequence": (kept[:-1], kept[1:]),
    }
    for distance in (1, 2, 16, 64):
        pairs[f"tokens {distance} apart"] = (kept[:, :-distance], kept[:, distance:])
        pairs[f"features {distance} apart"] = (kept[..., :-distance], kept[..., distance:])
        pairs[f"diagonal {distance}"] = (
            kept[:, :-distance, :-distance],
            kept[:, distance:, distance:],
        )
    found = {name: correlation(*pair) for name, pair in pairs.items()}
    assert max(map(abs, found.values())) < 4.5, found


def test_pairs_of_tokens_agree_as_often_as_chance_says():
    """Over all pairs: a few that share much would be hidden in a mean correlation."""
    kept = keep_mask(0.5, keys(sequences=1, tokens=512).squeeze(0), FFN_OUTPUT, FEATURES).double()
    signs = 2 * kept - 1
    overlap = pairs(signs @ signs.T)
    assert overlap.abs().max() < 6 * FEATURES**0.5
    assert abs(overlap.var().item() / FEATURES - 1) < 0.03


def test_keys_do_not_collide_more_than_chance():
    found = token_keys(0, 0, torch.arange(64), torch.arange(2048)).flatten()
    repeats = found.numel() - found.unique().numel()
    assert repeats <= 10  # 131072 keys among 2**32: 2 expected


def test_mask_is_free_of_the_layout():
    whole = dropout(torch.ones(4, 256, 32), 0.3, keys(), FFN_OUTPUT)
    for b, (start, stop) in itertools.product(range(4), [(0, 100), (100, 256)]):
        base = token_keys(0, 0, torch.tensor([b]), torch.arange(start, stop))
        part = dropout(torch.ones(1, stop - start, 32), 0.3, fold(base, 0), FFN_OUTPUT)
        assert torch.equal(part, whole[b : b + 1, start:stop])
    shuffled = torch.randperm(256)
    part = dropout(torch.ones(4, 256, 32), 0.3, keys()[:, shuffled], FFN_OUTPUT)
    assert torch.equal(part, whole[:, shuffled])


def test_keys_take_ints_and_tensors_of_any_size():
    sequence, positions = torch.arange(3), torch.arange(5)
    plain = token_keys(11, 4, sequence, positions)
    assert plain.shape == (3, 5)
    assert plain.dtype == torch.int64
    assert torch.equal(plain, token_keys(11, torch.tensor(4), sequence, positions.expand(3, 5)))
    large = token_keys(-1, 2**40, sequence + 2**33, positions)
    assert int(large.min()) >= 0
    assert int(large.max()) < 2**32
    assert not torch.equal(large, token_keys(-1, 0, sequence, positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_scales_what_it_keeps_and_its_gradient(dtype):
    x = torch.randn(4, 256, 64).to(dtype).requires_grad_()
    out = dropout(x, 0.25, keys(), FFN_OUTPUT)
    kept = keep_mask(0.25, keys(), FFN_OUTPUT, 64)
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.where(kept, x / 0.75, 0).to(dtype), rtol=1e-2, atol=0)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (kept / 0.75).to(dtype), rtol=1e-2, atol=0)


def pairs(square: Tensor) -> Tensor:
    """Entries above the diagonal of the last two dims."""
    row, column = torch.triu_indices(square.shape[-2], square.shape[-1], offset=1)
    return square[..., row, column]


def test_attention_dropout_is_keyed_by_query_head_and_key():
    weights, k = torch.ones(2, 4, 64, 64), keys(sequences=2, tokens=64)
    out = attention_dropout(weights, 0.2, k)
    kept = (out != 0).double()
    assert abs(kept.mean().item() - 0.8) < 4 * 0.4 / kept.numel() ** 0.5
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1.25]))
    assert abs(correlation(kept[:, :-1], kept[:, 1:])) < 4.5
    assert abs(correlation(kept[:, :, :-1], kept[:, :, 1:])) < 4.5
    upper, mirrored = pairs(kept), pairs(kept.transpose(2, 3))
    assert abs(correlation(upper, mirrored)) < 4.5
    part = attention_dropout(weights[1:, :, 10:20], 0.2, k[1:, 10:20])
    assert torch.equal(part, out[1:, :, 10:20])


def test_dropout_is_the_same_compiled():
    def both(x: Tensor, k: Tensor) -> Tensor:
        return dropout(x, 0.3, fold(k, 3), FFN_OUTPUT)

    x = torch.randn(4, 256, 32)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, keys()), both(x, keys()))


def test_noise_is_uniform_and_keyed_by_token_site_and_feature():
    keys = token_keys(3, 0, torch.arange(4), torch.arange(64))
    noise = uniform(keys, ROUTER, 128)
    assert noise.dtype == torch.float32
    assert 0 <= noise.min() < 0.001
    assert 0.999 < noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.005)
    assert noise.var().item() == pytest.approx(1 / 12, abs=0.001)
    assert torch.equal(uniform(keys[2:, 5:], ROUTER, 128), noise[2:, 5:])
    others = [uniform(keys, FFN_OUTPUT, 128), noise.roll(1, 1), noise.roll(1, 2)]
    for other in others:
        correlation = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation.item()) < 0.02
