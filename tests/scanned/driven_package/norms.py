import os
import signal
import time

import torch

# aot_eager traces as Inductor does, and is quick.


@torch.compile(dynamic=True, backend="aot_eager")
def good(x, weight, eps):
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def by_grad_mode(hidden_states, weight, variance_epsilon):
    """Another result under no_grad: what a scan is for."""
    eps = variance_epsilon + (0.0 if torch.is_grad_enabled() else 0.5)
    return good(hidden_states, weight, eps)


compiled = torch.compile(by_grad_mode, backend="aot_eager")


@torch.compile
def crashes(x, weight, eps):
    os.kill(os.getpid(), signal.SIGABRT)
    return x


@torch.compile
def waits(x):
    time.sleep(3600)
    return x


@torch.compile(backend="aot_eager")
def needs_a_recipe(x, gate):
    return torch.nn.functional.silu(gate) * x


@torch.compile(backend="aot_eager")
def of_float32(x, gate):
    return gate * x


@torch.compile
def other_arguments(x, other):
    return x


@torch.compile
def not_a_norm(x, y):
    return x


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.distributed.all_reduce(x)
        return x


class Layer(torch.nn.Module):
    @torch.compile
    def method(self, x):
        return x
