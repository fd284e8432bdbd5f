"""One rank of test_fully_shard.py: `shard_ranks.py DEVICE SCENARIO…`, one after another. Ends with 0 when all held."""

import gc
import math
import sys

import shard_reported_bugs
import shard_states
import torch
import torch.distributed as dist
from shard_training import (
    adamw,
    assert_same_state,
    one_process,
    placed,
    rank_loss,
    sharded_run,
    whole,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary
from training import Chain, Linear, chain_loss, llama, tokens

import neaptide as nt

OFFLOAD = {"min_bytes": 0, "keep_last": 0}


def assert_trains_as_one_process(device, options, *, mesh=None, micro_batches=1, offload=False, prepare=None, **model):
    losses, state = one_process(device, micro_batches=micro_batches, **model)
    ours = placed(device, **model)
    if prepare is not None:
        prepare(ours)
    handle = nt.fully_shard(ours, mesh, **options)
    if offload:
        memory = nt.offload(ours, **OFFLOAD)
    run = sharded_run(ours, handle, adamw(ours), device, micro_batches=micro_batches)
    assert all(torch.equal(a, b) for a, b in zip(run, losses[dist.get_rank()], strict=True)), (run, losses)
    assert_same_state(whole(handle), state)
    if offload:
        assert memory.take_step_report().offloaded_bytes > 0
    return handle


def equality(device):
    for options in (
        {},
        {"comm_fusion": False},
        {"stage": "optim"},
        {"stage": "optim_grads", "prefetch": False},
        {"units": ["model.layers.{*}.mlp", "lm_head"], "bucket_limit": "16KiB"},
    ):
        assert_trains_as_one_process(device, options)


def combinations(device):
    assert_trains_as_one_process(device, {}, offload=True)
    assert_trains_as_one_process(device, {}, micro_batches=3)
    # https://github.com/pytorch/pytorch/issues/176076: tied, and rows that the ranks do not divide.
    assert_trains_as_one_process(device, {}, tie_word_embeddings=True, vocab_size=129)
    for reentrant in (False, True):
        checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        assert_trains_as_one_process(
            device, {}, offload=True, prepare=lambda model, c=checkpointing: model.gradient_checkpointing_enable(**c)
        )


def copies(device):
    """HSDP, with one piece in each of two copies.
    https://github.com/verl-project/verl/issues/7493: gradients of such a mesh were not reduced."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    assert_trains_as_one_process(device, {}, mesh=mesh)
    one_dimension = init_device_mesh("cpu", (2,))
    assert_trains_as_one_process(device, {}, mesh=one_dimension)
    assert_trains_as_one_process(device, {}, mesh=dist.new_group([0, 1]))


def identity(device):
    model = placed(device)
    optimizer = adamw(model)  # before: it steps the same objects
    before = {name: (id(p), tuple(p.shape), p.numel()) for name, p in model.named_parameters()}
    bytes_before = sum(p.nbytes for p in model.parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    handle = nt.fully_shard(model)

    def check():
        gc.collect()
        for name, p in model.named_parameters():
            assert id(p) == before[name][0]
            assert isinstance(p, torch.nn.Parameter) and p.is_leaf and p.requires_grad
            assert p.ndim == 1
            piece = pieces[name]
            assert piece.full_size == before[name][1]
            assert p.numel() == piece.end - piece.begin <= before[name][2]
            assert piece.data.numel() == 0 or piece.data.data_ptr() == p.data_ptr()
            assert p.grad is None or p.grad.shape == p.shape
        mine = torch.tensor([sum(p.numel() for p in model.parameters())])
        dist.all_reduce(mine)
        assert mine.item() == sum(numel for _, _, numel in before.values())
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
        usage = handle.usage()
        assert sum(storages.values()) == usage.shards == usage.minimum
        # Its share, and what the starts of parameters and pieces are rounded up by. Twice, in
        # https://gitcode.com/mindspore/hyper-parallel/issues, number 231.
        assert bytes_before / world <= usage.shards <= bytes_before / world + 64 * (len(before) + len(handle.units))
        assert usage.unsharded == usage.gradients == 0
        return usage.shards

    pieces = handle.state_dict(sharded=True)
    at_rest = check()
    value = rank_loss(model, device, 0, rank)
    value.backward()
    del value
    assert all(p.grad is not None for p in model.parameters())
    assert check() == at_rest
    optimizer.step()
    state = [s for p in optimizer.state.values() for s in p.values() if torch.is_tensor(s) and s.ndim == 1]
    assert sum(s.nbytes for s in state) <= 2 * at_rest  # two moments
    assert handle.units[-1] == "" and "lm_head" in handle.units and "model.layers.3" in handle.units
    assert handle.usage().live_units_peak <= 2
    handle.dissolve()
    for name, p in model.named_parameters():
        assert (id(p), tuple(p.shape), p.numel()) == before[name]
    assert type(model).__name__ == "LlamaForCausalLM" and "_neaptide_plain" not in vars(type(model))
    with torch.no_grad():
        rank_loss(model, device, 0, rank)


def clipping(device):
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = placed(device)
    for other in range(world):
        rank_loss(plain, device, 0, other).backward()
    for p in plain.parameters():
        p.grad /= world
    for order in (2.0, 1.0, math.inf):
        model = placed(device)
        handle = nt.fully_shard(model)
        rank_loss(model, device, 0, rank).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], order).item()
        assert math.isclose(handle.grad_norm(order), expected, rel_tol=1e-5)
        assert math.isclose(handle.clip_grad_norm_(expected / 4, order), expected, rel_tol=1e-5)
        assert math.isclose(handle.grad_norm(order), expected / 4, rel_tol=1e-3)  # of which 1e-6 / norm is meant


def low_precision(device):
    """Pieces stay float32, what is computed with is bfloat16, and the outputs come in the dtype that was asked for."""
    model = placed(device)
    handle = nt.fully_shard(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.mlp.up_proj.weight.dtype))
    output = model(input_ids=tokens(device))
    assert output.logits.dtype == torch.float32
    output.logits.square().mean().backward()
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert {v.dtype for v in whole(handle).values()} == {torch.float32}


class Twice(Linear):
    """The weight has two gradients while this runs backward once: each in a pass of its own, inside of the pass."""

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(super().forward, x, use_reentrant=True)
        return x


class Again(torch.nn.Module):
    """The layer runs backward twice in one pass, each time in a pass of its own."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Linear(32)])

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return x


def passes_inside_a_pass(device):
    """Within one backward of a unit gradients add up in param_dtype, as under torch's fully_shard; in reduce_dtype over
    the ranks, and from one backward of a unit to the next one in the pass (which fully_shard leaves unreduced)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

    def backward(model, rank):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)
        model(x.requires_grad_()).float().square().mean().backward()

    def make(cls):
        torch.manual_seed(9)
        return cls().to(device)

    def seen(handle, model):
        for _ in range(2):  # the second adds to what the first left
            backward(model, dist.get_rank())
        ((name, p),) = model.named_parameters()
        piece = handle.state_dict(sharded=True)[name]
        assert p.grad.dtype == torch.float32
        return p.grad, slice(piece.begin, piece.end)

    theirs = torch.nn.Sequential(make(lambda: Twice(32)))
    for module in (theirs[0], theirs):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(**dtypes))
    for _ in range(2):
        backward(theirs, dist.get_rank())
    ours = torch.nn.Sequential(make(lambda: Twice(32)))
    gradient, mine = seen(nt.fully_shard(ours, units=["0"], **dtypes), ours)
    assert torch.equal(gradient, theirs[0].weight.grad.full_tensor().flatten()[mine])

    arrived = {}  # rank, and its two gradients
    for rank in range(2):
        plain = make(Again).to(torch.bfloat16)

        def take(p, rank=rank):
            arrived.setdefault(rank, []).append(p.grad.float())
            p.grad = None

        plain.layers[0].weight.register_post_accumulate_grad_hook(take)
        backward(plain, rank)
    total = sum((first + second) / 2 for first, second in zip(*arrived.values(), strict=True))
    ours = make(Again)
    gradient, mine = seen(nt.fully_shard(ours, **dtypes), ours)
    assert torch.equal(gradient, (2 * total).flatten()[mine])


def mistakes(device):
    """Each is a UserError on every rank, which leaves the model alone, and training goes on after it."""
    rank = dist.get_rank()
    model = placed(device)
    kinds = [type(module) for module in model.modules()]
    shapes = [p.shape for p in model.parameters()]

    def refused(text, *arguments, of=model, **options):
        try:
            nt.fully_shard(of, *arguments, **options)
        except nt.UserError as error:
            assert text in str(error), error
            assert isinstance(error, ValueError)
        else:
            raise AssertionError(f"no error: {text}")

    refused("expected a module named 'model.layer'; found none", units=["model.layer.{*}"])
    refused("[shard.layers] expected indices from 0 to 3; found '4'", units=[4])
    refused("[shard.stage] expected optim, optim_grads or optim_grads_params; found '2'", stage=2)
    refused("[shard.comm_fusion] expected True or False; found 1", comm_fusion=1)
    refused("[shard] expected floating-point dtypes", param_dtype=torch.int32)
    refused("[shard.param_dtype] expected a torch.dtype or None; found 'half'", param_dtype="half")
    refused("[shard.device] expected a torch.device, its name, or None; found 'gpu'", device="gpu")
    refused("expected one of the options comm_fusion", fusion=True)
    refused("[shard.mesh] expected None", "cpu")
    refused("[shard.mesh] expected None", init_device_mesh("cpu", (1, 2, 1)))
    # On one rank only: the others hear of it.
    refused("matches no module", units=["model.layers.9"] if rank == 0 else [])
    refused("[shard.mesh] expected None", 7 if rank == 1 else None)
    refused("'a mesh of 1 × 2' on rank 0 and 'a mesh of 2 × 1' on rank 1",
            init_device_mesh("cpu", (2, 1) if rank == 1 else (1, 2)))  # fmt: skip
    refused("'comm_fusion=True' on rank 0 and 'comm_fusion=False' on rank 1", comm_fusion=rank == 0)
    narrow = placed(device, intermediate_size=160 + 32 * rank)
    refused("mlp.gate_proj.weight (160, 64)", of=narrow)
    if rank == 1:
        rank_loss(model, device, 0, 0).backward()
    refused("expected no gradients when a model is sharded")
    model.zero_grad()
    hook = model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: None)
    refused("expected no post-accumulate hooks")
    hook.remove()
    # https://github.com/pytorch/pytorch/pull/179532: one parameter of two units.
    tied = placed(device, tie_word_embeddings=True)
    refused("are the same; choose units", of=tied, units=["model.embed_tokens", "lm_head"])

    assert [type(module) for module in model.modules()] == kinds
    assert [p.shape for p in model.parameters()] == shapes
    gc.collect()
    handle = nt.fully_shard(model)
    refused("is sharded already")
    sharded_run(model, handle, adamw(model), device)


def misuse(device):
    """What is done to a sharded model between steps and by the way."""
    model = placed(device)
    handle = nt.fully_shard(model)
    try:
        model.model.layers[0](torch.ones(1, 4, 64, device=device))
    except nt.UserError as error:
        assert "inside that of the model" in str(error)
    else:
        raise AssertionError("a unit ran outside of its model")
    try:
        torch.func.grad(lambda x: model(inputs_embeds=x).logits.sum())(torch.ones(1, 4, 64, device=device))
    except nt.UserError as error:
        assert "torch.func" in str(error)
    else:
        raise AssertionError("a transform around a sharded module")
    hook = model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: None)
    try:
        rank_loss(model, device, 0, 0).backward()
    except nt.UserError as error:
        assert "found that it was replaced; use Tensor::register_hook() instead" in str(error)
    else:
        raise AssertionError("another hook is in the place of sharding's")
    hook.remove()
    handle.dissolve()
    handle = nt.fully_shard(model)
    seen = []
    handle.with_full_parameters(lambda: seen.append(model.lm_head.weight.shape))
    assert seen == [torch.Size([128, 64])]

    def double():
        with torch.no_grad():
            model.lm_head.weight.mul_(2)

    try:
        handle.with_full_parameters(double)
    except nt.UserError as error:
        assert "'lm_head.weight' was written" in str(error), error
    else:
        raise AssertionError("what was written would be lost")
    handle.with_full_parameters(double, write_back=True)
    assert torch.equal(whole(handle)["lm_head.weight"], llama().lm_head.weight * 2)
    # An exception in a forward, alike on every rank, ends nothing.
    try:
        model(input_ids="nothing of the kind")
    except AssertionError:
        raise
    except Exception as error:
        assert not isinstance(error, nt.Error), error
    with torch.inference_mode():
        rank_loss(model, device, 0, 0)
    sharded_run(model, handle, adamw(model), device)


def against_fsdp2(device):
    """Bytes at rest of both, counted alike."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    ours, theirs = llama(), llama()
    nt.fully_shard(ours)
    for layer in theirs.model.layers:
        fully_shard(layer)
    fully_shard(theirs)
    local = [p.to_local() for p in theirs.parameters()]

    def storages(tensors):
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    mine, other = storages(ours.parameters()), storages(local)
    print(f"bytes at rest: ours {mine}, fully_shard {other}, whole {sum(p.nbytes for p in llama().parameters())}")
    assert mine <= other * 1.01


def missing(device):
    """A rank that does not come is not waited for longer than was said."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"])
        return
    try:
        nt.fully_shard(placed(device), timeout=2)
    except nt.Error as error:
        assert not isinstance(error, nt.UserError)
        assert "they did not all come within 2000 ms" in str(error), error
    else:
        raise AssertionError("a rank alone")
    store.set("given up", "")


def leaving(device):
    """A rank that ends with an exception ends the others, which say why."""
    model = placed(device)
    nt.fully_shard(model)
    if dist.get_rank() == 1:
        raise ValueError("a bad sample")
    rank_loss(model, device, 0, 0).backward()


def lifetime(device):
    """Nothing stays of a sharded model that is dropped, nor grows from step to step, as gradients did in
    https://github.com/pytorch/pytorch/issues/139234."""
    model = Chain().to(device)
    handle = nt.fully_shard(model)
    kept = [handle]
    kept.clear()
    for step in range(20):
        chain_loss(model, device, step).backward()
        model.zero_grad()
    assert handle.usage().unsharded == handle.usage().reduced == 0
    parameters = WeakTensorKeyDictionary()
    for p in model.parameters():
        parameters[p] = True
    del model, handle, p
    gc.collect()
    assert len(parameters) == 0


def main():
    device, *scenarios = sys.argv[1:]
    if device == "sim":
        from neaptide import sim  # noqa: PLC0415

        sim.configure(capacity="1GiB", hazard_check=True, clock="virtual", d2h="25GB/s", h2d="25GB/s")
    if scenarios == ["uninitialised"]:
        try:
            nt.fully_shard(Chain())
        except nt.UserError as error:
            assert "expected torch.distributed to be initialised" in str(error)
            return
        raise AssertionError("no error")
    dist.init_process_group("gloo")
    places = (sys.modules[__name__], shard_states, shard_reported_bugs)
    for scenario in scenarios:
        next(getattr(place, scenario) for place in places if hasattr(place, scenario))(device)
        gc.collect()
        if device == "sim":
            sim.synchronize()
            assert sim.take_hazards() == []
            assert sim.memory_allocated() == 0
    dist.destroy_process_group()
    print("ok")


if __name__ == "__main__":
    main()
