import functools

import torch
from torch.nn.attention.flex_attention import flex_attention

from . import decorated
from .sub.settings import USE_COMPILE, jit
from .sub.settings import jit as renamed_jit


def f(x):
    return x


def g(x):
    return x


def h(x):
    return x


# listed: torch.compile, call, called:f
compiled_f = torch.compile(f, dynamic=True)
# listed: torch.compile, call, called:g
compiled_g = getattr(torch, "compile")(model=g)
# listed: torch.compile, call, torch.nn.attention.flex_attention:flex_attention
compiled_flex = torch.compile(flex_attention)
# listed: torch.compile, call, called:h
twice = torch.compile(dynamic=True)(h)
# listed: torch.compile, call, called:f
later = functools.partial(torch.compile, f)
# listed: torch.compile, call, decorated:bare
by_alias = decorated.compiled(decorated.bare)
# listed: torch.compile, call, lambda x: x
anonymous = torch.compile(lambda x: x)
# listed: torch.compile, passed on, torch.compile
many = list(map(torch.compile, [f, g]))

if USE_COMPILE:
    # listed: torch.compile, lazy, called:f
    f = torch.compile(f)

# listed: torch.compile, lazy, called:h
h = torch.compile(h) if USE_COMPILE else h


class Holder:
    # listed: torch.compile, call, torch.nn.attention.flex_attention:flex_attention
    attention = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")


# listed: torch.compile, decorator, called:by_flag
@jit
def by_flag(x):
    return x


# listed: torch.compile, decorator, called:by_renamed_flag
@renamed_jit
def by_renamed_flag(x):
    return x
