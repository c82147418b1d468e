"""The first loss of TRL's DPOTrainer, the policy in grad mode, the reference under no_grad."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from automodel_rms_norm.gate.dpo.model import (
    byte_tokenizer,
    make_model,
    norm_compiles_itself,
    preferences,
)
from automodel_rms_norm.gate.inductor import Forced, forced_choice, recorded, why_not_forced
from automodel_rms_norm.gate.recipe import Recipe

__all__ = ["BAND", "Run", "Setting", "runs", "why_no_trainer"]

BAND = 0.69314, 0.69316  # what downstream accepts of a first loss


def why_no_trainer() -> str:
    """What to install; "" where there is a trainer."""
    try:
        getattr(import_module("trl"), "DPOTrainer")  # noqa: B009 - its imports are lazy
    except Exception as error:  # its imports are many, and run anybody's code
        lines = str(error).strip().splitlines() or [""]
        return f"trl cannot be used here ({lines[0]}); pip install 'automodel-rms-norm[dpo]'"
    return ""


@dataclass(frozen=True)
class Setting:
    """A target, the device, and the size of the model and of its sequences."""

    target: Recipe
    device: str
    hidden: int
    layers: int
    length: int


@dataclass(frozen=True)
class Run:
    """The first loss in one circumstance. ``candidates`` is the most that a kernel was tuned over,
    1 where none was."""

    circumstance: str
    loss: float
    exact: bool
    candidates: int = field(default=1, repr=False)

    @property
    def in_band(self) -> bool:
        return BAND[0] < self.loss < BAND[1]


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without progress bars and what TRL and transformers tell each other of future versions."""
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        datasets.enable_progress_bars()


def _train_one_step(policy: nn.Module, reference: nn.Module, setting: Setting) -> Tensor:
    trl: Any = import_module("trl")
    transformers: Any = import_module("transformers")
    datasets: Any = import_module("datasets")
    losses: list[Tensor] = []

    class Trainer(trl.DPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach().clone())
            return loss

    pairs = preferences()
    with tempfile.TemporaryDirectory() as folder, _quiet(datasets):
        config = trl.DPOConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=len(pairs),
            max_length=setting.length,
            pad_to_multiple_of=setting.length,
            gradient_checkpointing=False,
            bf16=False,  # the weights are; there is nothing left to autocast
            use_cpu=setting.device == "cpu",
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(
            model=policy,
            ref_model=reference,
            args=config,
            train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=byte_tokenizer(),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return losses[0]


@dataclass(frozen=True)
class _Takes:
    """What the autotuner takes for each of the two; forced from outside."""

    forced: Forced
    policy: int
    reference: int


def _run(circumstance: str, setting: Setting, compiled: bool, takes: _Takes | None = None) -> Run:
    policy, reference = (
        make_model(setting.target, setting.hidden, setting.layers, compiled) for _ in range(2)
    )
    if takes is not None:
        policy.register_forward_pre_hook(_taking(takes.forced, takes.policy))
        reference.register_forward_pre_hook(_taking(takes.forced, takes.reference))
    with recorded() as recording:
        loss = _train_one_step(policy, reference, setting)
    # What equal log-probabilities give: by the same function, device and precision.
    ln2 = -F.logsigmoid(torch.zeros_like(loss))
    return Run(circumstance, loss.item(), bool(loss == ln2), recording.choices)


def _taking(forced: Forced, number: int) -> Callable[..., None]:
    def hook(*_: object) -> None:
        forced.number = number

    return hook


def runs(setting: Setting, free: int) -> Iterator[Run]:
    """Uncompiled; compiled with the autotuner's choice forced, alike and unlike; compiled with it
    free, `free` times. Where it has no choice, as on a CPU, compiled once.
    """
    with torch.compiler.set_stance("force_eager"):
        uncompiled = _run("uncompiled", setting, compiled=False)
    yield uncompiled
    compiled = not norm_compiles_itself(setting.target)
    if setting.device == "cpu" or why_not_forced():
        yield _run("compiled", setting, compiled)
        return

    def forced_run(policy: int, reference: int) -> Run:
        circumstance = f"compiled, policy takes candidate {policy}, reference {reference}"
        with forced_choice(0) as forced:
            return _run(circumstance, setting, compiled, _Takes(forced, policy, reference))

    first = forced_run(0, 0)
    yield first
    for number in range(1, first.candidates):
        yield forced_run(number, number)
        yield forced_run(0, number)
    for number in range(free):
        yield _run(f"compiled, autotuner free, {number + 1} of {free}", setting, compiled)
