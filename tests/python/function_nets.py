"""Nets on the simulated device whose layers are any function of some weights and an input."""

import torch

import neaptide as nt

ROWS, SIDE, DEPTH = 512, 256, 3
ONE = ROWS * SIDE * 4  # bytes of a layer's input


class Layer(torch.nn.Module):
    def __init__(self, function, weights):
        super().__init__()
        self.function = function
        self.w = torch.nn.ParameterList(torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(weights))

    def forward(self, x):
        return self.function(self.w, x)


class Net(torch.nn.Module):
    def __init__(self, function, weights):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(function, weights) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mlp(w, x):
    return torch.tanh(x @ w[0]) @ w[1]


def nets(function, weights, **options):
    """A net, and the same with offload: (plain, ours, its handle)."""
    plain, ours = (Net(function, weights).to("sim") for _ in range(2))
    return plain, ours, nt.offload(ours, **{"min_bytes": 0, "keep_last": 0, "max_in_flight": 0, **options})


def rows(seed, count=ROWS):
    return torch.randn(count, SIDE, generator=torch.Generator().manual_seed(seed)).to("sim")


def loss_of(net, seed, count=ROWS):
    return net(rows(seed, count)).square().sum()


def assert_same_gradients(ours, plain):
    """And takes them away."""
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.cpu(), other.grad.cpu())
        mine.grad = other.grad = None
