"""Offload inside other people's trainers, and under the names that other libraries have for it."""

import copy
import gc
import logging
import subprocess
import sys

import pytest
import torch
from training import Chain, chain_loss, language_loss, llama, lora, tokens, train
from transformers import Trainer, TrainingArguments

import neaptide as nt
from neaptide.integrations import hyperparallel, veomni
from neaptide.integrations.transformers import OffloadCallback

MIN = {"min_bytes": 0, "keep_last": 0}
ACCUMULATED = {"gradient_accumulation_steps": 2}


def test_the_package_needs_none_of_the_libraries():
    code = """
import sys, neaptide
neaptide.offload
import neaptide.integrations.veomni, neaptide.integrations.hyperparallel
assert not {"transformers", "accelerate", "veomni", "hyper_parallel"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- transformers


@pytest.fixture
def fit(device, tmp_path, monkeypatch):
    """Trains a model with a Trainer on the device; three steps of two sequences, unless said otherwise."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)

    def run(model, callbacks=(), **arguments):
        common = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "seed": 1}
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
        data = [{"input_ids": row, "labels": row} for row in (tokens("cpu", i, batch=1)[0] for i in range(12))]
        trainer = Trainer(
            model=model,
            args=TrainingArguments(output_dir=tmp_path, **(common | quiet | arguments)),
            train_dataset=data,
            callbacks=list(callbacks),
        )
        trainer.train()
        assert next(model.parameters()).device.type == device
        return trainer

    return run


def losses(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_same_training(trainer, plain):
    assert len(losses(plain)) == 3
    assert losses(trainer) == losses(plain)
    parameters, expected = (dict(t.model.named_parameters()) for t in (trainer, plain))
    assert parameters.keys() == expected.keys()
    assert [name for name, value in parameters.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (llama, {}),
        (llama, ACCUMULATED),
        (llama, {"gradient_checkpointing": True}),
        (llama, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        (lora, {}),
        (lora, {"gradient_checkpointing": True} | ACCUMULATED),
    ],
    ids=["plain", "accumulation", "checkpointing", "reentrant", "lora", "lora, checkpointing, accumulation"],
)
def test_a_trainer_gets_the_same_numbers_with_the_callback(fit, make, arguments):
    plain = fit(make(), **arguments)
    callback = OffloadCallback(**MIN)
    assert_same_training(fit(make(), [callback], **arguments), plain)
    assert callback.offload is None


def test_the_logs_tell_what_offload_did(fit, device):
    trainer = fit(llama(), [OffloadCallback(**MIN)], logging_steps=2, max_steps=4, **ACCUMULATED)
    model = llama().to(device)
    handle = nt.offload(model, **MIN)
    batch = tokens(device)
    for _ in range(2):
        model(input_ids=batch, labels=batch).loss.backward()
    a_step = handle.take_step_report().offloaded_bytes / 2**20
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    for entry in entries:
        assert entry["offload_mib"] == pytest.approx(a_step)
        assert entry["offload_host_mib"] > 0
        assert entry["offload_wait_ms"] >= 0
        assert entry["offload_late_reloads"] >= 0
        assert ("offload_peak_mib" in entry) == (device == "sim")
    assert "offload_mib" not in trainer.state.log_history[-1]  # the summary of the training


def test_findings_go_to_the_logger_once(fit, caplog):
    """https://github.com/NVIDIA/Megatron-LM/pull/7090: a way around the chosen modules, without a word."""
    with caplog.at_level(logging.WARNING, "neaptide"):
        fit(llama(), [OffloadCallback(["model.norm", "lm_head"], min_bytes="1GiB")])
    said = [record.getMessage() for record in caplog.records if record.name == "neaptide"]
    assert [line.split(" saved nothing")[0] for line in said] == ["unit model.norm", "unit lm_head"]


def test_a_training_that_failed_can_be_repeated(fit):
    class FailingError(Exception):
        pass

    class Failing(torch.nn.Module):
        def forward(self, x):
            raise FailingError

    callback = OffloadCallback(**MIN)
    model = llama()
    norm, model.model.norm = model.model.norm, Failing()
    with pytest.raises(FailingError):
        fit(model, [callback])
    model.model.norm = norm
    assert_same_training(fit(model, [callback]), fit(llama()))
    assert not any("_neaptide_unit" in module.__dict__ for module in model.modules())


def test_mistakes_of_the_options_come_from_train(fit):
    with pytest.raises(nt.UserError, match=r"\[offload.prefetch\]"):
        fit(llama(), [OffloadCallback(prefetch="soon")])


# ---- VeOmni


@pytest.mark.parametrize("modules", [["model.layers.{*}"], [], None])
def test_veomnis_calls(device, modules):
    plain = train(llama().to(device), device)
    model = llama().to(device)
    veomni.apply_async_activation_offload(model, modules, host_cache_limit_bytes=1 << 20, **MIN)
    (offload,) = veomni._offloads[model]  # a weak reference
    assert offload().units == [f"model.layers.{i}" for i in range(4)]
    moved = []

    def loss_of(model, device, step):
        moved.append(offload().take_step_report().offloaded_bytes)
        veomni.reset_async_activation_offload(model)
        return language_loss(model, device, step)

    train(model, device, loss=loss_of).assert_same(plain)
    assert moved[0] == 0 < moved[1]
    veomni.reset_async_activation_offload(Chain())  # without offload there is nothing to do
    del model
    gc.collect()
    assert len(veomni._offloads) == 0


def test_veomnis_reset_after_a_step_that_failed(device):
    plain = train(llama().to(device), device)
    model = llama().to(device)
    veomni.apply_async_activation_offload(model, activation_offload_modules=["model.layers.{*}"], **MIN)
    (offload,) = veomni._offloads[model]
    loss = model(input_ids=tokens(device), labels=tokens(device)).loss  # its backward never runs
    veomni.reset_async_activation_offload(model)
    assert offload().take_step_report().saved_tensors == 0
    train(model, device).assert_same(plain)
    del loss


def test_veomnis_patterns_that_match_nothing_are_errors():
    with pytest.raises(nt.UserError, match=r"the nearest is 'model.layers'"):
        veomni.apply_async_activation_offload(llama(), ["model.layer.{*}"])


# ---- HyperParallel


@pytest.fixture
def swap_manager():
    manager = hyperparallel.SwapManager()
    manager.set_options(**MIN)
    yield manager
    gc.collect()
    manager.set_options()
    assert manager._swapped == []  # what was wrapped is gone, and not kept


def test_hyperparallels_calls(device, swap_manager):
    plain = train(llama().to(device), device)
    model = llama().to(device)
    names = list(model.state_dict())
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = hyperparallel.swap_wrapper(layer)
    for i in range(3):
        hyperparallel.SwapManager().set_forward_prefetch_layer(layers[i], layers[i + 1])
    assert hyperparallel.SwapManager() is swap_manager
    swap_manager.take_step_report()
    train(model, device).assert_same(plain)
    report = swap_manager.take_step_report()
    assert report.passes == 3
    assert report.offloaded_bytes > 0
    assert report.never_hit == []
    assert list(model.state_dict()) == names
    assert "_neaptide_unit" not in copy.deepcopy(model).model.layers[0].__dict__


def test_hyperparallels_policies_are_the_modules_own(device, swap_manager):
    plain = train(llama().to(device), device)
    asked = []

    def keep_large(tensor):
        asked.append(tensor.numel())
        policy = hyperparallel.CheckpointPolicy
        return policy.MUST_SAVE if tensor.numel() > 4096 else policy.MUST_SWAP

    model = llama().to(device)
    layers = model.model.layers
    layers[0].mlp = hyperparallel.swap_wrapper(layers[0].mlp, policy_fn=keep_large)
    layers[1].self_attn = hyperparallel.swap_wrapper(layers[1].self_attn)
    swap_manager.set_forward_prefetch_layer(layers[0], layers[1])
    train(model, device).assert_same(plain)
    report = swap_manager.take_step_report()
    assert max(asked) > 4096 >= min(asked)
    assert report.offloaded_bytes > 0
    assert report.kept_tensors >= sum(numel > 4096 for numel in asked)
    with pytest.raises(nt.UserError, match="in which nothing is"):
        swap_manager.set_forward_prefetch_layer(layers[0], layers[2])
    with pytest.raises(nt.UserError, match="expected policies as policy_fn"):
        swap_manager.set_options(policy=keep_large)
    hyperparallel.swap_wrapper(layers[0].mlp, lambda _: None)
    with pytest.raises(nt.UserError, match="expected MUST_SAVE or MUST_SWAP; found None"):
        train(model, device)


def test_hyperparallels_wrapper_takes_functions(device, swap_manager):
    def run(wrap):
        model = Chain().to(device)
        forward = wrap(lambda x: model.layers[1](model.layers[0](x)))

        def loss(_model, device, step):
            x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)).to(device)
            return model.layers[3](model.layers[2](forward(x))).square().mean()

        return train(model, device, loss=loss)

    swap_manager.take_step_report()
    run(hyperparallel.swap_wrapper).assert_same(run(lambda function: function))
    assert swap_manager.take_step_report().offloaded_bytes > 0
    with pytest.raises(nt.UserError, match="expected a module or a function; found 3"):
        hyperparallel.swap_wrapper(3)


def test_hyperparallels_models_die_one_by_one(device, swap_manager):
    first, second = Chain().to(device), Chain().to(device)
    plain = train(Chain().to(device), device, loss=chain_loss)
    for model in (first, second):
        for layer in model.layers:
            hyperparallel.swap_wrapper(layer)
    del first, layer, model
    gc.collect()
    hyperparallel.swap_wrapper(second.layers[0])
    train(second, device, loss=chain_loss).assert_same(plain)
    assert len(swap_manager._swapped) == 4
