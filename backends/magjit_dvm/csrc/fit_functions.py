"""Fit the polynomials of functions.inc and print them as C++ arrays.

Run it with an interpreter that has mpmath and paste what it prints between the two marker lines of
functions.inc::

    python fit_functions.py            # the arrays
    python fit_functions.py --errors   # the largest error of each fit as well, as comments

Each polynomial is a weighted least-squares fit at Chebyshev nodes, reweighted towards the minimax
one (Lawson's method), in 60-digit arithmetic. The coefficients are rounded to the target format
from the constant term up, and after each rounding the rest is fitted anew, so that later
coefficients take up what the rounding of earlier ones left.
"""

import argparse
import struct
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import mpmath as mp

mp.mp.dps = 60

Real = Callable[[mp.mpf], mp.mpf]
NODES_PER_COEFFICIENT = 4
LAWSON_ROUNDS = 6


@dataclass(frozen=True)
class Fit:
    """One polynomial: what it approximates, where, and how an error there counts."""

    name: str
    single: bool  # coefficients are floats, not doubles
    degree: int
    low: float
    high: float
    function: Real
    weight: Real
    meaning: str


def rounded(value: mp.mpf, single: bool) -> float:
    """Round to the nearest float or double (through a double: one part in 2**29 misrounds)."""
    number = float(value)
    return struct.unpack("f", struct.pack("f", number))[0] if single else number


def nodes(fit: Fit, count: int) -> list[mp.mpf]:
    """Chebyshev nodes of the interval."""
    middle = (mp.mpf(fit.low) + mp.mpf(fit.high)) / 2
    half = (mp.mpf(fit.high) - mp.mpf(fit.low)) / 2
    return [middle + half * mp.cos(mp.pi * (2 * i + 1) / (2 * count)) for i in range(count)]


def least_squares(
    xs: list[mp.mpf], targets: list[mp.mpf], weights: list[mp.mpf], first: int, degree: int
) -> list[mp.mpf]:
    """Coefficients of x**first to x**degree; the normal equations are safe at 60 digits."""
    size = degree - first + 1
    powers = [[w * x ** (first + k) for k in range(size)] for x, w in zip(xs, weights, strict=True)]
    right = [w * t for t, w in zip(targets, weights, strict=True)]
    matrix = mp.matrix(size, size)
    vector = mp.matrix(size, 1)
    for i in range(size):
        vector[i] = mp.fsum(row[i] * r for row, r in zip(powers, right, strict=True))
        for j in range(i, size):
            matrix[i, j] = matrix[j, i] = mp.fsum(row[i] * row[j] for row in powers)
    solution = mp.lu_solve(matrix, vector)
    return [solution[i] for i in range(size)]


def solve(fit: Fit) -> tuple[list[float], mp.mpf]:
    """Return the rounded coefficients, constant term first, and the largest weighted error."""
    xs = nodes(fit, NODES_PER_COEFFICIENT * (fit.degree + 1))
    values = [fit.function(x) for x in xs]
    base = [fit.weight(x) for x in xs]
    lawson = [mp.mpf(1)] * len(xs)
    for _ in range(LAWSON_ROUNDS):
        weights = [w * mp.sqrt(m) for w, m in zip(base, lawson, strict=True)]
        exact = least_squares(xs, values, weights, 0, fit.degree)
        errors = [
            abs(w * (mp.polyval(exact[::-1], x) - v))
            for x, v, w in zip(xs, values, base, strict=True)
        ]
        total = mp.fsum(m * e for m, e in zip(lawson, errors, strict=True))
        lawson = [m * e * len(xs) / total for m, e in zip(lawson, errors, strict=True)]
    chosen: list[float] = []
    rest = list(values)
    for k in range(fit.degree + 1):
        # A double's rounding is far below what the degree leaves, so only floats are fitted anew.
        if fit.single and k:
            exact[k:] = least_squares(xs, rest, weights, k, fit.degree)
        chosen.append(rounded(exact[k], fit.single))
        rest = [r - chosen[k] * x**k for r, x in zip(rest, xs, strict=True)]
    return chosen, max(abs(w * r) for w, r in zip(base, rest, strict=True))


def with_limit(function: Real, at_zero: mp.mpf) -> Real:
    """Return the function with its limit at 0, which the quotients below cannot take."""

    def safe(x: mp.mpf) -> mp.mpf:
        if abs(x) < mp.mpf(10) ** -30:
            return at_zero
        with mp.workdps(120):
            return function(x)

    return safe


def one(_x: mp.mpf) -> mp.mpf:
    """Weigh every point alike."""
    return mp.mpf(1)


HALF = mp.mpf(1) / 2
LN2 = mp.log(2)
EXP_REACH = 0.3472  # a little over ln(2)/2: the rounding of x/ln(2) is not exact
LOG_LOW, LOG_HIGH = float(mp.sqrt(HALF) - 1) - 1e-4, float(mp.sqrt(2) - 1) + 1e-4


def odd_root(function: Real, limit: mp.mpf) -> Real:
    """(f(x)/x - 1)/x**2 as a function of z = x**2, for an odd f with slope 1."""

    def quotient(z: mp.mpf) -> mp.mpf:
        x = mp.sqrt(z)
        return (function(x) / x - 1) / z

    return with_limit(quotient, limit)


def atanh_tail(z: mp.mpf) -> mp.mpf:
    """(2*atanh(s)/s - 2)/z at z = s**2."""
    s = mp.sqrt(z)
    return (2 * mp.atanh(s) / s - 2) / z


def erf_over_x(z: mp.mpf) -> mp.mpf:
    """erf(x)/x - 1 at z = x**2; no node is 0."""
    x = mp.sqrt(z)
    return mp.erf(x) / x - 1


def log_erfc(shift: float) -> Real:
    """ln(erfc(x)) at x = shift + t."""
    return lambda t: mp.log(mp.erfc(t + mp.mpf(shift)))


def erfc_weight(shift: float) -> Real:
    """An error of ln(erfc) moves erf by that times erfc."""
    return lambda t: mp.erfc(t + mp.mpf(shift)) / mp.erfc(1)


def exp_tail(x: mp.mpf) -> mp.mpf:
    """(e**x - 1 - x)/x**2."""
    return (mp.expm1(x) - x) / x**2


def log_tail(x: mp.mpf) -> mp.mpf:
    """(ln(1 + x) - x + x**2/2)/x**3."""
    return (mp.log1p(x) - x + x**2 / 2) / x**3


FITS = [
    Fit("f_exp_c", True, 4, -EXP_REACH, EXP_REACH, with_limit(exp_tail, HALF),
        lambda x: x**2, "(e^r - 1 - r)/r^2"),
    Fit("f_expm1_c", True, 5, -EXP_REACH, EXP_REACH, with_limit(exp_tail, HALF),
        abs, "(e^r - 1 - r)/r^2"),
    Fit("f_exp2_c", True, 5, -0.5, 0.5, with_limit(lambda x: (mp.mpf(2) ** x - 1) / x, LN2),
        abs, "(2^r - 1)/r"),
    Fit("f_log_c", True, 7, LOG_LOW, LOG_HIGH, with_limit(log_tail, mp.mpf(1) / 3),
        lambda x: x**2, "(ln(1 + f) - f + f^2/2)/f^3"),
    Fit("f_tanh_c", True, 4, 0.0, 0.3136, odd_root(mp.tanh, -mp.mpf(1) / 3),
        lambda z: z, "(tanh(x)/x - 1)/x^2, of x^2"),
    Fit("f_erf_c", True, 6, 0.0, 1.0, erf_over_x, one, "erf(x)/x - 1, of x^2"),
    Fit("f_erfc_c", True, 7, -0.5, 2.5, log_erfc(1.5), erfc_weight(1.5),
        "ln(erfc(1.5 + t))"),
    Fit("f_sin_c", False, 4, 0.0, 2.4681, odd_root(mp.sin, -mp.mpf(1) / 6),
        lambda z: z, "(sin(x)/x - 1)/x^2, of x^2"),
    Fit("f_tan_sin_c", False, 3, 0.0, 0.617, odd_root(mp.sin, -mp.mpf(1) / 6),
        lambda z: z, "(sin(x)/x - 1)/x^2, of x^2"),
    Fit("f_tan_cos_c", False, 3, 0.0, 0.617,
        with_limit(lambda z: (mp.cos(mp.sqrt(z)) - 1) / z, -HALF), lambda z: z,
        "(cos(x) - 1)/x^2, of x^2"),
    Fit("f_atan_c", True, 8, 0.0, 1.0, odd_root(mp.atan, -mp.mpf(1) / 3),
        lambda z: z, "(atan(x)/x - 1)/x^2, of x^2"),
    Fit("f_asin_c", True, 4, 0.0, 0.25, odd_root(mp.asin, mp.mpf(1) / 6),
        lambda z: z, "(asin(x)/x - 1)/x^2, of x^2"),
    Fit("f_sinh_c", True, 3, 0.0, 1.0, odd_root(mp.sinh, mp.mpf(1) / 6),
        lambda z: z, "(sinh(x)/x - 1)/x^2, of x^2"),
    Fit("f_pow_log_c", False, 6, 0.0, 0.0296, with_limit(atanh_tail, mp.mpf(2) / 3),
        lambda z: z, "(2 atanh(s)/s - 2)/s^2, of s^2"),
    Fit("f_pow_exp_c", False, 7, -0.5, 0.5, with_limit(lambda x: (mp.mpf(2) ** x - 1) / x, LN2),
        abs, "(2^r - 1)/r"),
    Fit("d_exp_c", False, 10, -EXP_REACH, EXP_REACH, with_limit(exp_tail, HALF),
        lambda x: x**2, "(e^r - 1 - r)/r^2"),
    Fit("d_expm1_c", False, 11, -EXP_REACH, EXP_REACH, with_limit(exp_tail, HALF),
        abs, "(e^r - 1 - r)/r^2"),
    Fit("d_exp2_c", False, 11, -0.5, 0.5,
        with_limit(lambda x: (mp.mpf(2) ** x - 1) / x, LN2), abs, "(2^r - 1)/r"),
    Fit("d_log_c", False, 7, 0.0, 0.0296, with_limit(atanh_tail, mp.mpf(2) / 3),
        lambda z: z, "(2 atanh(s)/s - 2)/s^2, of s^2"),
    Fit("d_tanh_c", False, 11, 0.0, 0.3136, odd_root(mp.tanh, -mp.mpf(1) / 3),
        lambda z: z, "(tanh(x)/x - 1)/x^2, of x^2"),
    Fit("d_erf_c", False, 11, 0.0, 1.0, erf_over_x, one, "erf(x)/x - 1, of x^2"),
    Fit("d_erfc_c", False, 20, -0.5, 4.5, log_erfc(1.5), erfc_weight(1.5),
        "ln(erfc(1.5 + t))"),
    Fit("d_sinh_c", False, 7, 0.0, 1.0, odd_root(mp.sinh, mp.mpf(1) / 6),
        lambda z: z, "(sinh(x)/x - 1)/x^2, of x^2"),
]  # fmt: skip


def literal(number: float, single: bool) -> str:
    """Return the C++ literal, hexadecimal so that it is exact."""
    digits, exponent = number.hex().split("p")
    return f"{digits.rstrip('0')}p{exponent}{'f' if single else ''}"


def main() -> None:
    """Print every array."""
    parser = argparse.ArgumentParser(description="Fit the polynomials of functions.inc.")
    parser.add_argument("--errors", action="store_true", help="print the error of each fit as well")
    parser.add_argument("--only", metavar="NAME", help="fit this one array")
    options = parser.parse_args()
    for fit in FITS:
        if options.only not in (None, fit.name):
            continue
        coefficients, error = solve(fit)
        number = "float" if fit.single else "double"
        print(f"// {fit.meaning}")
        if options.errors:
            print(f"// largest weighted error 2^{float(mp.log(error, 2)):.1f}")
        print(f"constexpr {number} {fit.name}[] = {{")
        numbers = ", ".join(literal(c, fit.single) for c in coefficients)
        print(textwrap.fill(numbers, 100, initial_indent="    ", subsequent_indent="    ") + "};")


if __name__ == "__main__":
    main()
