"""What Inductor makes of a function: graphs, kernels, and its autotuner's candidates and choice.

The one place that reaches into Inductor. Its names are private: `why_not_forced` says where a torch
no longer has them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar
from unittest import mock

import torch

__all__ = [
    "Forced",
    "Graph",
    "Kernel",
    "Recording",
    "Tuning",
    "each_choice",
    "forced_choice",
    "goes_through_inductor",
    "half_the_multiprocessors",
    "probed_vector_isas",
    "recompiling",
    "recorded",
    "why_not_forced",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Kernel:
    """A kernel that Inductor generated: its name, its language ("triton", "cpp"), its source."""

    name: str
    language: str
    source: str = field(repr=False)


@dataclass(frozen=True)
class Graph:
    """A graph that Inductor compiled.

    ``kind`` is "inference" where nothing is kept for a gradient, else "forward" or "backward".
    ``aten`` is the graph as Python, after decompositions; ``code`` is Inductor's whole output.
    """

    kind: str
    aten: str = field(repr=False)
    code: str = field(repr=False)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """In the order of the code."""
        return tuple(
            Kernel(found["name"], found["language"].split("_")[0], found["source"])
            for found in _KERNEL.finditer(self.code)
        )

    @property
    def custom_ops(self) -> tuple[str, ...]:
        """The operators in it that are neither ATen's nor the compiler's own, each once."""
        called = re.findall(r"^ *\w[^#\n]* = torch\.ops\.(\w+)\.(\w+)", self.aten, re.M)
        own = (f"{library}::{name}" for library, name in called if library not in _TORCH)
        return tuple(dict.fromkeys(own))


_TORCH = ("aten", "prims", "inductor", "higher_order")

# name = async_compile.triton('name', '''source''', ...) or .cpp_pybinding([types], r'''source''')
_KERNEL = re.compile(
    r"^(?P<name>\w+) = async_compile\.(?P<language>\w+)\(.*?'''(?P<source>.*?)'''", re.M | re.S
)


@dataclass(frozen=True)
class Tuning:
    """What the autotuner did for one kernel: its candidate configurations, and which it took."""

    kernel: str
    candidates: tuple[str, ...]
    chosen: int


@dataclass
class Recording:
    """What was compiled and tuned while `recorded`, in that order.

    A kernel without a tuning had one configuration, or is not Triton's.
    """

    graphs: list[Graph] = field(default_factory=list)
    tunings: list[Tuning] = field(default_factory=list)

    @property
    def choices(self) -> int:
        """The largest number of candidates of any kernel; 1 where nothing was tuned."""
        return max((len(tuning.candidates) for tuning in self.tunings), default=1)


def _autotuner() -> Any:
    return import_module("torch._inductor.runtime.triton_heuristics").CachingAutotuner


def why_not_forced() -> str:
    """Why the autotuner's choice cannot be forced with this torch; "" where it can."""
    try:
        autotuner = _autotuner()
    except (ImportError, AttributeError):  # without Triton there may be no such module
        autotuner = None
    for name in ("benchmark_all_configs", "autotune_to_one_config"):
        if not hasattr(autotuner, name):
            return f"torch {torch.__version__} has no CachingAutotuner.{name}"
    return ""


@contextmanager
def recompiling() -> Iterator[None]:
    """Dynamo compiles within for every shape, layout and mode.

    Past its limits it would run a function without the compiler, and say so in a log alone.
    """
    config, no_limit = import_module("torch._dynamo.config"), 1 << 16
    with config.patch(recompile_limit=no_limit, accumulated_recompile_limit=no_limit):
        yield


@contextmanager
def _afresh() -> Iterator[None]:
    """Compiles everything anew within: a cached graph or choice would hide what is asked for."""
    config = import_module("torch._inductor.config")
    torch.compiler.reset()
    with config.patch(force_disable_caches=True), recompiling(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield
    torch.compiler.reset()


@contextmanager
def recorded() -> Iterator[Recording]:
    """Records what is compiled and tuned within. Nothing compiled before or after is shared."""
    lowering = import_module("torch._inductor.graph").GraphLowering
    virtualized = import_module("torch._inductor.virtualized").V
    recording = Recording()

    def save_output_code(code: str) -> None:
        graph = virtualized.graph
        kind = "inference" if graph.is_inference else "backward" if graph.is_backward else "forward"
        aten = graph.module.print_readable(print_output=False)
        recording.graphs.append(Graph(kind, aten, code))

    with _afresh(), mock.patch.object(lowering, "save_output_code", save_output_code):
        if why_not_forced():
            yield recording
            return
        autotuner = _autotuner()
        tune = autotuner.autotune_to_one_config

        def autotune_to_one_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            configs = [launcher.config for launcher in self.launchers]
            result = tune(self, *args, **kwargs)
            chosen = configs.index(self.launchers[0].config)
            name = self.inductor_meta.get("kernel_name") or self.fn.__name__
            recording.tunings.append(Tuning(name, tuple(map(str, configs)), chosen))
            return result

        with mock.patch.object(autotuner, "autotune_to_one_config", autotune_to_one_config):
            yield recording


@dataclass
class Forced:
    """What kernels take from now on; one that is tuned already keeps what it took."""

    number: int


@contextmanager
def forced_choice(number: int) -> Iterator[Forced]:
    """Every kernel compiled within takes candidate `number`, modulo how many it has.

    Raises:
        RuntimeError: where `why_not_forced`.
    """
    if reason := why_not_forced():
        raise RuntimeError(f"the autotuner's choice cannot be forced: {reason}")
    forced = Forced(number)

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        chosen = forced.number % len(self.launchers)
        return {launcher: float(i != chosen) for i, launcher in enumerate(self.launchers)}

    patched = mock.patch.object(_autotuner(), "benchmark_all_configs", benchmark_all_configs)
    with _afresh(), patched:
        yield forced


def probed_vector_isas() -> dict[str, str]:
    """For the environment of a process that is to compile for the CPU as this one does.

    It spares it Inductor's trial of every vector instruction set, some ten seconds; nothing where
    this process has not made the trial, or one failed.
    """
    isas = import_module("torch._inductor.cpu_vec_isa")
    find: Any = getattr(isas, "valid_vec_isa_list", None)
    if not hasattr(find, "cache_info") or not find.cache_info().currsize:
        return {}
    with import_module("torch._inductor.config").patch({"cpp.vec_isa_ok": True}):
        untried = find.__wrapped__()
    return {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if find() == untried else {}


def goes_through_inductor(run: Callable[[], object]) -> bool:
    """Whether `run()` compiles anything, as a function decorated with torch.compile does."""
    with recorded() as recording:
        run()
    return bool(recording.graphs)


def each_choice(run: Callable[[], T]) -> Iterator[tuple[T, Recording]]:
    """`run()` under every choice of the autotuner, in order, with what was recorded meanwhile.

    As many runs as the kernel with the most candidates has; one where nothing is tuned.
    """
    number, choices = 0, 1
    while number < choices:
        with forced_choice(number), recorded() as recording:
            result = run()
        yield result, recording
        number, choices = number + 1, max(choices, recording.choices)


@contextmanager
def half_the_multiprocessors() -> Iterator[None]:
    """Within, Python and Inductor see half of the GPU's multiprocessors; they stay in use."""
    hints = import_module("torch._inductor.runtime.hints").DeviceProperties
    create, ask = hints.create, torch.cuda.get_device_properties

    def created(device: torch.device) -> Any:
        properties = create(device)
        return properties._replace(multi_processor_count=properties.multi_processor_count // 2)

    class Half:
        """Device properties but for the one."""

        def __init__(self, properties: Any) -> None:
            self.properties = properties

        @property
        def multi_processor_count(self) -> int:
            return int(self.properties.multi_processor_count) // 2

        def __getattr__(self, name: str) -> Any:
            return getattr(self.properties, name)

    def asked(device: Any = None) -> Half:
        return Half(ask(device))

    with (
        mock.patch.object(hints, "create", created),
        mock.patch.object(torch.cuda, "get_device_properties", asked),
    ):
        yield
