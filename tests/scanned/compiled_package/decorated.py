import functools

import torch
import torch as t
import torch.compiler
from torch import compile
from torch import compile as fast

compiled = functools.partial(torch.compile, dynamic=True)
also_compiled = torch.compile(fullgraph=True)
maybe = torch.compile if t.cuda.is_available() else (lambda function: function)


# listed: torch.compile, decorator, decorated:bare
@torch.compile
def bare(x):
    return x


# listed: torch.compile, decorator, decorated:called
@torch.compile(
    dynamic=True,
    options={"max_autotune": True},
)
def called(x):
    return x


# listed: torch.compile, decorator, decorated:partial
@functools.partial(
    torch.compile,
    mode="max-autotune",
)
def partial(x):
    return x


# listed: torch.compile, decorator, decorated:alias_of_partial
@compiled
def alias_of_partial(x):
    return x


# listed: torch.compile, decorator, decorated:alias_of_call
@also_compiled
def alias_of_call(x):
    return x


# listed: torch.compile, decorator, decorated:imported
@compile
def imported(x):
    return x


# listed: torch.compile, decorator, decorated:renamed
@fast(dynamic=False)
def renamed(x):
    return x


# listed: torch.compile, decorator, decorated:module_renamed
@t.compile
def module_renamed(x):
    return x


# listed: torch.compile, decorator, decorated:conditional
@maybe
def conditional(x):
    return x


# listed: torch.compile, decorator, decorated:dynamo
@torch._dynamo.optimize("inductor")
def dynamo(x):
    return x


@torch.no_grad()
# listed: torch.compile, decorator, decorated:second_of_two
@torch.compiler.compile
def second_of_two(x):
    return x


class Module(torch.nn.Module):
    # listed: torch.compile, decorator, decorated:Module.method
    @torch.compile
    def method(self, x):
        return x

    @staticmethod
    # listed: torch.compile, decorator, decorated:Module.static
    @torch.compile(fullgraph=True)
    def static(x):
        return x


def outer():
    # listed: torch.compile, decorator, decorated:outer.<locals>.closure
    @torch.compile
    def closure(x):
        return x

    return closure
