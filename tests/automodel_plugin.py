"""A pytest plugin that runs AutoModel's own tests with the op: docs/automodel.md.

On a CPU its tests build models with ``rms_norm="torch"``, that is nn.RMSNorm: the op is put there
as well, and what the plugin prints at the end says how often it was called.
"""

import os

import pytest
import torch
from automodel_rms_norm.integrations import automodel
from torch import Tensor, nn

_callers = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    automodel.enable()
    from nemo_automodel.components.models.common import utils

    norm = utils._float32_rms_norm_fwd
    callers = config.stash.setdefault(_callers, [])

    def noted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not torch.compiler.is_compiling():
            callers.append(os.environ["PYTEST_CURRENT_TEST"].split()[0])
        return norm(x, weight, eps)

    utils._float32_rms_norm_fwd = noted
    nn.RMSNorm.forward = utils.Float32RMSNorm.forward


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    callers = config.stash[_callers]
    terminalreporter.line(f"the op was called {len(callers)} times, by {len(set(callers))} tests")
