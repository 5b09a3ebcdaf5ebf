"""FlashAttention-4's operators: registration, fakes and the autograd link, where no GPU is needed.

The numbers are compared on a GPU, in tests/models/test_attention_gpu.py.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dtron.kernels.flash4 import flash4, flash4_backward, flash4_forward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_fakes_tell_shapes_and_dtypes(kv_heads, dtype):
    with FakeTensorMode():
        q = torch.empty(2, 33, 8, 64, dtype=dtype)
        k = torch.empty(2, 33, kv_heads, 64, dtype=dtype)
        out, lse = flash4_forward(q, k, k, 0.125, True)
        assert (out.shape, out.dtype) == ((2, 33, 8, 64), dtype)
        assert (lse.shape, lse.dtype) == ((2, 8, 33), torch.float32)
        grads = flash4_backward(out, q, k, k, out, lse, 0.125, True, False)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
        assert all(grad.dtype == dtype and grad.is_contiguous() for grad in grads)


def test_values_may_be_narrower_than_keys():
    with FakeTensorMode():
        q, k = torch.empty(1, 9, 4, 192), torch.empty(1, 17, 4, 192)
        v = torch.empty(1, 17, 4, 128)
        assert flash4_forward(q, k, v, 0.1, True)[0].shape == (1, 9, 4, 128)


def test_gradients_flow_through_the_output_alone():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 16, 4, 64, requires_grad=True) for _ in range(3))
        out, lse = flash4(q, k, v, 0.125, causal=True)
        assert out.requires_grad
        assert not lse.requires_grad
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


def test_compile_keeps_one_graph_with_both_operators():
    """Traced without running: nothing but the fakes is called."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = flash4(q, k, v, 0.125, causal=True)[0]
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    inputs = [torch.empty(1, 16, n, 64) for n in (4, 2, 2)]
    graph = make_fx(step, tracing_mode="fake")(*inputs).graph
    called = {str(node.target) for node in graph.nodes}
    assert {"dtron.flash4_forward.default", "dtron.flash4_backward.default"} <= called
