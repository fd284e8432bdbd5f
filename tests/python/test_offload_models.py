"""Models of Hugging Face train to the same bits with offload and without, on the simulated device and on the CPU."""

import pytest
import torch
from training import deepseek_v3, llama, qwen3, train

import neaptide as nt

MODELS = {"llama": llama, "qwen3": qwen3, "deepseek_v3": deepseek_v3}


@pytest.fixture(scope="module", params=MODELS)
def make(request):
    return MODELS[request.param]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_losses_and_gradients_are_those_without_offload(device, make, mode):
    """Among what comes into every layer are the same two rotary tables, as in
    https://gitcode.com/mindspore/hyper-parallel/issues, number 664."""
    plain = train(make().to(device), device)
    model = make().to(device)
    offload = nt.offload(model, min_bytes=0, mode=mode, keep_last=1, prefetch=1, max_in_flight=0)
    assert offload.units == [f"model.layers.{i}" for i in range(4)]
    train(model, device).assert_same(plain)
    report = offload.take_step_report()
    assert report.passes == 3
    assert report.offloaded_bytes > 0
    assert report.reloaded_bytes > 0
    assert report.never_hit == []


def test_a_scope_around_the_model_gives_the_same_bits(device, make):
    plain = train(make().to(device), device)
    model = make().to(device)
    scope = nt.offload_scope(model, min_bytes=0, keep_last=0, max_in_flight=0)
    train(model, device, around=lambda: scope).assert_same(plain)
    assert scope.take_step_report().offloaded_bytes > 0


def test_training_on_the_device_gives_the_bits_of_the_cpu(sim, make):
    train(make().to("sim"), "sim").assert_same(train(make(), "cpu"))


def test_the_peak_is_lower_with_offload(sim):
    def peak(model):
        train(model, "sim")  # allocator, optimizer and engine settle
        sim.reset_peak_memory_stats()
        before = sim.memory_allocated()
        batch = torch.zeros(4, 64, dtype=torch.long, device="sim")
        model(input_ids=batch, labels=batch).loss.backward()
        return sim.max_memory_allocated() - before

    plain = peak(llama(num_hidden_layers=12).to("sim"))
    model = llama(num_hidden_layers=12).to("sim")
    nt.offload(model, min_bytes=0, prefetch=1, max_in_flight=0)
    assert peak(model) < 0.6 * plain
