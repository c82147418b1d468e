"""A target: a differentiable function and a recipe for its inputs, in a few declarative lines.

    from automodel_rms_norm.gate.recipe import Recipe, parameter, tensor

    gated = Recipe(
        gated_norm,
        inputs={
            "x": tensor("rows", "hidden"),
            "gate": tensor("rows", "hidden"),
            "weight": parameter("hidden"),
            "eps": 1e-6,
        },
    )

``numerics-gate check module:gated`` then checks it. The arguments are passed in this order.
A dimension is a number, a name, or an expression of names such as "2 * hidden". The dimension
called ``rows`` holds rows that do not depend on each other; where no tensor has one, P3 and the
part of P5 about appended rows do not apply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rms_norm.bits import Difference
from automodel_rms_norm.contexts import Function, Inputs, Results, eager

__all__ = [
    "DTYPES",
    "NAMES",
    "Case",
    "Input",
    "Recipe",
    "RecipeError",
    "Selection",
    "Variant",
    "parameter",
    "tensor",
]

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
ROWS, HIDDEN = "rows", "hidden"
WIDTHS, QUICK_WIDTHS = (128, 2688, 4096), (128,)

Dimension = int | str
Values = Callable[[torch.Generator, tuple[int, ...]], Tensor]


class RecipeError(Exception):
    """A recipe that does not fit its function; the message says what to do."""


@dataclass(frozen=True)
class Input:
    """One tensor, an argument or, as the gradient that comes back to it, an output.

    Attributes:
        shape: numbers, names and expressions of names.
        dtype: that of the case where None.
        around, spread: the mean and the standard deviation of its random values.
        values: other values, from a generator and the shape; takes the place of the former two.
        parameter: whether a model holds it as an nn.Parameter.
        grad: whether it is differentiated, or has a gradient; integers never are.
    """

    shape: tuple[Dimension, ...]
    dtype: torch.dtype | None = None
    around: float = 0.0
    spread: float = 1.0
    values: Values | None = None
    parameter: bool = False
    grad: bool = True

    def make(
        self, generator: torch.Generator, sizes: Mapping[str, int], dtype: torch.dtype
    ) -> Tensor:
        shape = tuple(_size(dimension, sizes) for dimension in self.shape)
        if self.values is not None:
            return self.values(generator, shape).to(self.dtype or dtype)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (self.around + self.spread * normal).to(self.dtype or dtype)


def tensor(*shape: Dimension, **options: Any) -> Input:
    """An activation, N(0, 1) unless said otherwise; options are Input's attributes."""
    return Input(shape, **options)


def parameter(*shape: Dimension, **options: Any) -> Input:
    """An nn.Parameter with gains away from 1: 1 + 0.4 N(0, 1) unless said otherwise."""
    return Input(shape, **{"around": 1.0, "spread": 0.4, "parameter": True, **options})


def _size(dimension: Dimension, sizes: Mapping[str, int]) -> int:
    if isinstance(dimension, int):
        return dimension
    try:
        return int(eval(dimension, {"__builtins__": {}}, dict(sizes)))
    except NameError as error:
        raise RecipeError(f"{error} in the dimension {dimension!r}; give it in sizes") from error


def default_rows(width: int) -> int:
    """Enough for more than one thread, and odd."""
    return max(19, 32768 // width + 3)


@dataclass(frozen=True, eq=False)
class Variant:
    """One set of inputs that a recipe asks for.

    Attributes:
        dtype: of all tensors that name none.
        note: said in the case's label.
        sizes: the named dimensions that are not the recipe's.
        inputs: Inputs and scalars in the place of the recipe's.
        quick: whether ``--quick`` has it.
        main: whether it stands for others where a check is expensive.
    """

    dtype: torch.dtype
    note: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = True
    main: bool = True


@dataclass(frozen=True)
class Selection:
    """Which cases to check: `quick` with fewer of them; otherwise what is not empty."""

    quick: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    widths: tuple[int, ...] = ()
    rows: int | None = None

    @property
    def everything(self) -> bool:
        """Whether widths and rows are left to the gate."""
        return not self.widths and self.rows is None


@dataclass(frozen=True, eq=False)
class Case:
    """Made inputs. ``main`` cases stand for the others where a check is expensive.

    ``sizes`` and the scalars among the arguments are what a module is made of.
    """

    label: str
    inputs: Inputs = field(repr=False)
    dtype: torch.dtype
    sizes: Mapping[str, int] = field(default_factory=dict)
    main: bool = True

    def to(self, device: torch.device | str) -> Case:
        """The case with its tensors on `device`."""
        return replace(self, inputs=self.inputs.to(device))


@dataclass(frozen=True, eq=False)
class Recipe:
    """A target of the gate.

    Attributes:
        function: takes the arguments in their order and returns a tensor or a tuple of them.
        inputs: Inputs and scalars by argument name, in order.
        outputs: Inputs by output name, in order: shape and dtype of each, and how its gradient's
            values are made. By default one, y, with the first input's shape and dtype.
        sizes: named dimensions that are the same in every case. Names other than rows and hidden
            have to be here; these two are swept where they are not.
        dtypes: the dtypes that the default variants have.
        variants: what is asked; by default every dtype with each of a few widths.
        extremes: what is asked of P6 alone.
        module: in the place of `function`: makes an nn.Module of the sizes and scalars, given by
            name. The inputs that are parameters are its parameters, by their names; forward takes
            the other tensors.
        judge: P6 for results of grad mode; by default against the function itself in float64.
        also: more results of the same arguments, by name, that are not differentiated.
        captured: makes more cases, of a real model; NotRunError says why there are none.
        any_rank: whether tensors with rows may have more dimensions than the recipe's.
        missing: sentences that say which cases this target cannot be asked.
        name: what reports call it.
        source: the text that `targets.load` finds it by; "" where only this process has it.
        contract: whether it claims this package's contract, and so its digests.
        fullgraph: whether a graph break under torch.compile is a failure.
    """

    function: Function | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Input] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    variants: Sequence[Variant] = ()
    extremes: Sequence[Variant] = ()
    module: Callable[..., nn.Module] | None = None
    judge: Callable[[Recipe, Case, Results], Difference | None] | None = None
    also: Callable[..., Results] | None = None
    captured: Callable[[], Sequence[Case]] | None = None
    any_rank: bool = False
    missing: Sequence[str] = ()
    name: str = ""
    source: str = ""
    contract: bool = False
    fullgraph: bool = False

    def __post_init__(self) -> None:
        if (self.function is None) == (self.module is None):
            raise RecipeError("a recipe has a function or a module, and not both")
        if not any(isinstance(value, Input) for value in self.inputs.values()):
            raise RecipeError("a recipe has at least one tensor among its inputs")
        if shared := set(self.inputs) & set(self._outputs):
            raise RecipeError(f"{min(shared)} is both an input and an output; rename the output")

    @property
    def _outputs(self) -> Mapping[str, Input]:
        first = next(value for value in self.inputs.values() if isinstance(value, Input))
        return self.outputs or {"y": tensor(*first.shape, dtype=first.dtype)}

    def _names(self) -> set[str]:
        """The names in the dimensions of all tensors."""
        tensors = (*self.inputs.values(), *self._outputs.values())
        found = " ".join(str(d) for t in tensors if isinstance(t, Input) for d in t.shape)
        return set(re.findall(r"[A-Za-z_]\w*", found))

    def cases(self, selection: Selection | None = None, extreme: bool = False) -> Iterator[Case]:
        """The cases that are asked, on the CPU; those of P6 alone where `extreme`.

        Raises:
            RecipeError: for a dimension without a size.
        """
        selection = selection or Selection()
        chosen: Sequence[Variant] = self.extremes if extreme else self.variants
        if not chosen and not extreme:
            chosen = self._default_variants()
        if selection.quick:
            chosen = [variant for variant in chosen if variant.quick]
        if not extreme and selection.widths and HIDDEN in self._names():
            chosen = _at_widths(chosen, selection.widths)
        for variant in chosen:
            if selection.dtypes and variant.dtype not in selection.dtypes:
                continue
            rows = {} if extreme or selection.rows is None else {ROWS: selection.rows}
            yield self.case(replace(variant, sizes={**variant.sizes, **rows}))

    def _default_variants(self) -> list[Variant]:
        widths = WIDTHS if HIDDEN in self._names() and HIDDEN not in self.sizes else (0,)
        return [
            Variant(
                dtype,
                sizes={HIDDEN: width} if width else {},
                quick=width in (0, *QUICK_WIDTHS),
                main=width in (0, *QUICK_WIDTHS),
            )
            for width in widths
            for dtype in self.dtypes
        ]

    def case(self, variant: Variant) -> Case:
        """The inputs of one variant, made with a generator of their own."""
        sizes = {**self.sizes, **variant.sizes}
        if ROWS in self._names():
            sizes.setdefault(ROWS, default_rows(sizes.get(HIDDEN, 128)))
        generator = torch.Generator().manual_seed(math.prod(sizes.values()))
        recipe = {**self.inputs, **{k: v for k, v in variant.inputs.items() if k in self.inputs}}
        arguments = {
            name: value.make(generator, sizes, variant.dtype) if isinstance(value, Input) else value
            for name, value in recipe.items()
        }
        outputs = self._outputs
        grads = {
            name: value.make(generator, sizes, variant.dtype) if value.grad else None
            for name, value in outputs.items()
        }
        tensors = {k: v for k, v in recipe.items() if isinstance(v, Input)}
        inputs = Inputs(
            arguments,
            grads,
            parameters=frozenset(name for name, value in tensors.items() if value.parameter),
            constants=frozenset(name for name, value in tensors.items() if not value.grad),
            rows={
                name: value.shape.index(ROWS)
                for name, value in (*tensors.items(), *outputs.items())
                if ROWS in value.shape
            },
        )
        return Case(_label(inputs, variant.note), inputs, variant.dtype, sizes, variant.main)

    def bind(self, case: Case) -> Function:
        """The function of the case's arguments; a module is made for the case."""
        if self.module is None:
            assert self.function is not None
            return self.function
        scalars = {k: v for k, v in case.inputs.arguments.items() if not isinstance(v, Tensor)}
        made = self.module(**case.sizes, **scalars)
        names = list(case.inputs.arguments)
        tensors = case.inputs.tensors
        held = [name for name in names if name in tensors and name in case.inputs.parameters]
        taken = [name for name in names if name in tensors and name not in held]
        own = [name for name, _ in made.named_parameters()]
        if set(own) != set(held):
            raise RecipeError(
                f"{self.name} has the parameters {', '.join(own) or 'none'}; its recipe has "
                f"{', '.join(held) or 'none'}"
            )
        made = made.to(case.inputs.device)

        def call(*arguments: Any) -> Any:
            given = dict(zip(names, arguments, strict=True))
            lent = {name: given[name] for name in held}
            return torch.func.functional_call(made, lent, tuple(given[name] for name in taken))

        return call

    def results(self, case: Case, inputs: Inputs) -> Results:
        """Outputs and gradients of `inputs` in grad mode, and what `also` tells of them."""
        results = eager(self.bind(case), inputs)
        if self.also is not None:
            results.update(self.also(*inputs.arguments.values()))
        return results


def _at_widths(variants: Sequence[Variant], widths: Sequence[int]) -> list[Variant]:
    """The variants of the smallest width, at each of `widths` instead."""
    least = min(variant.sizes.get(HIDDEN, 0) for variant in variants)
    chosen = [variant for variant in variants if variant.sizes.get(HIDDEN, 0) == least]
    return [
        replace(variant, note="as asked", sizes={**variant.sizes, HIDDEN: width})
        for width in widths
        for variant in chosen
    ]


def _label(inputs: Inputs, note: str) -> str:
    parts = []
    for name, value in inputs.arguments.items():
        if isinstance(value, Tensor):
            shape = " x ".join(str(size) for size in value.shape)
            dtype = NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
            parts.append(f"{name} {dtype} {shape}")
        else:
            parts.append(f"{name} {value}")
    return ", ".join(parts) + (f"; {note}" if note else "")
