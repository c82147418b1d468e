"""How long calls take: medians of repeats, in which the calls to compare take turns.

On a GPU the time is the device's own, between two events. The GPU spins while the host queues the
call, so that neither Python nor the launch is counted. On a CPU it is the clock's.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

Call = Callable[[], object]

CYCLES_PER_US = 2000  # of a GPU at 2 GHz; at a lower clock it spins longer
SHORTEST_SPIN_US = 50.0
LONGEST_SPIN_US = 5000.0


class Absent(Exception):  # noqa: N818 - nothing went wrong
    """An implementation does not offer this work, or is not on this machine."""


class Timing(NamedTuple):
    """The median of a call's time and the quartiles around it, in microseconds."""

    us: float
    low: float
    high: float

    def over(self, calls: int) -> "Timing":
        """The time of one of `calls` calls that were timed together."""
        return Timing(*(value / calls for value in self))


def timing(times: Sequence[float]) -> Timing:
    if len(times) == 1:
        return Timing(times[0], times[0], times[0])
    low, middle, high = statistics.quantiles(times, method="inclusive")
    return Timing(middle, low, high)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(
    makers: Mapping[str, Callable[[], list[Call]]], device: torch.device
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """What each maker makes, run once, and why the others cannot run. "op" may only be absent."""
    calls, why = {}, {}
    for name, make in makers.items():
        try:
            made = make()
            for call in made:
                call()
            synchronize(device)
            calls[name] = made
        except Absent as absent:
            why[name] = str(absent)
        except Exception as error:
            if name == "op":
                raise
            lines = str(error).strip().splitlines() or [""]
            why[name] = f"{type(error).__name__}: {lines[0]}"[:160]
    return calls, why


def time_calls(
    calls: Mapping[str, Sequence[Call]], repeats: int, device: torch.device
) -> dict[str, Timing]:
    """The time of one call of each name; the calls of a name work on different inputs in turn."""
    on_gpu = device.type == "cuda"
    spin_us = {name: host_us(turn[-1], device) if on_gpu else 0 for name, turn in calls.items()}
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name, turn in calls.items():
            call = turn[repeat % len(turn)]
            readings[name].append(by_events(call, spin_us[name]) if on_gpu else by_clock(call))
    synchronize(device)
    return {name: timing([read() for read in reads]) for name, reads in readings.items()}


def host_us(call: Call, device: torch.device) -> float:
    """How long the GPU has to spin while the host queues `call`: twice what it takes here."""
    call()
    synchronize(device)
    begin = time.perf_counter()
    call()
    us = (time.perf_counter() - begin) * 1e6
    synchronize(device)
    return min(max(2 * us, SHORTEST_SPIN_US), LONGEST_SPIN_US)


def by_events(call: Call, spin_us: float) -> Callable[[], float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(spin_us * CYCLES_PER_US))
    begin.record()
    call()
    end.record()
    return lambda: begin.elapsed_time(end) * 1e3


def by_clock(call: Call) -> Callable[[], float]:
    begin = time.perf_counter()
    call()
    us = (time.perf_counter() - begin) * 1e6
    return lambda: us


@functools.cache
def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def capturable(device: torch.device) -> AbstractContextManager[object]:
    """In it, inputs and calls are made that `time_together` takes: not on the default stream."""
    return torch.cuda.stream(side_stream()) if device.type == "cuda" else nullcontext()


def together(calls: Sequence[Call], device: torch.device) -> Call:
    """One call that makes all of `calls`: on a GPU a CUDA graph, each with outputs of its own.

    Each has been made before, or what it compiles and caches at first would be captured.
    """
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream()):
        outputs = [call() for call in calls]
    del outputs  # not before all are captured, or they would share their memory
    return graph.replay


def time_together(
    calls: Mapping[str, Sequence[Call]], repeats: int, device: torch.device
) -> tuple[dict[str, Timing], dict[str, str]]:
    """The time of one call of each name among all of that name, back to back, and why the others
    cannot be put together."""
    together_calls, why = build(
        {name: lambda turn=turn: [together(turn, device)] for name, turn in calls.items()}, device
    )
    times = time_calls(together_calls, repeats, device)
    return {name: time.over(len(calls[name])) for name, time in times.items()}, why


def host_times(
    calls: Mapping[str, Call], repeats: int, device: torch.device, batch: int = 100
) -> dict[str, Timing]:
    """What one call keeps the host busy: the clock over `batch` calls, none of them waited for."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(batch):
                call()
            times[name].append((time.perf_counter() - begin) * 1e6 / batch)
    synchronize(device)
    return {name: timing(each) for name, each in times.items()}
