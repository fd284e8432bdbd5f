"""Scenarios of shard_ranks.py from bugs that users of other libraries have reported."""

import torch
import torch.distributed as dist
from shard_training import adamw, assert_same_state, one_process, rank_loss, sharded_run, whole
from training import Chain, Linear, chain_loss, lora

import neaptide as nt


def adapters(device):
    """https://github.com/deepspeedai/DeepSpeed/pull/8148: in a checkpoint, frozen weights were taken for activations.
    https://github.com/pytorch/pytorch/issues/104690: frozen and trained parameters in one buffer."""

    def make(device):
        return lora(lora_dropout=0.0).to(device)

    losses, state = one_process(device, make=make)
    for reentrant in (False, True):
        model = make(device)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        handle = nt.fully_shard(model)
        memory = nt.offload(model, min_bytes=0, keep_last=0)
        run = sharded_run(model, handle, adamw(model), device)
        assert all(torch.equal(a, b) for a, b in zip(run, losses[dist.get_rank()], strict=True))
        assert_same_state(whole(handle), state)
        assert memory.take_step_report().offloaded_bytes > 0
        rank_loss(model, device, 0, 0).backward()
        assert {p.grad is None for p in model.parameters() if not p.requires_grad} == {True}
        handle.dissolve()


class Sometimes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(32), Linear(32)

    def forward(self, x, use):
        x = self.first(x)
        return self.second(x) if use else x


class Uneven(torch.nn.Module):
    """Units with parameters that are used when it is said so, and one that never runs, unless it is said so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layers = torch.nn.ModuleList(Sometimes() for _ in range(3))

    def forward(self, x, use, layers=(0, 1)):
        for i in layers:
            x = self.layers[i](x, use)
        return x


def rows(device, number):
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(number)).to(device)


def assert_trains_as_one_process(device, make, loss, **options):
    losses, state = one_process(device, loss=loss, make=make)
    model = make(device)
    handle = nt.fully_shard(model, **options)
    run = sharded_run(model, handle, adamw(model), device, loss=loss)
    assert all(torch.equal(a, b) for a, b in zip(run, losses[dist.get_rank()], strict=True))
    assert_same_state(whole(handle), state)


def used_by_some(device):
    """https://github.com/pytorch/pytorch/issues/83107: an assertion about what does not run."""

    def loss(model, device, step, rank, micro=0):
        return model(rows(device, 10 * step + rank), use=rank == 0).square().mean()

    def make(device):
        return Uneven().to(device)

    assert_trains_as_one_process(device, make, loss)


def shapes(device):
    """https://github.com/mindspore-ai/hyper-parallel/issues/475, https://github.com/deepspeedai/DeepSpeed/pull/8280:
    parameters that the ranks do not divide, of no elements, and in two dtypes."""

    class Shapes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(7)
            sizes = [[], [0], [0, 4], [1], [3], [5, 7], [2 * 3 + 1, 2]]
            self.weights = torch.nn.ParameterList(
                torch.randn(size, generator=generator).to(dtype)
                for size in sizes
                for dtype in (torch.float32, torch.bfloat16)
            )

        def forward(self, x):
            return sum((w.float() * x.mean()).tanh().square().sum() for w in self.weights)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Shapes(), Shapes()])

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    def make(device):
        return Model().to(device)

    def loss(model, device, step, rank, micro=0):
        return model(rows(device, 10 * step + rank))

    assert_trains_as_one_process(device, make, loss)


def shared_bias(device):
    """https://github.com/pytorch/pytorch/issues/83052: one bias of a unit and of a unit inside of it."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(32, 32)
            self.bias = self.inner.bias

        def forward(self, x):
            return self.inner(x) + self.bias

    def make(device):
        torch.manual_seed(8)
        return torch.nn.Sequential(Outer(), Outer()).to(device)

    def loss(model, device, step, rank, micro=0):
        return model(rows(device, 10 * step + rank)).square().mean()

    try:
        nt.fully_shard(make("cpu"), units=["0", "0.inner", "1", "1.inner"], device=device)
    except nt.UserError as error:
        assert "are the same; choose units" in str(error), error
    else:
        raise AssertionError("one parameter of two units")
    assert_trains_as_one_process(device, make, loss, units=["0", "1"])


def failed(device):
    """https://github.com/mosaicml/composer/pull/3030: after an error in backward parameters stayed whole, so that the
    next batch, though smaller, had no room."""
    model = Chain().to(device)
    handle = nt.fully_shard(model)

    def gradients():
        chain_loss(model, device, dist.get_rank()).backward()
        seen = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return seen

    expected = gradients()

    def refuse(_gradient):
        raise MemoryError("no room")

    def watch(_module, _args, output):
        output.register_hook(refuse)

    broken = model.layers[1].register_forward_hook(watch)
    for _ in range(3):
        loss = chain_loss(model, device, dist.get_rank())
        try:
            loss.backward()
        except MemoryError:
            pass
        else:
            raise AssertionError("no error")
        del loss
        model.zero_grad()
        usage = handle.usage()
        assert usage.unsharded == usage.gradients == usage.reduced == 0
    broken.remove()
    for mine, other in zip(gradients(), expected, strict=True):
        assert torch.equal(mine, other)


def other_units(device):
    """https://github.com/pytorch/pytorch/pull/170667: ranks that run different units waited for each other for ever."""
    model = Uneven().to(device)
    nt.fully_shard(model)
    try:
        model(torch.ones(4, 32, device=device), use=True, layers=(0, 1 + dist.get_rank()))
    except nt.UserError as error:
        assert "'layers.1'" in str(error) and "'layers.2'" in str(error), error
        assert "every rank must call the same collectives in the same order" in str(error), error
    else:
        raise AssertionError("ranks that run different units")


def retained(device):
    """https://github.com/pytorch/pytorch/issues/106637: a second backward over a retained graph failed."""
    model = Chain().to(device)
    nt.fully_shard(model)
    loss = chain_loss(model, device, dist.get_rank())
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def used_late(device):
    """https://github.com/pytorch/pytorch/issues/196996: gradients of two dtypes, where a parameter is first used in the
    last of several micro-batches."""

    def gradients(uses):
        model = Uneven().to(device)
        handle = nt.fully_shard(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        x = rows(device, dist.get_rank()).to(torch.bfloat16)
        with handle.no_sync():
            for use in uses[:-1]:
                model(x, use=use).square().mean().backward()
        model(x, use=uses[-1]).square().mean().backward()
        assert all(p.grad is None for p in model.layers[2].parameters())
        return [model.layers[0].first.weight.grad, model.layers[0].second.weight.grad]

    both, late, alone = gradients([False, True]), gradients([True]), gradients([False])
    assert {g.dtype for g in (*both, *late)} == {torch.float32}
    assert torch.equal(both[1], late[1])
    assert torch.allclose(both[0], late[0] + alone[0], rtol=1e-2, atol=1e-6)


def scaled(device):
    """https://github.com/pytorch/pytorch/pull/115710: ranks disagreed on the loss scale, and on whether they step."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # noqa: PLC0415

    def sharded():
        model = Chain().to(device)
        return model, nt.fully_shard(model), adamw(model)

    def loss(model):
        return chain_loss(model, device, dist.get_rank())

    (plain, expected, plain_optimizer), (model, handle, optimizer) = sharded(), sharded()
    scaler = ShardedGradScaler(device, init_scale=4.0)

    scaler.scale(loss(model)).backward()
    if dist.get_rank() == 1:
        next(p for p in model.parameters() if p.numel() > 0).grad[0] = torch.inf
    before = whole(handle)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2
    assert_same_state(whole(handle), before)

    optimizer.zero_grad()
    scaler.scale(loss(model)).backward()
    scaler.step(optimizer)
    loss(plain).backward()
    plain_optimizer.step()
    assert_same_state(whole(handle), whole(expected))
