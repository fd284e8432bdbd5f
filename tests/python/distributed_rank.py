"""One rank of the worlds of test_fsdp2.py: trains with offload and without, and prints what it saw as JSON.

distributed_rank.py cpu|sim KIND...
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Run, llama, tokens

import neaptide as nt

LAYERS, STEPS, ROWS, LENGTH = 8, 3, 8, 64
OPTIONS = {"min_bytes": 0, "keep_last": 1, "prefetch": 1, "max_in_flight": 0}


class Staged(dist.ProcessGroup):
    """Gloo for a device that it does not know: collectives of copies on the CPU. What FSDP2 and DDP call, no more."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):  # noqa: N802
        return "staged"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def _run(self, collective, outputs, inputs, options):
        """`outputs` may be `inputs`."""
        sources = [tensor.cpu() for tensor in inputs]
        targets = sources if outputs is inputs else [torch.empty_like(tensor, device="cpu") for tensor in outputs]
        collective(sources, targets, options).wait()
        for output, target in zip(outputs, targets, strict=True):
            output.copy_(target)
        done = torch.futures.Future()
        done.set_result(outputs)
        return torch._C._distributed_c10d._create_work_from_future(done)

    def allreduce(self, tensors, options):
        return self._run(lambda sources, _, o: self._gloo.allreduce(sources, o), tensors, tensors, options)

    def broadcast(self, tensors, options):
        return self._run(lambda sources, _, o: self._gloo.broadcast(sources, o), tensors, tensors, options)

    def allgather(self, outputs, inputs, options):
        return self._run(lambda s, t, o: self._gloo.allgather([t], s, o), outputs[0], inputs, options)

    def _allgather_base(self, output, source, options):
        gather = lambda s, t, o: self._gloo._allgather_base(t[0], s[0], o)  # noqa: E731
        return self._run(gather, [output], [source], options)

    def _reduce_scatter_base(self, output, source, options):
        def reduce(sources, targets, o):
            work = self._gloo.allreduce(sources, dist.AllreduceOptions())
            work.wait()
            targets[0].copy_(sources[0].chunk(self.size())[self.rank()])
            if o.reduceOp == dist.ReduceOp.AVG:
                targets[0].div_(self.size())
            return work

        return self._run(reduce, [output], [source], options)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # newer names

    def barrier(self, options):
        return self._gloo.barrier(options)


def distribute(kind, model, device):
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model, device, number):
    rows = tokens(device, 2 * number + dist.get_rank(), ROWS, LENGTH)
    return model(input_ids=rows, labels=rows).loss


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def measure(device):
    """(bytes above what was there before, of a step of the caller's)."""
    if device == "cpu":
        return lambda: 0
    torch.sim.synchronize()
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    return lambda: torch.sim.max_memory_allocated() - before


def train(kind, device, *, offload=None, checkpoint=False, accumulate=1):
    """(Run, peak of the last step, report of the last step). offload: None, or "before" or "after" distributing."""
    model = llama(num_hidden_layers=LAYERS).to(device)
    handle = None
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if offload == "before":
        handle = nt.offload(model, **OPTIONS)
    distributed = distribute(kind, model, device)
    if offload == "after":
        handle = nt.offload(distributed, **OPTIONS)
    optimizer = torch.optim.AdamW(distributed.parameters(), lr=1e-3)
    run = Run()
    for step in range(STEPS):
        if handle is not None:
            handle.take_step_report()
        peak = measure(device)
        for micro in range(accumulate):
            loss = loss_of(distributed, device, step * accumulate + micro)
            loss.backward()
            run.losses.append(loss.detach().cpu())
            del loss
        seen = peak()
        run.gradients.append({name: local(p.grad).cpu().clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return run, seen, None if handle is None else handle.take_step_report()


def cases_of(kind, device):
    seen = {}
    for how in ({}, {"accumulate": 2}, {"checkpoint": True}):
        plain, plain_peak, _ = train(kind, device, **how)
        for order in ("after", "before") if not how else ("after",):
            run, peak, report = train(kind, device, offload=order, **how)
            run.assert_same(plain)
            case = " ".join([*how, order])
            seen[case] = {"moved": report.offloaded_bytes, "peak": peak, "plain": plain_peak}
    return seen


def begin(device):
    torch.set_num_threads(1)
    if device == "sim":
        import neaptide.sim  # noqa: PLC0415

        neaptide.sim.configure(capacity="1GiB", hazard_check=True)
        dist.Backend.register_backend("staged", Staged, devices=["cpu", "sim"])
    dist.init_process_group("gloo" if device == "cpu" else "staged")


def main():
    device, *kinds = sys.argv[1:]
    begin(device)
    seen = {kind: cases_of(kind, device) for kind in kinds}
    hazards = torch.sim.take_hazards() if device == "sim" else []
    print(json.dumps({"kinds": seen, "hazards": hazards}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
