"""Offload beside what people put around a model, into it and over it: same bits, and everybody keeps their part."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch.utils import checkpoint
from training import Chain, Run, chain_loss, language_loss, llama, train

import neaptide as nt

MIN = {"min_bytes": 0, "keep_last": 0}


@pytest.fixture(scope="module")
def plain_llama():
    return train(llama(), "cpu")


@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_checkpointing_leaves_a_units_inputs_to_offload(device, plain_llama, reentrant):
    def run(offload):
        model = llama().to(device)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        handle = nt.offload(model, **MIN) if offload else None
        return train(model, device), handle

    plain, _ = run(offload=False)
    got, handle = run(offload=True)
    got.assert_same(plain)
    if not reentrant:
        got.assert_same(plain_llama)
    report = handle.take_step_report()
    # Of each call of a layer the tensors that go in alone: hidden states, and what else is a tensor and large.
    assert 0 < report.offloaded_storages <= 3 * 4 * 4
    assert report.never_hit == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["around the unit", "inside the unit"])
def test_a_checkpoint_of_ones_own(device, reentrant, place):
    class Checkpointed(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint.checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

    def run(offload):
        model = Chain().to(device)
        model.layers = torch.nn.ModuleList(Checkpointed(layer) for layer in model.layers)
        handle = None
        if offload:
            handle = nt.offload(model, ["layers.*" if place == "inside the unit" else "layers.*.inner"], **MIN)
        return train(model, device, loss=chain_loss), handle

    plain, _ = run(offload=False)
    got, handle = run(offload=True)
    got.assert_same(plain)
    # What a unit saves inside somebody's region is that region's.
    assert (handle.take_step_report().offloaded_bytes > 0) == (place == "inside the unit")


def test_layers_that_torchs_checkpoint_wrapper_wraps(device):
    """As accelerate's FSDP2 plugin does with `activation_checkpointing`."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper  # noqa: PLC0415

    def run(offload):
        model = llama().to(device)
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper.checkpoint_wrapper(layer)
        handle = nt.offload(model, **MIN) if offload else None
        return train(model, device), handle

    plain, _ = run(offload=False)
    got, handle = run(offload=True)
    got.assert_same(plain)
    assert handle.units == [f"model.layers.{i}" for i in range(4)]
    assert handle.take_step_report().offloaded_bytes > 0


def test_selective_checkpointing(device):
    def save_products(_context, op, *_args, **_kwargs):
        policy = checkpoint.CheckpointPolicy
        return policy.MUST_SAVE if op == torch.ops.aten.mm.default else policy.PREFER_RECOMPUTE

    contexts = partial(checkpoint.create_selective_checkpoint_contexts, save_products)

    def run(offload):
        model = llama().to(device)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        if offload:
            nt.offload(model, **MIN)
        return train(model, device)

    run(offload=True).assert_same(run(offload=False))


def test_gradient_accumulation(device):
    plain = train(llama().to(device), device, micro_batches=3)
    model = llama().to(device)
    nt.offload(model, **MIN)
    train(model, device, micro_batches=3).assert_same(plain)


def test_several_forwards_before_one_backward(device):
    def total(model, device, step):
        return language_loss(model, device, 2 * step) + language_loss(model, device, 2 * step + 1)

    plain = train(llama().to(device), device, loss=total)
    model = llama().to(device)
    handle = nt.offload(model, **MIN)
    train(model, device, loss=total).assert_same(plain)
    assert handle.take_step_report().passes == 6


def test_autocast(device):
    def around():
        return torch.autocast(device, dtype=torch.bfloat16)

    plain = train(llama().to(device), device, around=around)
    model = llama().to(device)
    nt.offload(model, **MIN)
    train(model, device, around=around).assert_same(plain)


def test_retained_graphs_and_double_backward(device):
    def penalised(loss):
        loss.backward(retain_graph=True)
        loss.backward(create_graph=True)

    def gradient_penalty(model, device, step):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)).to(device).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().mean()

    def run(model, **how):
        got = train(model, device, **how)
        for parameter in model.parameters():
            parameter.grad = None  # with create_graph it refers to the graph that refers to it
        return got

    for how in ({"loss": chain_loss, "backward": penalised}, {"loss": gradient_penalty}):
        plain = run(Chain().to(device), **how)
        model = Chain().to(device)
        nt.offload(model, **MIN)
        run(model, **how).assert_same(plain)


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters(device, order):
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    leaving = set()

    def note(tensor, *_):
        leaving.add(tensor.untyped_storage().data_ptr())
        return "offload"

    def run(offload):
        model, handle = llama(), None
        if offload and order == "before":
            handle = nt.offload(model, **MIN, policy=note)
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)).to(device)
        if offload and order == "after":
            handle = nt.offload(model, **MIN, policy=note)
        got = train(model, device)
        # The frozen weights, which backward needs, are the model's: what is saved of them stays.
        assert leaving.isdisjoint(p.untyped_storage().data_ptr() for p in model.parameters())
        return got, handle

    plain, _ = run(offload=False)
    got, handle = run(offload=True)
    got.assert_same(plain)
    assert [name.rsplit(".", 1)[1] for name in handle.units] == ["0", "1", "2", "3"]
    assert leaving


# ---- other people's hooks


class SavedTensorHooks:
    """Saved-tensor hooks that count."""

    def __init__(self):
        self.packed = self.unpacked = 0

    def __call__(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        self.packed += 1
        return tensor

    def unpack(self, tensor):
        self.unpacked += 1
        return tensor


def test_saved_tensor_hooks_around_a_model_see_what_they_saw_before(device):
    def run(offload):
        hooks = SavedTensorHooks()
        model = Chain().to(device)
        handle = nt.offload(model, **MIN) if offload else None
        return train(model, device, loss=chain_loss, around=hooks), hooks, handle

    plain, before, _ = run(offload=False)
    got, after, handle = run(offload=True)
    got.assert_same(plain)
    assert (after.packed, after.unpacked) == (before.packed, before.unpacked)
    assert handle.take_step_report().saved_tensors == 0


def test_saved_tensor_hooks_inside_a_unit_keep_their_part(device):
    class Hooked(torch.nn.Module):
        def __init__(self, inner, around):
            super().__init__()
            self.inner, self.around = inner, around

        def forward(self, x):
            with self.around():
                y = self.inner(x)
            return torch.sin(y)

    def run(offload, around):
        model = Chain().to(device)
        model.layers = torch.nn.ModuleList(Hooked(layer, around) for layer in model.layers)
        handle = nt.offload(model, **MIN) if offload else None
        return train(model, device, loss=chain_loss), handle

    before, after = SavedTensorHooks(), SavedTensorHooks()
    plain, _ = run(offload=False, around=before)
    got, handle = run(offload=True, around=after)
    got.assert_same(plain)
    assert (after.packed, after.unpacked) == (before.packed, before.unpacked)
    assert handle.take_step_report().saved_tensors == 3 * 4  # the input of each sin
    save_on_cpu = torch.autograd.graph.save_on_cpu
    run(offload=True, around=save_on_cpu)[0].assert_same(plain)


def test_module_hooks_and_tensor_hooks_run_as_before(device):
    def run(offload):
        events = []
        model = Chain().to(device)
        if offload:
            nt.offload(model, **MIN)
        for i, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(lambda *_, i=i: events.append(("pre", i)))
            layer.register_forward_hook(lambda *_, i=i: events.append(("post", i)))
            layer.register_full_backward_hook(lambda *_, i=i: events.append(("backward", i)))
            layer.weight.register_post_accumulate_grad_hook(lambda *_, i=i: events.append(("grad", i)))
            layer.register_forward_hook(
                lambda _m, _a, out, i=i: out.register_hook(lambda _g: events.append(("tensor", i))) and None
            )
        return train(model, device, loss=chain_loss), events

    plain, before = run(offload=False)
    got, after = run(offload=True)
    got.assert_same(plain)
    assert after == before


def test_python_functions_of_autograd_inside_a_unit(device):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * grad * x**2

    class Cubes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.9))

        def forward(self, x):
            return Cube.apply(x * self.scale)

    plain = train(Cubes().to(device), device, loss=chain_loss)
    model = Cubes().to(device)
    handle = nt.offload(model, **MIN)
    train(model, device, loss=chain_loss).assert_same(plain)
    assert handle.take_step_report().offloaded_storages == 3 * 6


def test_dispatch_modes_do_not_see_the_copies(device):
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    class Ops(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(offload):
        model = Chain().to(device)
        if offload:
            nt.offload(model, **MIN)
        ops = Ops()
        with ops:
            chain_loss(model, device, 0).backward()
        # Autograd detaches what it saves without hooks, and what it unpacks with hooks.
        return [name for name in ops.names if name != "aten.detach.default"]

    assert run(offload=True) == run(offload=False)


def test_functional_transforms(device):
    from torch.func import functional_call, grad, vmap  # noqa: PLC0415

    def gradients(model):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values, row):
            return functional_call(model, values, (row,)).square().sum()

        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(device)
        per_row = vmap(grad(loss), in_dims=(None, 0))(parameters, rows)
        return {name: value.cpu() for name, value in per_row.items()}

    plain = gradients(Chain().to(device))
    model = Chain().to(device)
    nt.offload(model, **MIN)
    Run([], [gradients(model)]).assert_same(Run([], [plain]))


def test_functional_transforms_inside_a_unit(device):
    class Slope(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + torch.func.grad(lambda y: y.sin().sum())(x)

    def run(offload):
        model = Chain().to(device)
        model.layers = torch.nn.ModuleList(Slope(layer) for layer in model.layers)
        if offload:
            nt.offload(model, **MIN)
        return train(model, device, loss=chain_loss)

    run(offload=True).assert_same(run(offload=False))


@pytest.mark.parametrize("compiled", ["a part of a unit", "the unit", "the model"])
def test_compiled_modules(compiled):
    def build(offload):
        model = Chain()
        if compiled == "a part of a unit":
            model.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.compile(layer, backend="aot_eager"), torch.nn.Tanh())
                for layer in model.layers
            )
        elif compiled == "the unit":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        handle = nt.offload(model, **MIN) if offload else None
        return (torch.compile(model, backend="aot_eager") if compiled == "the model" else model), handle

    torch._dynamo.reset()
    plain = train(build(offload=False)[0], "cpu", loss=chain_loss)
    torch._dynamo.reset()
    model, handle = build(offload=True)
    train(model, "cpu", loss=chain_loss).assert_same(plain)
    assert handle.take_step_report().offloaded_bytes > 0


# ---- copies


def test_copies_and_pickles_are_plain_models(device):
    model = llama().to(device)
    names, kind = list(model.state_dict()), type(model.model.layers[0])
    handle = nt.offload(model, **MIN)
    assert list(model.state_dict()) == names
    assert isinstance(model.model.layers[0], kind)
    assert type(model.model.layers[0]).__name__ == kind.__name__

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    plain = train(llama().to(device), device)
    for other in copies:
        assert type(other.model.layers[0]) is kind
        assert "_neaptide_unit" not in other.model.layers[0].__dict__
    handle.take_step_report()
    train(copies[0], device).assert_same(plain)
    assert handle.take_step_report().saved_tensors == 0
    train(model, device).assert_same(plain)
    assert handle.take_step_report().offloaded_bytes > 0

    restored = llama().to(device)
    restored.load_state_dict(model.state_dict())
    assert nt.offload(copies[1], **MIN).units == handle.units


def test_layers_of_classes_that_copy_themselves():
    """Parametrizations give a layer such a class; it copies the dict of the module."""
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    model = torch.nn.Sequential(*(weight_norm(torch.nn.Linear(8, 8)) for _ in range(2)))
    handle = nt.offload(model, **MIN)
    other = copy.deepcopy(model)
    x = torch.randn(4, 8)
    other(x).sum().backward()
    assert handle.take_step_report().saved_tensors == 0
    model(x).sum().backward()
    assert handle.take_step_report().offloaded_bytes > 0
    for ours, copied in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, copied.grad)
    assert nt.offload(other, **MIN).units == handle.units


def test_a_model_that_moves_after_the_call(sim):
    plain = train(Chain().to("sim"), "sim", loss=chain_loss)
    model = Chain()
    handle = nt.offload(model, **MIN)
    train(model, "cpu", loss=chain_loss, steps=1)
    torch.manual_seed(0)
    model.load_state_dict(Chain().state_dict())
    model.to("sim")
    handle.take_step_report()
    train(model, "sim", loss=chain_loss).assert_same(plain)
    assert handle.take_step_report().device_peak is not None
