"""The simulated device from Python: a module like torch.cuda, on which other people's stream code runs."""

import os
import subprocess
import sys

import pytest
import torch

import neaptide as nt


def test_the_module_is_torch_sim(sim):
    assert torch.sim is sim
    assert torch.get_device_module("sim") is sim
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.is_available()
    assert sim.is_available()
    assert sim.device_count() == torch.accelerator.device_count() == 1
    assert sim.current_device() == 0
    assert torch.zeros(2).sim().device == torch.device("sim", 0)
    assert torch.zeros(2, device="sim").is_sim
    assert torch.nn.Linear(2, 2).sim().weight.is_sim
    with pytest.raises(ValueError, match="expected a sim device; found cpu"):
        sim.memory_allocated("cpu")


def test_memory_is_counted_and_limited(sim):
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert sim.memory_allocated() - before == 1 << 20
    del tensor
    assert sim.memory_allocated() == before
    assert sim.max_memory_allocated() - before == 1 << 20
    assert sim.memory_stats()["current"] == before
    free, total = sim.mem_get_info()
    assert total - free == before
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="sim")


def test_streams_and_events_as_in_torch_cuda(sim):
    side = sim.Stream()
    start, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    source = torch.randn(1 << 18, device="sim")
    target = torch.empty(1 << 18, pin_memory=True)
    assert target.is_pinned()
    assert isinstance(side, sim.Stream)
    assert isinstance(sim.current_stream(), sim.Stream)
    assert isinstance(start, sim.Event)
    assert not isinstance(torch.Event("cpu"), sim.Event)
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        assert sim.current_stream() == side
        start.record()
        target.copy_(source, non_blocking=True)
        source.record_stream(side)
        end.record()
    assert sim.current_stream() == sim.default_stream()
    sim.current_stream().wait_event(end)
    end.synchronize()
    assert end.query()
    # A megabyte at 25 GB/s and the latency of a copy.
    assert start.elapsed_time(end) == pytest.approx((1 << 20) / 25e9 * 1e3, rel=0.3)
    assert torch.equal(target, source.cpu())
    with sim.stream(None):
        pass
    sim.synchronize()


def test_counters_tell_what_moved(sim):
    sim.synchronize()
    sim.reset_counters()
    torch.randn(1024).to("sim").cpu()
    counters = sim.counters()
    assert counters["h2d"]["bytes"] == counters["d2h"]["bytes"] == 4096
    assert sim.host_time_ns() > 0


def test_random_numbers(sim):
    torch.manual_seed(5)
    first = torch.randn(8, device="sim")
    state = sim.get_rng_state()
    second = torch.randn(8, device="sim")
    sim.set_rng_state(state)
    assert torch.equal(torch.randn(8, device="sim"), second)
    sim.manual_seed_all(5)
    assert torch.equal(torch.randn(8, device="sim"), first)
    assert sim.initial_seed() == 5
    sim.set_rng_state_all(sim.get_rng_state_all())
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.randn(8, device="sim")
    assert torch.equal(torch.randn(8, device="sim"), second)


def test_autocast_and_gradient_scaling(sim):
    assert torch.bfloat16 in sim.get_amp_supported_dtype()
    linear = torch.nn.Linear(8, 8).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert linear(torch.randn(4, 8, device="sim")).dtype == torch.bfloat16
        with torch.autocast("sim", enabled=False):
            assert linear(torch.randn(4, 8, device="sim")).dtype == torch.float32


def test_hazards_are_found(sim):
    source = torch.randn(1 << 16, device="sim")
    target = torch.empty(1 << 16, pin_memory=True)
    with sim.stream(sim.Stream()):
        target.copy_(source, non_blocking=True)  # nothing orders this behind the work that made the source
    sim.synchronize()
    hazards = sim.take_hazards()
    assert len(hazards) == 1
    assert "copy" in hazards[0]


def test_settings_are_checked(sim):
    with pytest.raises(nt.UserError, match=r"neaptide.sim.*capacity.*found '1 parsec'"):
        sim.configure(capacity="1 parsec")
    with pytest.raises(nt.UserError, match="colour"):
        sim.configure(colour="red")
    with pytest.raises(nt.UserError, match=r"NEAP_SIM=count=2, before neaptide\.sim is imported"):
        sim.configure(count=2)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | environment,
    )


def test_several_devices(sim):
    done = run(
        "import torch, neaptide.sim as sim\n"
        "assert sim.device_count() == torch.accelerator.device_count() == 3\n"
        "with sim.device(2):\n"
        "    assert torch.empty(1, device='sim').device.index == sim.current_device() == 2\n"
        "assert sim.current_device() == 0\n"
        "x = torch.ones(4, device='sim:1')\n"
        "with sim.device_of(x):\n"
        "    assert sim.current_device() == 1\n"
        "assert sim.memory_allocated(1) == 512 and sim.memory_allocated('sim:0') == 0\n"
        "assert x.to('sim:2').device.index == 2\n"
        "sim.set_device('sim:1')\n"
        "assert sim.current_device() == 1\n"
        "assert sim.mem_get_info(1)[1] == 64 << 20\n",
        NEAP_SIM="count=3,capacity=64MiB",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_device_has_to_come_before_the_first_backward():
    done = run(
        "import torch, neaptide as nt\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "try:\n"
        "    import neaptide.sim\n"
        "except nt.UserError as error:\n"
        "    print(error)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "expected to be imported before the first backward pass of the process" in done.stdout
    assert "found that 1 have run; import neaptide.sim first" in done.stdout


def test_neaptide_alone_registers_no_device():
    done = run("import torch, neaptide; assert not torch.accelerator.is_available(); assert not hasattr(torch, 'sim')")
    assert (done.returncode, done.stderr) == (0, "")
