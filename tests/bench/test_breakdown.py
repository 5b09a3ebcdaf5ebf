"""Step budgets of synthetic traces with known answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtron.bench.breakdown import (
    EXPOSED,
    GAPS,
    Breakdown,
    breakdown_table,
    ceiling,
    read_breakdown,
)
from dtron.bench.trace import COMMUNICATION, COMPUTE, classify, read_trace
from dtron.errors import DataError

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT"
NCCL = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

NAMES = {
    GEMM: "GEMM",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "GEMM",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "GEMM",
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_128x128x64": "GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x128x128": "attention",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90": "attention",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true>": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(params)": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)": "attention",
    "void cudnn::fusion::fmha_reduce_head<true>(void const*)": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "void at::native::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>": "loss",
    "triton_red_fused__log_softmax_nll_loss_forward_3": "loss",
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<5>, "
    "FusedAdamMathFunctor<float, 4>>": "optimizer",
    "adamw_kernel": "optimizer",
    NCCL: COMMUNICATION,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int)": COMMUNICATION,
    "pulled_kernel": COMMUNICATION,
    "pulled_packed_kernel": COMMUNICATION,
    "wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)": COMMUNICATION,
    "Memcpy PtoP (Device -> Device)": COMMUNICATION,
    "Memcpy HtoD (Pinned -> Device)": "communication",
    "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>": "copies",
    "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel": "copies",
    "triton_poi_fused_mul_silu_1": "elementwise",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "elementwise",
    "gloo:all_reduce": COMMUNICATION,
    "aten::_fused_adamw_": "optimizer",
    "aten::addmm": "GEMM",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_names_tell_classes(name: str, kind: str) -> None:
    assert classify(name) == kind


def test_phases_tell_what_names_do_not() -> None:
    plain = "void at::native::vectorized_elementwise_kernel<4, MulFunctor>"
    assert classify(plain, "optimizer") == "optimizer"
    assert classify(plain, "loss") == "loss"
    assert classify(GEMM, "loss") == "GEMM"  # the head in chunks
    assert classify(NCCL, "optimizer") == COMMUNICATION  # the norm's all-reduce


class Synthetic:
    """A trace of events, in microseconds; each kernel is launched at a time of the host."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def mark(self, name: str, begin: float, end: float) -> None:
        self._add("user_annotation", f"dtron::{name}", begin, end, {})

    def kernel(self, name: str, launch: float, begin: float, end: float, dims: str = "") -> None:
        number = len(self.events)
        self._add("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, {"correlation": number})
        self._add("cpu_op", "aten::mm", launch, launch + 1, {"External id": number})
        self.events[-1]["args"]["Input Dims"] = [[dims]]
        arguments = {"correlation": number, "grid": [8, 1, 1], "External id": number}
        self._add("kernel", name, begin, end, arguments)

    def _add(self, cat: str, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 1}
        self.events.append({**event, "tid": 1, "args": args})

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"traceEvents": self.events}))
        return path


def two_steps() -> Synthetic:
    """Step 0 ends on the device at 1000, step 1 at 2000; the host is ahead."""
    trace = Synthetic()
    trace.mark("step", 0, 100)
    trace.mark("step", 100, 220)
    trace.mark("loss", 150, 160)
    trace.mark("optimizer", 200, 210)
    trace.kernel(GEMM, 10, 700, 1000, "a")
    # Window 1000 to 2000.
    trace.kernel(GEMM, 110, 1000, 1300, "a")  # 300, alone
    trace.kernel(GEMM, 112, 1300, 1700, "a")  # 400: a third longer, beside communication
    trace.kernel(GEMM, 113, 1720, 1750, "b")  # never alone: its slow-down is not known
    trace.kernel(NCCL, 111, 1350, 1760, "")  # overlapped 1350-1700, 1720-1750; exposed 20 + 10
    trace.kernel("cudnn_flash_fprop", 114, 1780, 1850)  # 1760-1780 idle
    trace.kernel("elementwise", 115, 1840, 1860)  # 10 beside attention, 10 alone
    trace.kernel("elementwise", 155, 1860, 1880)  # loss, by its phase
    trace.kernel("elementwise", 205, 1900, 1990)  # optimizer, by its phase; 20 idle before
    trace.kernel(NCCL, 206, 1990, 2000)  # the norm
    return trace


def test_budget_of_a_device_trace(tmp_path: Path) -> None:
    two_steps().write(tmp_path / "rank-0.json")
    found = read_breakdown(tmp_path)
    assert (found.device, found.steps) == ("cuda", 1)
    (own,) = found.ranks
    expected = {"GEMM": 730, "attention": 70, "loss": 20, "optimizer": 90, "copies": 0}
    expected |= {"elementwise": 10, EXPOSED: 40, GAPS: 40}
    assert own.parts == pytest.approx({name: us / 1e3 for name, us in expected.items()})
    assert own.step == pytest.approx(1.0)
    assert sum(own.parts.values()) == pytest.approx(own.step)
    assert own.overlapped == pytest.approx(0.38)
    assert own.hidden == pytest.approx(380 / 420)
    assert own.slow_down == pytest.approx(0.1)
    assert own.compared == pytest.approx(400 / 430)


def test_ranks_are_reduced(tmp_path: Path) -> None:
    first = two_steps()
    first.write(tmp_path / "rank-0.json")
    second = two_steps()
    second.kernel("elementwise", 116, 1760, 1780)  # fills a gap
    second.write(tmp_path / "rank-1.json")
    found = read_breakdown(tmp_path)
    assert found.mean.parts[GAPS] == pytest.approx(0.03)
    assert found.mean.parts["elementwise"] == pytest.approx(0.02)
    assert Breakdown.of_json(json.loads(json.dumps(found.as_json()))) == found


def test_ceiling_takes_floors_and_leaves_the_rest(tmp_path: Path) -> None:
    two_steps().write(tmp_path / "rank-0.json")
    found = read_breakdown(tmp_path)
    limit = ceiling(found.mean, {"GEMM": 0.6, "attention": 0.05})
    assert limit["GEMM"] == 0.6
    assert limit[EXPOSED] == limit[GAPS] == 0
    assert limit["loss"] == pytest.approx(0.02)
    assert sum(limit.values()) == pytest.approx(0.6 + 0.05 + 0.02 + 0.09 + 0.01)
    table = breakdown_table(found, {"GEMM": 0.6}, "x")
    assert table.row_count == len(COMPUTE) + 2 + 1 + 2


def test_too_few_steps_and_no_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no traces"):
        read_breakdown(tmp_path)
    trace = Synthetic()
    trace.mark("step", 0, 100)
    trace.kernel(GEMM, 10, 700, 1000)
    with pytest.raises(DataError, match="at least 2 steps"):
        read_trace(trace.write(tmp_path / "rank-0.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match="not a profiler's trace"):
        read_trace(tmp_path / "bad.json")


def host_trace() -> Synthetic:
    trace = Synthetic()
    trace.mark("step", 0, 1000)
    add = trace._add
    add("cpu_op", "aten::linear", 100, 300, {})  # 20 itself before, 10 after its product
    add("cpu_op", "aten::addmm", 120, 290, {})
    add("cpu_op", "aten::scaled_dot_product_attention", 300, 400, {})
    add("cpu_op", "aten::bmm", 310, 390, {})  # part of attention
    add("cpu_op", "c10d::allreduce_", 400, 420, {})  # hands over
    trace.mark("optimizer", 600, 700)
    add("cpu_op", "aten::mul", 610, 690, {})
    add("user_annotation", "gloo:all_reduce", 350, 450, {})
    trace.events[-1]["tid"] = 2
    add("cpu_op", "aten::add", 360, 370, {})  # gloo's own
    trace.events[-1]["tid"] = 2
    return trace


def test_budget_of_a_host_trace(tmp_path: Path) -> None:
    host_trace().write(tmp_path / "rank-0.json")
    (own,) = read_breakdown(tmp_path).ranks
    expected = {"GEMM": 170, "attention": 100, "loss": 0, "optimizer": 80, "copies": 0}
    expected |= {"elementwise": 30, EXPOSED: 50, GAPS: 570}
    assert own.parts == pytest.approx({name: us / 1e3 for name, us in expected.items()})
    assert own.overlapped == pytest.approx(0.05)
    assert (own.slow_down, own.compared) == (None, None)
