"""What is left behind: nothing, step after step, and after whatever goes wrong."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref

import psutil
import pytest
import torch
from training import Chain, chain_loss, llama, train

import neaptide as nt

MIN = {"min_bytes": 0, "keep_last": 0}


def test_a_thousand_steps_grow_nothing(sim):
    """Device and host bytes, threads and file handles after 1,000 steps are those after 50."""
    model = llama(num_hidden_layers=2, vocab_size=100, hidden_size=32, intermediate_size=32).to("sim")
    handle = nt.offload(model, **MIN)
    process = psutil.Process()

    def state():
        gc.collect()
        sim.synchronize()
        host = handle.host_counters()
        return {
            "device": sim.memory_allocated(),
            "pinned": sim.pinned_memory_stats()["current"],
            "host in use": host.in_use,
            "slabs": host.slab_allocations,
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "tensors": sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
        }

    def steps(count):
        for step in range(count):
            batch = torch.full((1, 4), step % 100, device="sim")
            model(input_ids=batch, labels=batch).loss.backward()
            model.zero_grad()
            handle.take_step_report()

    steps(50)
    before, resident = state(), process.memory_info().rss
    steps(950)
    assert state() == before
    assert process.memory_info().rss - resident < 8 << 20
    assert before["host in use"] == 0


def test_graphs_that_are_dropped_leave_nothing(sim):
    model = Chain().to("sim")
    handle = nt.offload(model, **MIN)
    for step in range(3):
        loss = chain_loss(model, "sim", step)
        assert handle.host_counters().requested > 0
        del loss
        sim.synchronize()
        assert handle.host_counters().requested == 0


def test_forward_without_gradients_leaves_no_trace(device):
    model = Chain().to(device)
    handle = nt.offload(model, **MIN)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            chain_loss(model, device, 0)
    assert handle.take_step_report().saved_tensors == 0


class Failing(torch.nn.Module):
    """Raises in forward or backward when told to."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ctx.module.fail("backward")
            return grad, None

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.when, self.error = None, None

    def fail(self, where):
        if self.when == where:
            raise self.error

    def forward(self, x):
        y = self.inner(x)
        self.fail("forward")
        return self.Function.apply(y, self)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_after_an_exception_the_next_steps_are_those_of_a_fresh_model(device, where, kind):
    """https://github.com/ByteDance-Seed/VeOmni/pull/965: the items of the step that failed stayed."""
    plain = train(Chain().to(device), device, loss=chain_loss)
    model = Chain().to(device)
    model.layers = torch.nn.ModuleList(Failing(layer) for layer in model.layers)
    handle = nt.offload(model, ["layers.*"], **MIN)
    failing = model.layers[2]
    failing.when, failing.error = where, kind("mine")
    with pytest.raises(kind) as caught:
        chain_loss(model, device, 0).backward()
    assert caught.value is failing.error
    del caught  # and with it the frames that it came through
    failing.when = failing.error = None
    model.zero_grad()
    gc.collect()
    assert handle.host_counters().requested == 0
    got = train(model, device, loss=chain_loss)
    got.gradients = [{name.replace(".inner", ""): g for name, g in step.items()} for step in got.gradients]
    got.assert_same(plain)


@contextlib.contextmanager
def interruptible():
    """As at a terminal: what runs in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_middle_of_a_forward_leaves_the_process_usable(device):
    class Interrupted(torch.nn.Module):
        count = 0

        def forward(self, x):
            y = x.sin()
            Interrupted.count += 1
            if Interrupted.count == 3:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    y = y.sin()
            return y

    model = torch.nn.Sequential(*(Interrupted() for _ in range(4)))
    handle = nt.offload(model, **MIN)
    x = torch.randn(64, device=device, requires_grad=True)
    with interruptible(), pytest.raises(KeyboardInterrupt):
        model(x)
    gc.collect()
    assert handle.host_counters().requested == 0
    model(x).sum().backward()
    expected = torch.autograd.grad(x.sin().sin().sin().sin().sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_out_of_device_memory_is_torchs_error_and_can_be_survived(sim):
    model = Chain(side=512).to("sim")
    nt.offload(model, **MIN)
    x = torch.randn(64, 512, device="sim")
    free = sim.mem_get_info()[0]
    with pytest.raises(torch.OutOfMemoryError, match="GiB"):
        model(torch.empty(free // 2048, 512, device="sim")).sum().backward()
    model(x).sum().backward()
    model.zero_grad()


def test_threads_train_side_by_side(device):
    """Two models in two threads, and one model in two threads: no lock of ours and Python's wait for each other."""
    plain = train(Chain().to(device), device, loss=chain_loss)
    start = Chain().state_dict()  # the generator that it is drawn from is everybody's
    shared = Chain().to(device)
    nt.offload(shared, **MIN)
    failures = []

    def own():
        try:
            model = Chain().to(device)
            nt.offload(model, **MIN)
            for _ in range(5):
                model.load_state_dict(start)
                train(model, device, loss=chain_loss).assert_same(plain)
        except BaseException as error:
            failures.append(error)

    def together():
        try:
            for step in range(30):
                loss = chain_loss(shared, device, step)
                storages = [p.untyped_storage() for p in shared.parameters()]  # Python objects over what is moved
                torch.autograd.grad(loss, list(shared.parameters()))
                del storages, loss
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=target, daemon=True) for target in (own, own, together, together)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "deadlock"
    assert failures == []


def test_a_scope_belongs_to_its_thread_and_may_be_entered_again(device):
    model = Chain().to(device)
    scope = nt.offload_scope(model, **MIN)
    plain = train(Chain().to(device), device, loss=chain_loss)

    def nested():
        stack = contextlib.ExitStack()
        stack.enter_context(scope)
        stack.enter_context(scope)
        return stack

    train(model, device, loss=chain_loss, around=nested).assert_same(plain)
    scope.take_step_report()
    lock = threading.Barrier(2)

    def other():
        lock.wait()
        chain_loss(model, device, 0)
        lock.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with scope:
        lock.wait()
        lock.wait()
    thread.join()
    assert scope.take_step_report().saved_tensors == 0


def test_a_scope_that_another_thread_ends_is_an_error_and_harmless(caplog):
    """As when the garbage collector, or a caller, ends a generator on another thread than the one it ran on."""
    weight = torch.randn(64, 64, requires_grad=True)

    def enter():
        with nt.offload_scope(**MIN):
            yield

    def work():
        running.append(enter())
        next(running[0])
        turns.wait()
        turns.wait()
        results.append(torch.autograd.grad((weight @ weight).sum(), weight)[0])

    turns, running, results = threading.Barrier(2), [], []
    thread = threading.Thread(target=work)
    thread.start()
    turns.wait()
    with pytest.raises(nt.UserError, match="expected a scope to be left on the thread that entered it"):
        running.pop().close()
    gc.collect()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    turns.wait()
    thread.join()
    assert torch.equal(results[0], torch.autograd.grad((weight @ weight).sum(), weight)[0])


def test_backward_inside_a_scope(device):
    """What a reentrant checkpoint saves when backward runs it again is needed at once, and stays."""
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415

    model = Chain().to(device)
    scope = nt.offload_scope(model, **MIN)
    x = torch.randn(32, 32, device=device, requires_grad=True)
    with scope:
        checkpoint(model, x, use_reentrant=True).sum().backward()
    report = scope.take_step_report()
    assert report.saved_tensors == 1  # the input of the checkpoint
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(x.grad, expected)
    x.grad = None
    model.zero_grad()


def test_the_interpreter_ends_quietly(tmp_path):
    """Graphs, engines and an open scope that live until the end of the process, and of one that was forked off."""
    script = tmp_path / "end.py"
    script.write_text(
        "import os, torch, neaptide as nt, neaptide.sim\n"
        "model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh()).to('sim')\n"
        "handle = nt.offload(model, min_bytes=0, keep_last=0, policy=lambda *_: 'offload')\n"
        "loss = model(torch.randn(64, device='sim', requires_grad=True)).sum()\n"
        "loss.backward(retain_graph=True)\n"
        "scope = nt.offload_scope().__enter__()\n"
        "saved = torch.randn(64, requires_grad=True).sin()\n"
        "torch.sim.synchronize()\n"
        "child = os.fork()\n"
        "assert child == 0 or os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_messages_go_to_pythons_log(caplog):
    model = Chain(side=512)
    nt.offload(model, **MIN, host_limit="1MiB")
    with caplog.at_level("WARNING", logger="neaptide"):
        model(torch.randn(512, 512)).sum().backward()
    assert [record.name for record in caplog.records] == ["neaptide"]
    assert "[offload.host_limit] no host memory for another" in caplog.text


def test_a_log_handler_may_ask_the_engine_and_collect_graphs():
    """It runs in the middle of a forward, for a message of the engine's."""
    model = Chain()
    handle = nt.offload(model, **MIN, host_limit=5 * 4096)
    graph = [chain_loss(model, "cpu", 0)]
    assert handle.host_counters().requested == 5 * 4096
    asked = []

    class Handler(logging.Handler):
        def emit(self, record):
            graph.clear()
            asked.append((record.levelname, handle.host_counters().requested))

    handler = Handler()
    logging.getLogger("neaptide").addHandler(handler)
    try:
        chain_loss(model, "cpu", 0).backward()
    finally:
        logging.getLogger("neaptide").removeHandler(handler)
    assert asked == [("WARNING", 0)]


def test_a_finalizer_of_memory_that_leaves_may_drop_graphs(sim):
    model = Chain().to("sim")
    handle = nt.offload(model, **MIN, max_in_flight=12 * 4096)
    graph = [chain_loss(model, "sim", 0)]
    x = torch.randn(32, 32, device="sim")
    weakref.finalize(x.untyped_storage(), graph.clear)
    y = model(x)
    del x  # the engine alone has its memory, until the next forward needs the room
    assert graph
    chain_loss(model, "sim", 0)
    assert graph == []
    y.sum().backward()
    model.zero_grad()
    del y
    assert handle.host_counters().requested == 0
