import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, flag: bool):
        super().__init__()
        # listed: torch.compile, in place, in_place:Attention.forward
        self.forward = torch.compile(self.forward)
        if flag:
            # listed: torch.compile, in place, in_place:Attention._impl
            self._compiled = torch.compile(
                self._impl,
                dynamic=False,
            )

    def _impl(self, x):
        return x

    def forward(self, x):
        return x

    def speed_up(self):
        # listed: torch.compile, in place, self
        self.compile()


class Inherits(Attention):
    def again(self):
        # listed: torch.compile, in place, in_place:Inherits._impl
        self.call = torch.compile(self._impl)


def compile_layers(model):
    for layer in model.layers:
        # listed: torch.compile, in place, layer
        layer.compile(dynamic=True)
    # listed: torch.compile, in place, nn.Linear(2, 2)
    nn.Linear(2, 2).compile(mode="default")


def compile_model(network, **settings):
    # listed: torch.compile, lazy, network
    return torch.compile(network, **settings)


def build(config):
    model = nn.Linear(2, 2)
    # listed: torch.compile, lazy, model
    return compile_model(model, dynamic=config.dynamic)


def build_by_name():
    # listed: torch.compile, lazy, nn.Linear(2, 2)
    return compile_model(network=nn.Linear(2, 2))


def wrapped(**settings):
    def wrap(function):
        # listed: torch.compile, lazy, function
        return torch.compile(function, **settings)

    return wrap


# listed: torch.compile, decorator, in_place:by_factory
@wrapped(dynamic=True)
def by_factory(x):
    return x


# listed: torch.compile, decorator, in_place:by_wrapper
@compile_model
def by_wrapper(x):
    return x
