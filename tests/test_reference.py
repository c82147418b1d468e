"""P4: the kernels of every instruction set and of CUDA give the bits of the literal reference."""

import functools
import math
import random
from fractions import Fraction

import automodel_rms_norm as arn
import pytest
import support
import torch

# Ragged widths below and around a chunk, and row counts around a leaf and around powers of two
# leaves.
SHAPES = [
    (33, 1),
    (17, 2),
    (9, 3),
    (8, 5),
    (7, 7),
    (25, 8),
    (5, 17),
    (3, 33),
    (2, 111),
    (1, 127),
    (40, 128),
    (3, 129),
    (2, 3, 257),
    (2, 500),
    (1, 1000),
    (2, 1024),
    (1, 2688),
    (1, 3072),
    (1, 3584),
    (2, 4096),
]
FLASHINFER_634 = {111, 500, 3072, 3584}


def shape_id(shape: tuple[int, ...]) -> str:
    report = "-flashinfer-634" if shape[-1] in FLASHINFER_634 else ""
    return "x".join(map(str, shape)) + report


def pair_id(pair: tuple[torch.dtype, torch.dtype | None]) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in pair)


@functools.cache
def case(
    shape: tuple[int, ...], pair: tuple[torch.dtype, torch.dtype | None], zero_centered: bool
) -> tuple[support.Inputs, support.Results]:
    inputs = support.make_inputs(
        *shape, dtype=pair[0], weight_dtype=pair[1], zero_centered_gamma=zero_centered
    )
    return inputs, support.run_reference(inputs, 1e-5, zero_centered)


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize("pair", support.DTYPE_PAIRS, ids=pair_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_bits_are_the_references(shape, pair, zero_centered, implementation):
    inputs, expected = case(shape, pair, zero_centered)
    on_device = support.Inputs(*(t if t is None else t.to(implementation) for t in inputs))
    support.assert_same(support.run_op(on_device, 1e-5, zero_centered), expected)


@pytest.mark.parametrize("hidden", [5120, 7168, 8192, 12288, 16384, 32768, 65537])
@pytest.mark.parametrize("dtype", support.LOW_WEIGHT_DTYPES, ids=str)
def test_bits_are_the_references_in_wide_rows(hidden, dtype, implementation):
    inputs = support.make_inputs(2, hidden, dtype=dtype, weight_dtype=dtype)
    expected = support.run_reference(inputs)
    on_device = support.Inputs(*(t.to(implementation) for t in inputs))
    support.assert_same(support.run_op(on_device), expected)


def test_autograd_gives_the_references_bits(device):
    inputs = support.make_inputs(3, 5, 300, device=device)
    actual = support.forward_backward(arn.rms_norm, inputs)
    support.assert_same(actual, support.reference_outputs(inputs))


def test_constants_are_the_specifications():
    contract = arn.build_info()["contract"]
    reference = arn.reference
    assert contract["slots"] == reference.SLOTS
    assert contract["group"] == reference.GROUP
    assert contract["leaf_rows"] == reference.LEAF_ROWS
    assert contract["min_virtual_threads"] == reference.MIN_VIRTUAL_THREADS
    assert contract["max_virtual_threads"] == reference.MAX_VIRTUAL_THREADS


@pytest.mark.parametrize(
    ("hidden", "threads"),
    [(1, 16), (1023, 32), (1024, 64), (4096, 256), (65535, 2048), (65536, 4096), (2**40, 4096)],
)
def test_virtual_threads_leave_two_chunks_each(hidden, threads):
    # 16 threads is the floor: it holds below 512 elements, two chunks of 8 for each of 32 threads.
    assert arn.reference.virtual_threads(hidden) == threads


def round_to_float(value: Fraction) -> float:
    """The float32 nearest to `value`, ties to even, by exact arithmetic alone."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / ulp) * ulp  # Fraction's round() is ties to even
    result = math.inf if rounded >= Fraction(2) ** 128 else float(rounded)
    return math.copysign(result, value)


def random_triples() -> list[tuple[float, float, float]]:
    generator = random.Random(0)

    def number(low: int, high: int) -> float:
        significand = generator.choice([generator.getrandbits(24), 1 << 23, (1 << 24) - 1, 1])
        return generator.choice([-1, 1]) * math.ldexp(significand, generator.randint(low, high))

    near = [(number(-30, -10), number(-30, -10), number(-60, -10)) for _ in range(3000)]
    tiny = [(number(-110, -75), number(-80, -60), number(-149, -130)) for _ in range(1000)]
    huge = [(number(30, 50), number(30, 50), number(90, 104)) for _ in range(1000)]
    return near + tiny + huge


def double_rounding_triples() -> list[tuple[float, float, float]]:
    """Sums just beside a midpoint of two floats: rounding to double first lands on the midpoint."""
    triples = []
    for exponent in range(54, 80):
        for sign in (1.0, -1.0):
            # 1 + 2^-24 is a midpoint, c = 2^-exponent is lost when it is rounded to double.
            midpoint = (1.0 + 2.0**-12, 2.0**-12 * (1.0 - 2.0**-12))
            triples.append((*midpoint, sign * 2.0**-exponent))
            product = (float(2**12 + 1), float(2**13 - 2), sign * 2.0**-exponent)
            triples.append(product)
            triples.append((1.0 + 2.0**-23, sign * 2.0 ** -(exponent - 1), 1.0 + 2.0**-23))
            triples.append((sign * 2.0 ** -(exponent // 2), 2.0 ** -(exponent // 2), 1.0))
    return triples


def midpoint_triples() -> list[tuple[float, float, float]]:
    """a * b is an exact midpoint of 25 bits; c decides which way it goes, or leaves the tie."""
    generator = random.Random(1)
    triples = []
    for _ in range(2000):
        a, b = generator.getrandbits(12) | 0x801, generator.getrandbits(13) | 0x1001
        c = generator.choice([0.0, 1.0, -1.0]) * math.ldexp(1.0, -generator.randint(20, 120))
        triples.append((float(a), float(b), c))
    return triples


@pytest.mark.parametrize("triples", [random_triples, double_rounding_triples, midpoint_triples])
def test_fma_rounds_once(triples):
    values = torch.tensor(triples(), dtype=torch.float32)
    expected = [
        round_to_float(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in values.tolist()
    ]
    actual = arn.reference.fma(*values.unbind(1))
    # An exact zero has the sign of IEEE 754's sum, which a Fraction does not hold.
    expected = torch.tensor(expected, dtype=torch.float32)
    different = (actual != expected).nonzero().flatten().tolist()
    assert not different, [(values[i].tolist(), actual[i], expected[i]) for i in different[:3]]


def test_fma_triples_catch_double_rounding():
    a, b, c = torch.tensor(double_rounding_triples() + midpoint_triples()).double().unbind(1)
    rounded_twice = (a * b + c).float()
    assert (rounded_twice != arn.reference.fma(a.float(), b.float(), c.float())).sum() > 100


def test_fma_of_zeros_and_infinities_is_ieee():
    inf, nan = math.inf, math.nan
    rows = [
        (0.0, -1.0, -0.0, -0.0),
        (0.0, -1.0, 0.0, 0.0),
        (1.0, 1.0, -1.0, 0.0),
        (inf, 1.0, -inf, nan),
        (inf, 0.0, 1.0, nan),
        (1e30, 1e30, -inf, -inf),
        (1e30, 1e30, 0.0, inf),
    ]
    for dtype in (torch.float32, torch.float64):
        finite_overflow = [row for row in rows if dtype == torch.float32 or row[3] != inf]
        a, b, c, expected = torch.tensor(finite_overflow, dtype=dtype).unbind(1)
        arn.testing.assert_bitwise_equal(arn.reference.fma(a, b, c), expected, "fma")
