"""Mistakes that parallel training can make, planted one by one: each has to turn parity red.

A bug replaces one function in every rank. What deviates is compared with what the bug spoils, so
that a case does not turn red for another reason.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from dtron.config import Lora, Parallel, Recompute
from dtron.data import Batch
from dtron.float8 import async_tp as fused
from dtron.float8 import delayed, scales, weight_gradient
from dtron.float8.all_gather import WeightGather, _WeightShard
from dtron.float8.linear import Float8Linear, TokenwiseLinear
from dtron.lora import dora
from dtron.models import attention, decoder, encoder_decoder, gated_delta_net, llava
from dtron.models.recurrent import GroupedModule
from dtron.parallelisms import apply, gradients, recompute
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.context import halo, recurrent
from dtron.parallelisms.context.apply import Context
from dtron.parallelisms.context.blocks import Blocks
from dtron.parallelisms.context.halo import HaloBlocks
from dtron.parallelisms.context.ring import RingBlocks
from dtron.parallelisms.expert import all_to_all as exchanged
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.fsdp import sharding as fsdp
from dtron.parallelisms.gradients import local_gradients
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.offload import Offload
from dtron.parallelisms.pipeline import executor
from dtron.parallelisms.pipeline.block_overlap import Tape
from dtron.parallelisms.pipeline.stages import SharedWeights
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from dtron.parallelisms.placement import Row, sequence
from dtron.parallelisms.tensor import async_tp, encoder, head_loss
from dtron.parallelisms.tensor import tensor_parallel as tensor
from dtron.training import expert_balancing as routing
from dtron.training import loss, optim, step
from tests.harness import run_ranks
from tests.parallelisms import parity
from tests.parallelisms.parity import Case, Outcome, deviations, parallel_run, shallow


def replicas_not_reduced() -> None:
    """Norms see a part of the tokens; their gradients stay parts."""
    apply.reduce_replicas = lambda _parameters, _group: None


def shared_gate_not_reduced() -> None:
    """The gate of shared experts sees a part of the tokens; its gradient stays a part."""
    reduce = apply.reduce_replicas

    def others(parameters: Any, group: dist.ProcessGroup) -> None:
        reduce([p for p in parameters if p.ndim != 2 or p.shape[0] != 1], group)

    apply.reduce_replicas = others


def adapters_not_reduced() -> None:
    """Each tp rank updates the replicated factors of adapters by its own part of the gradient."""
    tensor.is_partial = lambda _kind, _parameter: False


def norms_of_own_columns() -> None:
    """Each tp rank divides by the norms of its own columns of the adapted matrices."""
    dora.sum_columns = lambda squares, _weight: squares


def tied_gradient_dropped() -> None:
    """The first stage learns nothing of the head's gradient, and the last of the embedding's."""
    SharedWeights.sum_gradients = lambda _self, _group: None  # type: ignore[method-assign]


def local_divisor() -> None:
    """The loss is a mean over the rank's own tokens, as cp would be without its scale."""

    def count(_self: Any, batches: list[Batch]) -> Tensor:
        return torch.stack([step._label_counts(batch) for batch in batches]).sum(0).clamp(1)

    step.TrainStep._global_label_counts = count  # type: ignore[method-assign]


def loss_of_every_tp_rank() -> None:
    """Ranks that share a token each count it, as with a loss that is not scaled."""
    backward = loss._SplitCrossEntropy.backward

    def scaled(ctx: Any, grad: Tensor) -> Any:
        return backward(ctx, grad * ctx.vocabulary.group.size())

    loss._SplitCrossEntropy.backward = staticmethod(scaled)  # type: ignore[method-assign]


def replicas_reduced_twice() -> None:
    """Gradients that are whole already are summed over dp_replicate once more."""
    complete = Applied.complete_gradients

    def twice(self: Applied, mesh: Mesh) -> None:
        complete(self, mesh)
        for gradient in local_gradients(p for _, p in self.named_parameters()):
            dist.all_reduce(gradient, group=mesh.group("dp_replicate"))

    Applied.complete_gradients = twice  # type: ignore[method-assign]


def copies_summed() -> None:
    """Norms whose gradients are whole on each tp rank are summed over tp as if they were parts."""
    tensor._PARTIAL = (*tensor._PARTIAL, "replicate")


def tied_gradient_summed_twice() -> None:
    """As if both holders of a tied weight had the sum already."""
    summed = SharedWeights.sum_gradients

    def twice(self: SharedWeights, group: dist.ProcessGroup) -> None:
        summed(self, group)
        summed(self, group)

    SharedWeights.sum_gradients = twice  # type: ignore[method-assign]


def activations_not_reduced(in_backward: bool) -> None:
    """The ranks' products stay parts of a sum: after wo and down, or before q, k, v, gate, up."""
    all_reduce = Partial._reduce_value

    def reduce(self: Partial, value: Tensor, *args: Any) -> Tensor:
        # autograd numbers the backward that is running; -1: none is
        running = torch._C._current_graph_task_id() >= 0
        return value if running == in_backward else all_reduce(self, value, *args)

    Partial._reduce_value = reduce  # type: ignore[method-assign]


def activations_not_reduce_scattered(in_backward: bool) -> None:
    """Under sequence parallelism a rank takes its tokens of its own part of the sum."""
    reduce_scatter = Partial._reduce_shard_value

    def reduce(self: Partial, value: Tensor, mesh: Any, mesh_dim: int, spec: Shard) -> Tensor:
        if (torch._C._current_graph_task_id() >= 0) != in_backward:
            return reduce_scatter(self, value, mesh, mesh_dim, spec)
        return value.chunk(mesh.size(mesh_dim), spec.dim)[mesh.get_local_rank(mesh_dim)]

    Partial._reduce_shard_value = reduce  # type: ignore[method-assign]


def dropout_keys_of_first_rank() -> None:
    """All ranks drop what belongs to the first part of the sequence."""

    def cut(module: nn.Module, mesh: Any, row: tensor.Row) -> None:
        def part(_module: nn.Module, args: tuple) -> tuple:
            cuts = row.split
            return tuple(
                x.chunk(mesh.size(), 1)[0] if i in cuts and isinstance(x, Tensor) else x
                for i, x in enumerate(args)
            )

        module.register_forward_pre_hook(part)

    tensor._shard_arguments = cut


def weight_gradient_dropped() -> None:
    """A schedule forgets the W of one micro-batch."""
    run = WeightGradients.run

    def most(self: WeightGradients, key: Hashable) -> None:
        if key == 1:
            self._queues.pop(key)
        else:
            run(self, key)

    WeightGradients.run = most  # type: ignore[method-assign]


def expert_gradients_lost() -> None:
    """Deferred weight gradients of experts are never computed, those of a step's last block."""
    run = WeightGradients.run_collected
    lost = set()

    def forget(self: WeightGradients) -> None:
        if self not in lost:
            assert self._collecting
            self._collecting.clear()
        lost.add(self)
        run(self)

    WeightGradients.run_collected = forget  # type: ignore[method-assign]


def expert_gradients_computed_twice() -> None:
    """Deferred weight gradients of experts stay queued."""
    run = WeightGradients.run_collected

    def twice(self: WeightGradients) -> None:
        queued = list(self._collecting or ())
        run(self)
        if self._collecting is not None:
            self._collecting.extend(queued)

    WeightGradients.run_collected = twice  # type: ignore[method-assign]


def head_gradient_not_reduced() -> None:
    """The gradient of the hidden states by a rank's own columns is taken for the whole."""
    local = head_loss._local
    head_loss._local = lambda tensor, gradient=None: local(tensor)


def chunks_of_predictions_unweighted() -> None:
    """Each prediction's chunks have the first one's weight in the objective."""
    add = loss._add_chunk

    def first(x: Tensor, weight: Tensor, n: int, y: Tensor, factor: Any, *others: Any) -> Tensor:
        first.factor = factor if first.factor is None else first.factor  # type: ignore[attr-defined]
        return add(x, weight, n, y, first.factor, *others)  # type: ignore[attr-defined]

    first.factor = None  # type: ignore[attr-defined]
    loss._add_chunk = first


def losses_of_other_sources() -> None:
    """The loss of each row of a micro-batch is counted for the source of the row before."""
    add = step.TrainStep._add_by_source

    def shifted(self: Any, losses: Tensor, batch: Batch) -> None:
        add(self, losses.roll(-1), batch)

    step.TrainStep._add_by_source = shifted  # type: ignore[method-assign]


def key_gradients_stay() -> None:
    """Gradients of keys do not travel with them: each rank has those of its own queries alone."""

    def carry(self: Any, keys: Tensor, dtype: torch.dtype, backward: Callable) -> Tensor:
        mine = torch.zeros_like(keys, dtype=dtype)
        for block, at_hand in self._ring_steps(keys):
            due = mine if block == self.rank else torch.zeros_like(mine)
            backward(self._pair(block), at_hand, due)
        return mine

    RingBlocks.key_gradients = carry  # type: ignore[method-assign]


def late_pieces_as_they_come() -> None:
    """After the all-to-all the late pieces are left in the order of the ranks."""

    def joined(self: Any, x: Tensor) -> Tensor:
        early, late = x.unflatten(1, (self.inner, 2, -1)).unbind(2)
        return torch.cat([early.flatten(1, 2), late.flatten(1, 2)], dim=1)

    def parted(self: Any, x: Tensor) -> Tensor:
        early, late = (part.unflatten(1, (self.inner, -1)) for part in x.chunk(2, dim=1))
        return torch.stack([early, late], dim=2).flatten(1, 3)

    Blocks.arrange, Blocks.restore = joined, parted  # type: ignore[method-assign]


def halo_one_token_short() -> None:
    """The first query of a piece lacks the first key of its window, which another rank holds."""
    run = halo._visible_keys
    halo._visible_keys = lambda queries, numbers, window: run(queries, numbers, window - 1)


def halo_of_one_piece() -> None:
    """A piece that lies farther away than the one before, and still in the window, is skipped."""
    run = halo._visible_keys

    def shortened(queries: Any, numbers: Any, window: int) -> Any:
        keys = run(queries, numbers, window)
        return keys[keys >= queries[0] - len(queries)]

    halo._visible_keys = shortened


def halo_gradients_stay() -> None:
    """Gradients of keys that other ranks see are not sent back."""
    exchange = HaloBlocks._exchange

    def sent(self: HaloBlocks, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        found = exchange(self, x, received, sent)
        return found if sent is self.sent else torch.zeros_like(found)

    HaloBlocks._exchange = sent  # type: ignore[method-assign]


def positions_of_the_part() -> None:
    """Tokens are rotated by their place on the rank, not in the sequence."""
    share = parity.shard_batch

    def counted(batch: Batch, mesh: Mesh, how: Any, mtp: int) -> Batch:
        part = share(batch, mesh, how, mtp)
        places = torch.arange(part.tokens.shape[1])
        return replace(part, positions=places.expand_as(part.tokens))

    parity.shard_batch = counted


def mtp_tokens_of_the_part() -> None:
    """What is predicted further is looked for among the rank's own tokens."""
    share = parity.shard_batch

    def of_part(batch: Batch, mesh: Mesh, how: Context | None, mtp: int) -> Batch:
        part = share(batch, mesh, how)
        return part.look_ahead(mtp) if mtp else part

    parity.shard_batch = of_part


def predictions_by_all_labels() -> None:
    """The mean of the MTP loss is over the labels of the next token."""
    count = step.TrainStep._global_label_counts

    def first(self: Any, batches: list[Batch]) -> Tensor:
        counts = count(self, batches)
        return counts[:1].expand_as(counts)

    step.TrainStep._global_label_counts = first  # type: ignore[method-assign]


def padding_not_masked() -> None:
    """Padded columns of the logits take part in the softmax."""
    loss._masked = lambda logits, _vocabulary: loss._upcast(logits)


def micro_batches_exchanged() -> None:
    """What a block saved for two micro-batches in flight comes back for each other."""
    store, stored = Offload._store, {}

    def exchanged(self: Offload, call: Any) -> None:
        store(self, call)
        others = stored.get((call.stage, call.number), {}).values()
        for mine, other in zip(list(call.storages.values()), list(others), strict=False):
            mine.buffer, other.buffer = other.buffer, mine.buffer
        stored[call.stage, call.number] = call.storages

    Offload._store = exchanged  # type: ignore[method-assign]


def scales_of_ones_own() -> None:
    """Ranks that hold parts of a tensor each scale by their own part."""
    scales.shared = lambda amax, _groups: amax


def chunk_without_gradient() -> None:
    """The last chunk of tokens adds nothing to the gradients of the feed-forward."""
    in_chunks = recompute._in_chunks

    def planted(call: Any, n_chunks: int, keep_rng: bool, x: Tensor) -> Tensor:
        out = in_chunks(call, n_chunks, keep_rng, x)
        (*others, last) = out.chunk(n_chunks, dim=1)
        return torch.cat([*others, last.detach()], dim=1)

    recompute._in_chunks = planted


def chunks_of_gathered_tokens() -> None:
    """Chunks are cut from the tokens of all tp ranks, so that each rank gets tokens of others."""
    in_chunks = recompute._in_chunks

    def planted(call: Any, n_chunks: int, keep_rng: bool, x: Tensor) -> Tensor:
        out = in_chunks(call, n_chunks, keep_rng, x)
        return out.unflatten(1, (n_chunks, -1)).transpose(1, 2).flatten(1, 2)

    recompute._in_chunks = planted


def block_scales_of_ones_own() -> None:
    """Ranks cast a block of a gathered weight by the rows that they have of it."""
    made = WeightGather.__init__

    def alone(self: WeightGather, *args: Any) -> None:
        made(self, *args)
        group: Any = dist.new_subgroups(1)[0]
        self.group = group

    WeightGather.__init__ = alone  # type: ignore[method-assign]


def token_scales_of_ones_own() -> None:
    """Layers of a tp rank's own tokens cast them, and their gradients, by scales of its own."""
    TokenwiseLinear.token_groups = Float8Linear.token_groups  # type: ignore[method-assign]


def gradient_scales_of_ones_own() -> None:
    """The same in the backward alone, whose I is the last that ranks do together."""
    shared = scales.shared

    def share(amax: Tensor, groups: Sequence[str]) -> Tensor:
        # autograd numbers the backward that is running; -1: none is
        return amax if torch._C._current_graph_task_id() >= 0 else shared(amax, groups)

    scales.shared = share


def queued_float8_matmul_dropped() -> None:
    """The queue forgets each weight's second float8 gradient of a step."""
    take, seen = WeightGradients.take, Counter()

    def most(self: WeightGradients, weight: Tensor, matmul: Any, *total: Any) -> None:
        seen[id(weight)] += isinstance(matmul, weight_gradient.Float8Matmul)
        if seen[id(weight)] != 2:
            take(self, weight, matmul, *total)

    WeightGradients.take = most  # type: ignore[method-assign]


def scales_of_the_micro_batch_before() -> None:
    """W multiplies by the scales that the layer's last micro-batch left."""
    take, last = WeightGradients.take, {}

    def stale(self: WeightGradients, weight: Tensor, matmul: Any, *total: Any) -> None:
        if isinstance(matmul, weight_gradient.Float8Matmul):
            old = last.get(id(weight), matmul.operands.scales)
            last[id(weight)] = matmul.operands.scales
            matmul = replace(matmul, operands=replace(matmul.operands, scales=old))
        take(self, weight, matmul, *total)

    WeightGradients.take = stale  # type: ignore[method-assign]


def histories_of_ones_own() -> None:
    """Delayed scales come from what the rank itself has seen."""
    made = delayed.DelayedScales.__init__

    def alone(self: Any, layers: Any, length: int, _group: Any) -> None:
        made(self, layers, length, None)

    delayed.DelayedScales.__init__ = alone  # type: ignore[method-assign]


def expert_gradients_averaged() -> None:
    """FSDP divides gradients of experts by the ranks that share them."""
    summed = fsdp._sum_gradients

    def others(module: Any) -> None:
        if not hasattr(module, "part"):
            summed(module)

    fsdp._sum_gradients = others


def expert_inputs_without_gradient() -> None:
    """Gradients of rows do not travel back to the ranks that sent them."""
    issue, calls = AllToAll._issue, itertools.count()

    def once(self: Any, rows: Tensor, exchange: Any) -> Tensor:
        there = next(calls) % 2 == 0
        return issue(self, rows.detach().requires_grad_() if there else rows, exchange)

    AllToAll._issue = once  # type: ignore[method-assign]


def expert_gradients_of_own_rows() -> None:
    """A rank's experts learn of its own tokens alone."""
    finish = AllToAll.finish

    def own(self: Any, pending: Any, compute: Any) -> Tensor:
        def learn(arrived: Tensor, ends: Tensor) -> Tensor:
            out = compute(arrived, ends)
            first = torch.arange(len(out)).unsqueeze(1) < len(out) // 2
            return torch.where(first, out, out.detach())

        return finish(self, pending, learn)

    AllToAll.finish = own  # type: ignore[method-assign]


def part_of_results() -> None:
    """Of the parts that etp ranks give back the first is taken for the sum."""

    def first(self: Any, rows: Tensor, sent: list[int]) -> Tensor:
        return torch.cat(rows.split(sent)[:: self.etp])

    AllToAll._sum_partials = first  # type: ignore[method-assign]


def loads_of_own_tokens() -> None:
    """The balance loss sees the loads of the rank's part of a sequence alone."""
    routing.RankPool.total = lambda _self, loads: loads  # type: ignore[method-assign]


def choices_in_order_of_the_ranks() -> None:
    """Capacity goes to the tokens of the first rank first."""
    pool = routing.RankPool
    in_order = pool.in_order
    pool.in_order = lambda self, drop, chosen, _order: in_order(self, drop, chosen, None)  # type: ignore[method-assign]


def padding_routed() -> None:
    """Padding takes experts, and counts in loads, losses and capacity."""
    made = step.as_micro_batch

    def all_real(batch: Batch, *args: Any, **kwargs: Any) -> Any:
        return made(replace(batch, pieces=None), *args, **kwargs)

    step.as_micro_batch = all_real


def predictions_across_documents() -> None:
    """MTP labels may lie in the next document of a sequence."""
    look_ahead = Batch.look_ahead

    def onwards(self: Batch, n: int) -> Batch:
        ahead = look_ahead(replace(self, pieces=None), n)
        return replace(ahead, pieces=self.pieces)

    Batch.look_ahead = onwards  # type: ignore[method-assign]


def wide_moments_of_experts() -> None:
    """Moments of experts keep their parameter's dtype."""
    narrow = optim.AdamW._zeros

    def zeros(self: optim.AdamW, parameter: Any) -> Tensor:
        axes = parameter.device_mesh.mesh_dim_names
        return torch.zeros_like(parameter) if "ep" in axes else narrow(self, parameter)

    optim.AdamW._zeros = zeros  # type: ignore[method-assign]


def biases_by_own_loads() -> None:
    """Each rank moves the experts' biases by the loads of its own tokens."""
    routing.Routing._sum = lambda _self, _counts: None  # type: ignore[method-assign]


def validation_as_mean_of_means() -> None:
    """The validation loss is the mean over micro-batches, however many labels each has."""
    evaluate = parity.evaluate

    def of_each(model: Any, batches: Any) -> Tensor:
        means = [evaluate(model, [batch]) for batch in batches]
        return torch.stack(means).mean()

    parity.evaluate = of_each


def sequences_for_tokens() -> None:
    """Rows of a micro-batch are cut as they lie: ranks get whole sequences."""
    async_tp.flatten_tokens = lambda x: x.reshape(-1, x.shape[2])
    async_tp.unflatten_tokens = lambda x, batch: x.view(batch, -1, x.shape[1])


def input_gradients_not_reduce_scattered() -> None:
    """A fused gather's backward takes the rank's tokens of its own part of the sum."""
    reduce_scatter = async_tp.start_reduce_scatter

    def scatter(x: Tensor, ranks: async_tp.Ranks) -> Tensor:
        if torch._C._current_graph_task_id() < 0:  # forward
            return reduce_scatter(x, ranks)
        return x.chunk(ranks.size)[dist.get_rank() % ranks.size].contiguous()

    async_tp.start_reduce_scatter = scatter


def siblings_not_queued() -> None:
    """Of the weights that share a gathered input only the first one has a gradient."""
    queue, last = async_tp.queue_weight_gradient, [0]

    def first(needed: Tensor, operands: Sequence[Tensor], number: Tensor) -> None:
        if last[0] == needed.data_ptr():
            operands = [torch.zeros_like(operands[0]), *operands[1:]]
        queue(needed, operands, number)
        last[0] = needed.data_ptr()

    async_tp.queue_weight_gradient = fused.queue_weight_gradient = first


def head_gradients_not_summed() -> None:
    """Ranks that share keys and values each learn of their own queries alone."""

    def gather(module: nn.Module, mesh: Any) -> None:
        def whole(_module: nn.Module, _args: tuple, out: Tensor) -> Tensor:
            found = tensor._redistribute(out, mesh, Shard(2), Replicate(), asynchronous=False)
            return found.to_local(grad_placements=[Replicate()])

        module.register_forward_hook(whole)

    tensor._gather_heads = gather


def heads_of_other_ranks() -> None:
    """A head's parts are taken from ranks that lie apart, not from neighbours."""

    def heads(self: Mesh, n_heads: int) -> Any:
        ranks = torch.arange(dist.get_world_size()).view(-1, n_heads).t()
        groups: list[Any] = [dist.new_group(each) for each in ranks.tolist()]
        return DeviceMesh.from_group(groups[self.rank("tp") % n_heads], "cpu")

    Mesh.heads = functools.cache(heads)  # type: ignore[method-assign]


def state_crosses_documents() -> None:
    """The state of a gated delta net goes on from one document to the next."""
    rule = gated_delta_net.DELTA_KERNELS["torch"]
    gated_delta_net.DELTA_KERNELS["torch"] = lambda *inputs: rule(*inputs[:-1], None)


def convolution_crosses_documents() -> None:
    """The convolution of a gated delta net sees the last tokens of the document before."""
    convolve = gated_delta_net.causal_convolution
    gated_delta_net.causal_convolution = lambda x, weight, _starts: convolve(x, weight, None)


def state_not_passed_over_cp() -> None:
    """Each cp rank begins with an empty state, as if its tokens were the whole sequence."""
    apply.apply_recurrent_context = lambda _modules, _group: None


def gradients_of_tokens_stay_on_the_rank() -> None:
    """What later tokens say of earlier ones through the state does not reach their cp rank."""
    exchange = recurrent.exchange_heads

    def exchanged(x: Tensor, group: dist.ProcessGroup, n: int) -> Tensor:
        own, chunks = dist.get_rank(group), exchange(x, group, n).chunk(n, dim=1)
        return torch.cat([c if i == own else c.detach() for i, c in enumerate(chunks)], dim=1)

    recurrent.exchange_heads = exchanged


def channels_of_first_rank() -> None:
    """All tp ranks use the convolution and the decays of the first rank's heads."""
    core = GroupedModule
    core.head_shard = property(lambda _self: 0, lambda _self, _value: None)  # type: ignore


def gates_without_input_gradient() -> None:
    """What the output gates of attention say of their input is not in its gradient."""
    split = apply.apply_tensor_parallel

    def splits(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        split(model, *args, **kwargs)
        for name, module in model.named_modules():
            if name.endswith("attn.wg"):
                module.register_forward_pre_hook(lambda _module, args: (args[0].detach(),))

    apply.apply_tensor_parallel = splits


def image_gradients_not_reduced() -> None:
    """Each tp rank's encoder learns from the image tokens of its own part of the sequence."""

    def without_sum(split: Sequence[int] = (), partial: Sequence[int] = ()) -> Row:
        return sequence(split=split)

    llava.sequence = without_sum


def encoded_without_gradient() -> None:
    """A stage of the decoder does not send the gradient of the encoder's output back."""
    take = executor.Pipeline._take_input_gradient

    def without_first(self: Any, state: Any, key: Any) -> None:
        if key[0] > 0:
            state.inputs[key][0].grad = None
        take(self, state, key)

    executor.Pipeline._take_input_gradient = without_first  # type: ignore[method-assign]


def biases_of_first_heads() -> None:
    """All tp ranks add the position biases of the first rank's heads."""
    tables = encoder_decoder.EncoderDecoder._tables

    def of_first(self: Any, device: torch.device) -> Any:
        own = tables(self, device)
        first = [x.detach().clone() for x in own]
        for x in first:
            dist.broadcast(x, src=0)
        return tuple(x + (other - x).detach() for x, other in zip(own, first, strict=True))

    encoder_decoder.EncoderDecoder._tables = of_first  # type: ignore[method-assign]


def image_gradients_summed_twice() -> None:
    """Gradients that tp ranks compute alike are summed over tp as if they were parts."""
    prepare = encoder.PrepareArgument
    encoder.PrepareArgument = lambda *args: prepare(*args[:3], Partial())  # type: ignore


def images_of_another_micro_batch() -> None:
    """Tokens of a micro-batch are placed from the images of the one before."""
    make, before = step.as_micro_batch, {}

    def exchanged(batch: Batch, *args: Any, **kwargs: Any) -> Any:
        tokens, others = make(batch, *args, **kwargs)
        own, images = others["images"], before.get("images", others["images"])
        before["images"] = own
        return tokens, {**others, "images": images[torch.arange(len(own)) % len(images)]}

    step.as_micro_batch = exchanged


def local_layers_at_the_global_base() -> None:
    """Layers with a window rotate by the table of the layers without one."""
    tables = decoder.Decoder._rope_tables
    decoder.Decoder._rope_tables = lambda self, positions: (tables(self, positions)[0],) * 2  # type: ignore


def values_without_gradient() -> None:
    """Keys that are also values get no gradient as values."""
    heads = attention.Attention.heads

    def detached(self: Any, x: Tensor, rope: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v = heads(self, x, rope)
        return q, k, v.detach() if self.wv is None else v

    attention.Attention.heads = detached  # type: ignore


def scalars_not_reduced() -> None:
    """The scalar of a layer sees a part of the tokens; its gradient stays a part."""
    reduce = apply.reduce_replicas

    def others(parameters: Any, group: dist.ProcessGroup) -> None:
        reduce([p for p in parameters if p.shape != (1,)], group)

    apply.reduce_replicas = others


def rows_read_before_they_arrive() -> None:
    """Rows of the second of two micro-batches at once are read without a wait."""
    issue, wait = exchanged.all_to_all, exchanged.wait_tensor
    arrived: dict[int, tuple[Tensor, str]] = {}
    groups: list[str] = []

    def late(x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        rows = wait(issue(x, received, sent, group))
        pending = torch.zeros_like(rows)
        arrived[pending.data_ptr()] = rows, group
        groups.append(group)
        return pending

    def lost(pending: Tensor) -> Tensor:
        rows, group = arrived.pop(pending.data_ptr())
        return rows if group == groups[0] or not rows.is_floating_point() else pending

    exchanged.all_to_all, exchanged.wait_tensor = late, lost


def gradients_of_the_micro_batch_before() -> None:
    """The backward of a block starts from the gradient of the micro-batch that ran before."""
    run_part = Tape.run_part
    before: dict[int, Tensor] = {}

    def run(self: Tape) -> None:
        run_part(self)
        if self.gradient is not None:
            own, number = self.gradient, len(self.cuts)
            self.gradient = before.get(number, own)
            before[number] = own

    Tape.run_part = run  # type: ignore[method-assign]


def gradient_added_twice() -> None:
    """The last part of a backward, that of the embedding, runs a second time."""
    run_part = Tape.run_part

    def run(self: Tape) -> None:
        if self.parts == 1 and self.gradient is not None:
            torch.autograd.backward([self.end], [self.gradient], retain_graph=True)  # type: ignore[list-item]
        run_part(self)

    Tape.run_part = run  # type: ignore[method-assign]


def encoder_masked_causally() -> None:
    """Context parallelism masks later tokens, as in a decoder."""
    layouts = Context.layouts

    def causal(self: Context, cp: int) -> Any:
        return {method: replace(x, causal=True) for method, x in layouts(self, cp).items()}

    Context.layouts = causal  # type: ignore[method-assign]


@dataclass(frozen=True)
class Bug:
    """A mistake, where it shows, and what it has to spoil."""

    plant: Callable[[], None]
    case: Case
    spoils: str
    """Pattern of everything that deviates in the first backward, or of the assertion that fails."""

    def __str__(self) -> str:
        plant = self.plant
        if isinstance(plant, functools.partial):
            return (
                f"{plant.func.__name__}-{'-'.join(f'{k}={v}' for k, v in plant.keywords.items())}"
            )
        return plant.__name__


TP = Case("llama", 2, Parallel(tp=2), sequences=2)
WHOLE = Case("llama", 2, Parallel(tp=2, sequence_parallel=False), sequences=2)
ADAPTED = replace(TP, lora=Lora(rank=4))
LOOP = Case("gpt", 2, Parallel(pp=2, schedule="Interleaved1F1B"), sequences=4)
V = Case("gpt", 2, Parallel(pp=2, schedule="ZBVZeroBubble"), sequences=4)
CHUNKED = Case("llama", 2, Parallel(tp=2), sequences=2, loss_chunks=3)
PADDED = Case("llama", 2, Parallel(tp=2), sequences=2, override={"tied": True})
DROPPED = Case("gpt", 2, Parallel(tp=2), sequences=2, override={"dropout": 0.2})
KEYS = Case("llama", 4, Parallel(tp=4), sequences=2)
RING = Case("llama", 2, Parallel(cp=2), sequences=2)
SCALED = [parity.float8("tensorwise", 2, p) for p in (Parallel(tp=2), Parallel(cp=2))]
BLOCKS8 = parity.float8(
    "blockwise", 2, Parallel(), float8={"all_gather": True}, override={"ffn_dim": 208}
)
OVERLAPPED = parity.float8(
    "tensorwise", 2, Parallel(tp=2, async_tp=True), micro_batch=2, sequences=4
)
FUSED = Case("gpt", 2, Parallel(tp=2, async_tp=True), micro_batch=2, sequences=4)
LATENT8 = parity.float8(
    "tensorwise", 2, Parallel(tp=2), "deepseek_v3", override=parity.LATENT8, steps=1
)
QUEUED = replace(
    OVERLAPPED, world=4, parallel=Parallel(pp=2, tp=2, schedule="ZBVZeroBubble", async_tp=True)
)
LATENT_FUSED = Case("deepseek_v3", 2, Parallel(tp=2, async_tp=True), sequences=4)
SPLIT8 = parity.float8("tensorwise", 2, Parallel(pp=2, schedule="ZBVZeroBubble"))
SHARED8 = replace(SPLIT8, world=4, parallel=Parallel(pp=2, tp=2, schedule="ZBVZeroBubble"))
HEADS = Parallel(cp=2, cp_method="ulysses")
WINDOWED = replace(RING, override={"window": 4})
PACKED_WINDOWS = replace(WINDOWED, documents=True)
FAR = Case("llama", 4, Parallel(cp=4), sequences=4, override={"window": 5})
OFFLOADED = [
    Case("llama", 2, Parallel(pp=2, schedule=name), Recompute(offload=True), sequences=4)
    for name in ("1F1B", "ZBVZeroBubble")
]
EP = Case("mixtral", 2, Parallel(ep=2), sequences=4)
SHARED = Case("mixtral", 4, Parallel(ep=2), sequences=4)
ETP = Case("mixtral", 2, Parallel(etp=2), sequences=4)
POOLED = Case("mixtral", 2, Parallel(cp=2), sequences=4)
LIMITED = replace(POOLED, override=parity.LIMITED)
MTP = Case("deepseek_v3", 2, Parallel(cp=2), override=parity.MTP, sequences=4, steps=1)
PACKED = Case("mixtral", 2, Parallel(cp=2), override=parity.LIMITED, sequences=4, packing="pad")
PREDICTED = replace(MTP, packing="best_fit")
NARROW = replace(EP, optimizer="narrow_adamw", dtype="float64", steps=3)
DELTA = Case("qwen3_5", 2, Parallel(tp=2), sequences=2)
HYBRID = replace(DELTA, model="qwen3_5_moe")
DELTA_CP = Case("qwen3_5", 2, Parallel(cp=2), sequences=2, documents=True)
MAMBA = Case("nemotron_h", 2, Parallel(tp=2), sequences=2)
MAMBA_CP = Case("nemotron_h", 2, Parallel(cp=2), sequences=2, documents=True)
IMAGES = Case("llava", 2, Parallel(tp=2, encoder_tp=2), sequences=2)
OWN_IMAGES = Case("llava", 2, Parallel(tp=2, sequence_parallel=False), sequences=2)
SPANS = Case("t5", 2, Parallel(pp=2, pp_layout="Ett|tttL"), sequences=2)
MANY_IMAGES = Case("llava", 2, Parallel(pp=2), sequences=4)
LOCAL = Case("gemma3", 2, Parallel(tp=2), sequences=2)
GLOBAL = Case("gemma4", 2, Parallel(tp=2), sequences=2)
BIASED = Case("deepseek_v3", 2, Parallel(ep=2), sequences=4, packing="pad")
TOGETHER = Case("mixtral", 2, Parallel(ep=2, zero=1, overlap_micro_batches=True))
EXPERTS = r"gradient blocks\.\d+\.ffn\.experts\..*"
BEFORE_EXPERTS = r"gradient (?!blocks\.4\.ffn\.|norm|head).*"
BEFORE_RESULTS = r"gradient (?!blocks\.4\.ffn\.router|norm|head).*"
BEFORE_ROUTER = r"gradient (?!blocks\.4\.ffn\.experts|norm|head).*"
# What comes before the last keys and values; its queries, output and feed-forward come after.
BEFORE_KEYS = r"gradient (embed\.weight|blocks\.(?!4\.(ffn|attn\.w[qo])).*)"
# The last keys that are values are those of layer 3.
BEFORE_VALUES = r"gradient (embed|blocks\.([0-2]\.|3\.(attn_norm|attn\.wk))).*"
NORMS = r"gradient (blocks\.\d+\.(attn|ffn)_norm|norm)\.weight"
OF_HEADS = rf"{NORMS}|gradient blocks\.\d+\.(delta\.(core|gated_norm)\..*|attn\.[qk]_norm\.weight)"
WITH_POST_NORMS = rf"{NORMS}|gradient blocks\.\d+\.((attn|ffn)_post_norm|attn\.[qk]_norm)\.weight"
BEFORE_GATES = r"gradient (embed|blocks\.0|blocks\.1\.attn_norm).*"
LINEARS = r"gradient (blocks\.\d+\.(attn\.w[qkvo]|ffn\.(up|down))|embed)\.weight"  # tied head
LINEARS8 = r"gradient blocks\.\d+\.(attn\.w[qkvo]|ffn\.(gate|up|down))\.weight"
FACTORS = r"gradient .*((w[qkv]|gate|up)[._]lora_a|(wo|down)[._]lora_b)"
EVERYTHING = r"gradient .*"
ENCODER = r"gradient (vision|projector)\..*"
BEFORE_HEAD = r"gradient (?!head).*"
BEFORE_LAST = r"gradient (?!blocks\.4\.|norm|head).*"
ALSO_LOSS = r"loss 0|gradient .*"
FFN_CHUNKS = [
    replace(TP, recompute=Recompute(ffn_chunks=2)),
    Case("llama", 2, recompute=Recompute(mode="full", ffn_chunks=2), sequences=2),
]

BUGS = [
    Bug(replicas_not_reduced, TP, NORMS),
    Bug(shared_gate_not_reduced, HYBRID, r"gradient blocks\.\d+\.ffn\.shared_gate\.weight"),
    Bug(encoder_masked_causally, Case("bert", 2, Parallel(cp=2), sequences=2), ALSO_LOSS),
    Bug(adapters_not_reduced, ADAPTED, FACTORS),
    Bug(adapters_not_reduced, replace(WHOLE, lora=Lora(rank=4)), FACTORS),
    Bug(norms_of_own_columns, replace(TP, lora=Lora(rank=4, dora=True)), ALSO_LOSS),
    Bug(replicas_not_reduced, replace(EP, parallel=Parallel(etp=2), lora=Lora(rank=4)), FACTORS),
    Bug(tied_gradient_dropped, LOOP, r"gradient embed\.weight"),
    Bug(tied_gradient_dropped, V, r".*embed\.weight: the copies differ"),
    Bug(tied_gradient_summed_twice, LOOP, r"gradient embed\.weight"),
    Bug(local_divisor, Case("llama", 2, sequences=4), ALSO_LOSS),
    Bug(local_divisor, Case("llama", 4, Parallel(pp=2), sequences=4), ALSO_LOSS),
    Bug(loss_of_every_tp_rank, TP, EVERYTHING),
    Bug(replicas_reduced_twice, Case("qwen3", 2, Parallel(dp_replicate=2)), EVERYTHING),
    Bug(copies_summed, WHOLE, NORMS),
    Bug(functools.partial(activations_not_reduced, in_backward=False), WHOLE, ALSO_LOSS),
    Bug(functools.partial(activations_not_reduced, in_backward=True), WHOLE, EVERYTHING),
    Bug(functools.partial(activations_not_reduce_scattered, in_backward=False), TP, ALSO_LOSS),
    Bug(functools.partial(activations_not_reduce_scattered, in_backward=True), TP, EVERYTHING),
    Bug(dropout_keys_of_first_rank, DROPPED, ALSO_LOSS),
    Bug(head_gradients_not_summed, KEYS, BEFORE_KEYS),
    Bug(heads_of_other_ranks, KEYS, ALSO_LOSS),
    Bug(weight_gradient_dropped, V, LINEARS),
    Bug(head_gradient_not_reduced, CHUNKED, BEFORE_HEAD),
    Bug(local_divisor, RING, ALSO_LOSS),
    Bug(key_gradients_stay, RING, BEFORE_KEYS),
    *[Bug(halo_one_token_short, case, ALSO_LOSS) for case in (WINDOWED, PACKED_WINDOWS)],
    Bug(halo_of_one_piece, FAR, ALSO_LOSS),
    Bug(halo_gradients_stay, WINDOWED, BEFORE_KEYS),
    Bug(late_pieces_as_they_come, replace(RING, parallel=HEADS), ALSO_LOSS),
    Bug(positions_of_the_part, RING, ALSO_LOSS),
    Bug(expert_gradients_averaged, SHARED, EXPERTS),
    Bug(expert_inputs_without_gradient, EP, BEFORE_EXPERTS),
    Bug(expert_gradients_of_own_rows, EP, BEFORE_RESULTS),
    Bug(part_of_results, ETP, ALSO_LOSS),
    Bug(loads_of_own_tokens, POOLED, BEFORE_ROUTER),
    Bug(choices_in_order_of_the_ranks, LIMITED, ALSO_LOSS),
    Bug(mtp_tokens_of_the_part, MTP, ALSO_LOSS),
    Bug(chunks_of_predictions_unweighted, replace(MTP, loss_chunks=2), r"gradient .*"),
    Bug(predictions_by_all_labels, MTP, ALSO_LOSS),
    Bug(padding_routed, PACKED, ALSO_LOSS),
    Bug(predictions_across_documents, PREDICTED, ALSO_LOSS),
    *[Bug(micro_batches_exchanged, case, BEFORE_LAST) for case in OFFLOADED],
    *[Bug(chunk_without_gradient, case, BEFORE_HEAD) for case in FFN_CHUNKS],
    Bug(chunks_of_gathered_tokens, FFN_CHUNKS[0], ALSO_LOSS),
    *[Bug(scales_of_ones_own, case, ALSO_LOSS) for case in (*SCALED, OVERLAPPED)],
    Bug(block_scales_of_ones_own, BLOCKS8, ALSO_LOSS),
    Bug(token_scales_of_ones_own, LATENT8, ALSO_LOSS),
    Bug(gradient_scales_of_ones_own, SHARED8, BEFORE_HEAD),
    Bug(weight_gradient_dropped, SPLIT8, rf"{LINEARS8}|gradient head\.weight"),
    Bug(queued_float8_matmul_dropped, SPLIT8, LINEARS8),
    Bug(scales_of_the_micro_batch_before, SPLIT8, LINEARS8),
    Bug(sequences_for_tokens, OVERLAPPED, ALSO_LOSS),
    Bug(sequences_for_tokens, FUSED, ALSO_LOSS),
    Bug(input_gradients_not_reduce_scattered, LATENT_FUSED, BEFORE_EXPERTS),
    Bug(siblings_not_queued, QUEUED, LINEARS8),
    Bug(state_crosses_documents, DELTA_CP, ALSO_LOSS),
    Bug(convolution_crosses_documents, DELTA_CP, ALSO_LOSS),
    Bug(state_not_passed_over_cp, DELTA_CP, ALSO_LOSS),
    Bug(gradients_of_tokens_stay_on_the_rank, MAMBA_CP, EVERYTHING),
    *[Bug(channels_of_first_rank, case, ALSO_LOSS) for case in (DELTA, MAMBA)],
    Bug(gates_without_input_gradient, DELTA, BEFORE_GATES),
    Bug(replicas_not_reduced, DELTA, OF_HEADS),
    Bug(image_gradients_not_reduced, IMAGES, ENCODER),
    Bug(image_gradients_summed_twice, OWN_IMAGES, ENCODER),
    Bug(replicas_not_reduced, OWN_IMAGES, ENCODER),
    Bug(images_of_another_micro_batch, MANY_IMAGES, ALSO_LOSS),
    Bug(encoded_without_gradient, SPANS, r"gradient (embed|encoder_bias|blocks\.[01]\.).*"),
    Bug(biases_of_first_heads, replace(SPANS, parallel=Parallel(tp=2)), ALSO_LOSS),
    Bug(local_layers_at_the_global_base, LOCAL, ALSO_LOSS),
    Bug(replicas_not_reduced, LOCAL, WITH_POST_NORMS),
    Bug(values_without_gradient, GLOBAL, BEFORE_VALUES),
    Bug(values_without_gradient, replace(GLOBAL, parallel=Parallel(cp=2)), BEFORE_VALUES),
    Bug(scalars_not_reduced, GLOBAL, r"gradient blocks\.\d+\.scale\.gamma"),
    Bug(rows_read_before_they_arrive, TOGETHER, ALSO_LOSS),
    Bug(gradients_of_the_micro_batch_before, TOGETHER, r"gradient (?!blocks\.2\.|norm|head).*"),
    Bug(gradient_added_twice, TOGETHER, r"gradient embed\.weight"),
    Bug(expert_gradients_lost, TOGETHER, EXPERTS),
    Bug(expert_gradients_computed_twice, TOGETHER, EXPERTS),
    Bug(padding_not_masked, PADDED, r".*embed\.weight: padded rows are not zero"),
]


def run_with(plant: Callable[[], None], case: Case) -> dict[str, Any]:
    """On one rank, which ends afterwards: nothing is put back."""
    plant()
    return parallel_run(case)


def spoiled(bug: Bug) -> list[str]:
    """What deviates in the first backward, or the assertion that fails in a rank."""
    case = shallow(replace(bug.case, steps=1))
    try:
        ranks = run_ranks(case.world, run_with, bug.plant, case)
    except AssertionError as error:
        return [str(error).splitlines()[-1]]
    wrong = Outcome(deviations(case, ranks)).wrong(case)
    names = [line.rsplit(": ", 1)[0] for line in wrong]
    return [name for name in names if name.startswith(("loss 0", "gradient "))]


def parameters_of(bugs: Sequence[Bug]) -> list[Any]:
    """The first case of each bug is in the default run, the others are in `-m full`."""
    names = [str(bug) for bug in bugs]
    return [
        pytest.param(
            bug,
            id=f"{name}-{bug.case}",
            marks=[pytest.mark.full] if name in names[:number] else [],
        )
        for number, (name, bug) in enumerate(zip(names, bugs, strict=True))
    ]


@pytest.mark.parametrize("bug", parameters_of(BUGS))
def test_planted_bug_turns_parity_red(bug: Bug) -> None:
    found = spoiled(bug)
    assert any(what != "loss 0" for what in found), "no gradient deviates"
    assert not [what for what in found if not re.fullmatch(bug.spoils, what)]


def parts_of_experts_counted_once() -> None:
    """The norm takes ranks that share dense parameters to hold the same experts."""

    def owned(parameter: Tensor, mesh: Mesh) -> bool:
        inner = all(mesh.rank(axis) == 0 for axis in ("dp_shard", "tp"))
        return inner if "ep" in parameter.device_mesh.mesh_dim_names else counts(parameter, mesh)  # type: ignore[attr-defined]

    counts = gradients._owned
    gradients._owned = owned


def weights_of_the_first_step() -> None:
    """Weights are cast to float8 once, and not again after their update."""
    cast, first = _WeightShard.before, {}

    def before(self: _WeightShard, *args: Any) -> Any:
        return first.setdefault(self, cast(self, *args))

    _WeightShard.before = before  # type: ignore[method-assign]


ONCE = parity.float8("tensorwise", 1, Parallel(), float8={"all_gather": True})
DELAYED = parity.float8("tensorwise", 2, Parallel(dp_replicate=2), **parity.DELAYED)
LATE_BUGS = [
    Bug(parts_of_experts_counted_once, EP, r"norm .*"),
    Bug(parts_of_experts_counted_once, replace(EP, parallel=Parallel(tp=2, ep=2)), r"norm .*"),
    Bug(histories_of_ones_own, DELAYED, r"parameter .*"),
    Bug(weights_of_the_first_step, ONCE, r"loss 1"),
    Bug(wide_moments_of_experts, NARROW, r"parameter .*experts.*"),
    Bug(biases_by_own_loads, BIASED, r"loads .*"),
    Bug(validation_as_mean_of_means, PACKED, r"validation"),
    Bug(losses_of_other_sources, replace(CHUNKED, micro_batch=2), r"sources 0"),
]
"""Those that the first backward does not show; what they spoil is the pattern of what has to."""


@pytest.mark.parametrize("bug", parameters_of(LATE_BUGS))
def test_planted_bug_after_the_backward_turns_parity_red(bug: Bug) -> None:
    case = shallow(bug.case)
    ranks = run_ranks(case.world, run_with, bug.plant, case)
    wrong = Outcome(deviations(case, ranks)).wrong(case)
    names = [line.rsplit(": ", 1)[0] for line in wrong]
    assert any(re.fullmatch(bug.spoils, name) for name in names)
    assert not [name for name in names if name.startswith(("gradient", "loss 0"))]


def test_planted_bug_costs_decibels() -> None:
    """Where float8 does not round as one process does."""
    case = parity.float8("rowwise", 2, Parallel(tp=2), dtype="float32")
    plant = functools.partial(activations_not_reduce_scattered, in_backward=True)
    found = deviations(case, run_ranks(case.world, run_with, plant, case))
    assert Outcome(found).wrong(case)
