"""What is chosen, what is refused and in which words, and how offload ends."""

import ast
import gc
import importlib
import weakref
from pathlib import Path

import pytest
import torch
from training import Chain, chain_loss, deepseek_v3, llama, train

import neaptide as nt


def test_without_a_choice_the_layers_are_units():
    model = llama()
    assert nt.offload(model).units == [f"model.layers.{i}" for i in range(4)]
    # A model that does not say what its layers are has a list of modules.
    assert nt.offload(Chain()).units == [f"layers.{i}" for i in range(4)]
    # The experts of a layer are a list too, and no layers.
    assert nt.offload(deepseek_v3()).units == [f"model.layers.{i}" for i in range(4)]


def test_layers_that_the_model_names_win_over_lists_that_are_nearer():
    class Model(torch.nn.Module):
        _no_split_modules = ("Chain",)

        def __init__(self):
            super().__init__()
            self.heads = torch.nn.ModuleList(torch.nn.Tanh() for _ in range(6))
            self.body = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(Chain(2) for _ in range(3))})

    blocks = ["body.blocks.0", "body.blocks.1", "body.blocks.2"]
    assert nt.offload(Model()).units == blocks
    assert nt.offload(Model(), ["1-2"]).units == blocks[1:]
    Model._no_split_modules = ()
    assert len(nt.offload(Model()).units) == 6


# https://github.com/ByteDance-Seed/VeOmni/pull/965: `model.layers.*` took modules inside of layers, too.
@pytest.mark.parametrize(
    ("modules", "units"),
    [
        (["model.layers.{*}"], [0, 1, 2, 3]),
        ("model.layers.*", [0, 1, 2, 3]),
        (["0-1", 3], [0, 1, 3]),
        (["3-2", "model.layers.2"], [2, 3]),
    ],
)
def test_patterns_and_indices(modules, units):
    assert nt.offload(llama(), modules).units == [f"model.layers.{i}" for i in units]


def test_text_after_braces_belongs_to_the_pattern():
    assert nt.offload(llama(), ["model.layers.{*}.mlp"]).units == [f"model.layers.{i}.mlp" for i in range(4)]


@pytest.mark.parametrize(
    ("modules", "options", "text"),
    [
        (["model.layer.{*}"], {}, "expected a module named 'model.layer'; found none; the nearest is 'model.layers'"),
        (["model.layers.9"], {}, "matches no module; the nearest is 'model.layers.0'"),
        (["model.layers"], {}, "'model.layers', which has no hook point and cannot be a unit"),
        (["4"], {}, "[offload.layers] expected indices from 0 to 3; found '4'"),
        ([""], {}, "found an empty text"),
        ([], {"mode": "fast"}, "[offload.mode] expected async, sync or off; found 'fast'"),
        ([], {"min_bytes": -1}, "offload.min_bytes"),
        ([], {"min_bytes": 1.5}, "[offload.min_bytes] expected a number of bytes, or a text such as 64MiB; found 1.5"),
        (
            [],
            {"min_bytes": True},
            "[offload.min_bytes] expected a number of bytes, or a text such as 64MiB; found True",
        ),
        ([], {"host_limit": "1 parsec"}, "offload.host_limit"),
        ([], {"device_limit": "much"}, "offload.device_limit"),
        ([], {"prefetch": 4}, "[offload.prefetch] expected fewer layers than there are units, 0 to 3; found 4"),
        ([], {"prefetch": float("nan")}, "[offload.prefetch] expected automatic"),
        ([], {"keep_last": -1}, "[offload.keep_last] expected a number of units, 0 or more; found -1"),
        ([], {"keep_last": 5}, "[offload.keep_last] expected 0 to 4, the number of units; found 5"),
        ([], {"pin": "yes"}, "[offload.pin] expected True or False; found 'yes'"),
        ([], {"policy": "keep"}, "[offload.policy] expected a function"),
        ([], {"budget": 0}, "expected one of the options mode, prefetch"),
    ],
)
def test_mistakes_are_value_errors_that_leave_the_model_alone(modules, options, text):
    model = llama()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(nt.UserError) as caught:
        nt.offload(model, modules, **options)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, nt.Error)
    assert [type(module) for module in model.modules()] == kinds


def test_a_model_without_layers_needs_names():
    with pytest.raises(nt.UserError, match="expected a model with a list of layers"):
        nt.offload(torch.nn.Linear(2, 2))


def test_out_of_memory_is_torchs_own():
    assert issubclass(nt.OutOfMemory, torch.OutOfMemoryError)
    assert issubclass(nt.InternalError, RuntimeError)


def test_an_argument_that_has_any_attribute_is_no_dataclass():
    class Settings:
        def __getattr__(self, name):
            return None

    class Layer(torch.nn.Module):
        def forward(self, x, settings):
            return x.sin()

    layer = Layer()
    nt.offload(torch.nn.ModuleList([layer]))
    layer(torch.ones(2), Settings())


def test_host_limits_may_be_larger_than_any_memory():
    model = Chain()
    handle = nt.offload(model, min_bytes=0, host_limit=2**62, host_cache_limit=2**62)
    chain_loss(model, "cpu", 0).backward()
    assert handle.take_step_report().offloaded_storages > 0


def test_a_module_under_two_names_is_one_unit():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Chain(1) for _ in range(2))
            self.layers.append(self.layers[0])

    assert nt.offload(Shared(), ["layers.{*}"]).units == ["layers.0", "layers.1"]


def test_the_policy_decides_and_its_errors_arrive_as_they_are():
    asked = []

    def keep_outputs(tensor, unit, op):
        asked.append((tuple(tensor.shape), unit, op))
        return "keep" if op == "aten::tanh" else "offload"

    model = Chain()
    handle = nt.offload(model, min_bytes=0, keep_last=0, policy=keep_outputs)
    plain = train(Chain(), "cpu", loss=chain_loss)
    train(model, "cpu", loss=chain_loss).assert_same(plain)
    assert {unit for _, unit, _ in asked} == {f"layers.{i}" for i in range(4)}
    assert {op for *_, op in asked} == {"aten::mm", "aten::tanh"}
    report = handle.take_step_report()
    assert report.kept_tensors >= 3 * 4
    assert report.offloaded_storages == 3 * 4
    handle.remove()

    class RefusedError(Exception):
        pass

    def refuse(*_):
        raise RefusedError("no")

    with nt.offload(model, min_bytes=0, policy=refuse), pytest.raises(RefusedError):
        chain_loss(model, "cpu", 0)
    with (
        nt.offload(model, min_bytes=0, policy=lambda *_: "perhaps"),
        pytest.raises(nt.UserError, match="'keep' or 'offload'; found 'perhaps'"),
    ):
        chain_loss(model, "cpu", 0)


def test_a_saved_tensor_that_was_changed_in_place_is_found():
    class Changing(torch.nn.Module):
        def forward(self, x):
            y = x.exp()
            z = y.sin()
            y.add_(1)
            return z

    model = torch.nn.Sequential(Changing())
    x = torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError) as plain:
        model(x).sum().backward()
    nt.offload(model, min_bytes=0, keep_last=0)
    with pytest.raises(RuntimeError) as offloaded:
        model(x).sum().backward()
    for part in ("modified by an inplace operation", "[8]", "is at version 1; expected version 0"):
        assert part in str(plain.value)
        assert part in str(offloaded.value)


# ---- the end of it


def test_remove_gives_the_modules_back_and_backward_can_still_run():
    model = Chain()
    kind = type(model.layers[0])
    plain = train(Chain(), "cpu", loss=chain_loss, steps=1)
    handle = nt.offload(model, min_bytes=0, keep_last=0)
    assert type(model.layers[0]) is not kind
    loss = chain_loss(model, "cpu", 0)
    handle.remove()
    handle.remove()
    assert handle.units == []
    assert type(model.layers[0]) is kind
    assert "_neaptide_unit" not in model.layers[0].__dict__
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(torch.equal(gradients[name], value) for name, value in plain.gradients[0].items())


def test_what_runs_after_the_layers_is_watched_as_long_as_they_are():
    model = llama()
    kinds = {name: type(module) for name, module in model.named_modules()}
    handle = nt.offload(model)
    changed = [name for name, module in model.named_modules() if type(module) is not kinds[name]]
    assert changed == [*(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]  # not `rotary_emb`
    assert handle.units == changed[:4]
    assert type(model.lm_head).__name__ == "Linear"
    handle.remove()
    assert {name: type(module) for name, module in model.named_modules()} == kinds


def test_two_handles_on_one_model_share_its_modules():
    model = Chain()
    first = nt.offload(model, ["0-1"], min_bytes=0, keep_last=0)
    second = nt.offload(model, ["1-3"], min_bytes=0, keep_last=0)
    plain = train(Chain(), "cpu", loss=chain_loss)
    train(model, "cpu", loss=chain_loss).assert_same(plain)
    assert first.take_step_report().offloaded_bytes > 0
    assert second.take_step_report().offloaded_bytes > 0
    first.remove()
    assert second.units == ["layers.1", "layers.2", "layers.3"]
    chain_loss(model, "cpu", 0).backward()
    assert first.take_step_report().saved_tensors == 0
    assert second.take_step_report().offloaded_bytes > 0


def test_the_model_keeps_its_offload_and_takes_it_along():
    model = Chain()
    handle = weakref.ref(nt.offload(model, min_bytes=0))
    gc.collect()
    assert handle() is not None
    del model
    gc.collect()
    assert handle() is None


def test_classes_in_front_of_ours_stay():
    model = Chain()
    handle = nt.offload(model, min_bytes=0)
    layer = model.layers[0]
    layer.__class__ = type("Front", (type(layer),), {})  # as torch's fully_shard does
    handle.remove()
    assert type(layer).__name__ == "Front"
    plain = train(Chain(), "cpu", loss=chain_loss)
    train(model, "cpu", loss=chain_loss).assert_same(plain)


def test_the_report_reads_like_the_librarys():
    model = Chain()
    handle = nt.offload(model, min_bytes=0, keep_last=0)
    train(model, "cpu", loss=chain_loss, steps=1)
    report = handle.take_step_report()
    assert str(report).startswith("offload: ")
    assert report.ratio == pytest.approx(report.measured_drop / report.planned_drop)
    assert report.device_peak is None
    assert handle.host_counters().acquires == report.offloaded_storages


def test_the_stubs_name_what_is_there():
    extension = importlib.import_module("neaptide._C")

    def members(body):
        for node in body:
            if isinstance(node, ast.AnnAssign):
                yield node.target.id
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                yield node.name

    def public(thing):
        return {name for name in vars(thing) if not name.startswith("_")}

    tree = ast.parse((Path(nt.__file__).parent / "_C.pyi").read_text())
    classes = {
        node.name: set(members(node.body)) - {"__init__"} for node in tree.body if isinstance(node, ast.ClassDef)
    }
    assert set(members(tree.body)) - {"_Sim"} == public(extension)
    assert classes.pop("_Sim") == public(extension.sim)
    for name, declared in classes.items():
        own = getattr(extension, name)
        assert declared == (set() if issubclass(own, Exception) else public(own)), name
