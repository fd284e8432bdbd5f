import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def sim_device():
    """Registers the simulated device before any backward pass. Not at import: the tests of other folders that are
    collected together with these are to have no accelerator."""
    import neaptide.sim  # noqa: PLC0415

    neaptide.sim.configure(capacity="1GiB", hazard_check=True, clock="virtual", d2h="25GB/s", h2d="25GB/s")
    return neaptide.sim


@pytest.fixture
def sim(sim_device):
    """The device, at its baseline, which the test must leave as it was, without a hazard."""
    gc.collect()
    sim_device.synchronize()
    sim_device.take_hazards()
    before = sim_device.memory_allocated()
    yield sim_device
    gc.collect()
    sim_device.synchronize()
    assert sim_device.take_hazards() == []
    assert sim_device.memory_allocated() == before


@pytest.fixture(params=["cpu", "sim"])
def device(request):
    if request.param == "sim":
        request.getfixturevalue("sim")
    return request.param
