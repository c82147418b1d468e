from functools import lru_cache

import torch

from compiled_package.called import g

_CACHED = [None]
_compiled_core = None


def _core(x):
    return x


def _other(x):
    return x


@lru_cache(maxsize=1)
def cached():
    # listed: torch.compile, lazy, lazy:_core
    return torch.compile(_core, fullgraph=True)


def first_use():
    global _compiled_core
    if _compiled_core is None:
        # listed: torch.compile, lazy, lazy:_core
        _compiled_core = torch.compile(_core)
    return _compiled_core


def in_a_list():
    if _CACHED[0] is None:
        from compiled_package.decorated import called as late

        # listed: torch.compile, lazy, decorated:called
        _CACHED[0] = torch.compile(late)
    return _CACHED[0]


def replaced():
    global _other
    # listed: torch.compile, lazy, lazy:_other
    _other = torch.compile(_other, dynamic=True)


def imported():
    # listed: torch.compile, lazy, called:g
    return torch.compile(g)


class Loss:
    def __init__(self, compile: bool):
        self.compile = compile
        # listed: torch.compile, lazy, lazy:_core
        self.loss = torch.compile(_core) if compile else _core
