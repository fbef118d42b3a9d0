"""``CalculatorTool``: arithmetic by a parser of its own, with no ``eval`` and a bound on everything."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NoReturn

from agentrl.tools.base import Tool, ToolError

Number = Fraction | float
"""Exact while it can be: a float appears only where a root, a logarithm or an angle is not rational."""

MAX_LENGTH = 1000
"""Characters of an expression."""
MAX_DEPTH = 50
"""Brackets, signs and powers inside one another."""
MAX_DIGITS = 200
"""Digits of any number on the way, before or after the point."""
SHOWN_DIGITS = 12
"""Significant digits of a result that is not exact, or would be longer than :data:`MAX_DIGITS`."""

_MAX_BITS = int(MAX_DIGITS * math.log2(10)) + 1
_TOKEN = re.compile(r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_π]\w*)|(?P<sign>\*\*|//|\S)")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])")
_SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "[": "(", "]": ")"}
_NAMES = {"pi": math.pi, "π": math.pi, "e": math.e, "tau": math.tau}


class CalculatorTool(Tool):
    """Computes an arithmetic expression.

    Whole numbers, decimals and fractions are exact: ``0.1 + 0.2`` is 0.3. ``15%`` is 0.15, and ``15% of 80``
    is 12; between two numbers ``%`` is the remainder. ``^`` is a power, as is ``**``; ``//`` rounds down. An
    expression that is too long, nests too deeply or meets a number of more than 200 digits is refused before
    it costs anything, so no expression can hang.

    Example:
        >>> CalculatorTool()(expression="(2 + 3) * 4 ^ 2 / 7")
        '11.4285714286'
        >>> CalculatorTool()(expression="15% of 1,250 + sqrt(2)^2")
        '189.5'
    """

    name = "calculator"
    description = "Computes an arithmetic expression, such as (12.5 + 3) * 4 ^ 2."
    shared = True

    def __call__(self, expression: str) -> str:
        """Args:
        expression: Numbers, + - * / // % ^, brackets, and sqrt, abs, min, max, round, floor, ceil, log, exp.
        """
        return show(evaluate(expression))


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression.

    Raises:
        ToolError: It cannot be read, a bound is passed, or the value does not exist; the text says which.
    """
    if len(expression) > MAX_LENGTH:
        _refuse(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are read")
    return _Parser(expression).value()


def show(value: Number) -> str:
    """A value as text: exact where it has a finite decimal form, else to 12 significant digits."""
    if isinstance(value, Fraction):
        if value.denominator == 1:
            return str(value.numerator)
        places = _decimal_places(value.denominator)
        if places is not None and places <= SHOWN_DIGITS:
            digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
            return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"
        value = _to_float(value)
    text = f"{value:.{SHOWN_DIGITS}g}"
    return "0" if text == "-0" else text


def _decimal_places(denominator: int) -> int | None:
    """Digits after the point of 1/denominator; None when they have no end."""
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


class _Parser:
    """Recursive descent over the tokens of one expression; each rule returns its value."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.in_call = 0
        self.kind = self.token = ""
        self._advance()

    def value(self) -> Number:
        if self.kind == "end":
            _refuse("the expression is empty")
        result = self._sum()
        if self.kind != "end":
            _refuse(f"unexpected {self.token!r} at character {self.position - len(self.token) + 1}")
        return result

    def _advance(self) -> None:
        text, start = self.text, self.position
        while start < len(text) and text[start].isspace():
            start += 1
        # A comma separates arguments inside a call, thousands elsewhere.
        thousands = None if self.in_call else _THOUSANDS.match(text, start)
        if thousands:
            plain = re.compile(r"\.?\d*").match(text, thousands.end())
            self.kind, self.position = "number", plain.end()
            self.token = thousands.group().replace(",", "") + plain.group()
            return
        match = _TOKEN.match(text, start)
        if match is None:
            self.kind, self.token, self.position = "end", "", len(text)
            return
        self.kind, self.token, self.position = str(match.lastgroup), match.group(), match.end()
        self.token = _SIGNS.get(self.token, self.token)

    def _take(self, *tokens: str) -> str:
        """The current token if it is one of these signs or words, else an empty string."""
        if self.kind in ("sign", "name") and self.token in tokens:
            taken = self.token
            self._advance()
            return taken
        return ""

    def _expect(self, token: str, after: str) -> None:
        if not self._take(token):
            found = f"found {self.token!r}" if self.token else "the expression ends"
            _refuse(f"expected {token!r} after {after}, but {found}")

    def _sum(self) -> Number:
        left = self._product()
        while sign := self._take("+", "-"):
            right = self._product()
            left = _checked(_apply(lambda a, b, s=sign: a + b if s == "+" else a - b, left, right))
        return left

    def _product(self) -> Number:
        left = self._signed()
        while sign := self._take("*", "/", "//", "%", "of", "mod"):
            right = self._signed()
            if sign in ("*", "of"):
                left = _checked(_apply(lambda a, b: a * b, left, right))
                continue
            if right == 0:
                _refuse("division by zero")
            operation = {"/": lambda a, b: a / b, "//": lambda a, b: a // b}.get(sign, lambda a, b: a % b)
            left = _checked(_apply(operation, left, right))
        return left

    def _signed(self) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            _refuse(f"the expression nests deeper than {MAX_DEPTH}")
        sign = self._take("-", "+")
        result = self._signed() if sign else self._power()
        self.depth -= 1
        return -result if sign == "-" else result

    def _power(self) -> Number:
        base = self._postfix()
        if not self._take("**"):
            return base
        return _power(base, self._signed())  # to the right first: 2^3^2 is 2^9

    def _postfix(self) -> Number:
        result = self._atom()
        while True:
            if self.token == "!" and self._take("!"):
                result = _factorial(result)
            elif self.token == "%" and not self._operand_follows():
                self._take("%")
                result = _checked(result / 100)
            else:
                return result

    def _operand_follows(self) -> bool:
        """Whether the ``%`` at hand stands between two operands and so means the remainder."""
        rest = self.text[self.position :].lstrip()
        return bool(rest) and (rest[0] in "(.[π" or rest[0].isalnum()) and not re.match(r"(of|mod)\b", rest)

    def _atom(self) -> Number:
        kind, token = self.kind, self.token
        if kind == "number":
            self._advance()
            return _number(token)
        if kind == "name":
            return self._named(token)
        if self._take("("):
            result = self._sum()
            self._expect(")", "the bracket's content")
            return result
        _refuse(f"expected a number, but {f'found {token!r}' if token else 'the expression ends'}")

    def _named(self, name: str) -> Number:
        self._advance()
        if name in _NAMES:
            return _NAMES[name]
        function = _FUNCTIONS.get(name.lower())
        if function is None:
            _refuse(f"unknown name {name[:30]!r}; there are {', '.join(sorted(_FUNCTIONS))}, pi and e")
        self.in_call += 1
        self._expect("(", name)
        arguments = [self._sum()]
        while self._take(","):
            arguments.append(self._sum())
        self.in_call -= 1  # before the bracket is passed: what follows it is read outside the call
        self._expect(")", f"the arguments of {name}")
        least, most, compute = function
        if not least <= len(arguments) <= most:
            expected = str(least) if least == most else f"at least {least}" if most > 99 else f"{least} to {most}"
            _refuse(f"{name} takes {expected} argument{'s' * (expected != '1')}, got {len(arguments)}")
        try:
            return _checked(compute(*arguments))
        except (ValueError, OverflowError):
            _refuse(f"{name}({', '.join(map(show, arguments))}) has no value that can be shown")


def _refuse(text: str) -> NoReturn:
    raise ToolError(f"calculator: {text}.")


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or (exponent and abs(int(exponent)) > MAX_DIGITS):
        _refuse(f"the number {text[:20]}… has more than {MAX_DIGITS} digits")
    return _checked(Fraction(text))  # type: ignore[return-value]


def _checked(value: Number) -> Number:
    """The value, unless it is too long to go on with."""
    if isinstance(value, float):
        if not math.isfinite(value):
            _refuse("a number is too large")
        return value
    if value.numerator.bit_length() > _MAX_BITS:
        _refuse(f"a number has more than {MAX_DIGITS} digits")
    if value.denominator.bit_length() > _MAX_BITS:
        return _to_float(value)
    return value


def _to_float(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        _refuse("a number is too large")


def _apply(operation: Callable[[Number, Number], Number], left: Number, right: Number) -> Number:
    if isinstance(left, float) or isinstance(right, float):
        left, right = _to_float(left), _to_float(right)
    try:
        return operation(left, right)
    except OverflowError:
        _refuse("a number is too large")


def _power(base: Number, exponent: Number) -> Number:
    if base == 0 and exponent < 0:
        _refuse("division by zero")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        # The size of the result is known before it is computed, so 9^9^9 costs nothing.
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent.numerator) <= _MAX_BITS:
            return _checked(base**exponent.numerator)
        if (abs(base) > 1) == (exponent > 0) and math.log10(abs(base)) * exponent > MAX_DIGITS:
            _refuse(f"the power has more than {MAX_DIGITS} digits")
        return _float_power(base, exponent)
    if base < 0:
        _refuse("a power of a negative number with a fraction as exponent is not real")
    if exponent == Fraction(1, 2):
        return _sqrt(base)
    return _float_power(base, exponent)


def _float_power(base: Number, exponent: Number) -> float:
    try:
        return _checked(math.pow(_to_float(base), _to_float(exponent)))  # type: ignore[return-value]
    except (OverflowError, ValueError):
        _refuse("the power is too large")


def _sqrt(value: Number) -> Number:
    if value < 0:
        _refuse("the square root of a negative number is not real")
    if isinstance(value, Fraction):
        above, below = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if above * above == value.numerator and below * below == value.denominator:
            return Fraction(above, below)
    return math.sqrt(_to_float(value))


def _factorial(value: Number) -> Fraction:
    if value != int(value) or value < 0:
        _refuse("a factorial is of a whole number of at least 0")
    if math.lgamma(min(float(value), 1e6) + 1) > MAX_DIGITS * math.log(10):
        _refuse(f"the factorial has more than {MAX_DIGITS} digits")
    return Fraction(math.factorial(int(value)))


def _whole(value: Number) -> int:
    if value != int(value):
        _refuse(f"a whole number is expected, got {show(value)}")
    return int(value)


def _round(value: Number, places: Number = Fraction(0)) -> Fraction:
    """To the nearest, halves away from zero, as people round."""
    scale = Fraction(10) ** max(-MAX_DIGITS, min(MAX_DIGITS, _whole(places)))
    scaled = Fraction(value) * scale
    return Fraction(math.floor(abs(scaled) + Fraction(1, 2)) * (1 if scaled >= 0 else -1)) / scale


def _exactly(rounding: Callable[[Number], int]) -> Callable[[Number], Fraction]:
    return lambda value: Fraction(rounding(value))


def _real(function: Callable[..., float]) -> Callable[..., float]:
    return lambda *values: function(*map(_to_float, values))


def _log(value: Number, base: Number | None = None) -> float:
    if value <= 0 or (base is not None and (base <= 0 or base == 1)):
        _refuse("a logarithm is of a number above 0, to a base above 0 that is not 1")
    return math.log(value) if base is None else math.log(value, _to_float(base))


_ANY = 1000
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Number]]] = {
    "sqrt": (1, 1, _sqrt),
    "abs": (1, 1, abs),
    "min": (1, _ANY, lambda *values: min(values)),
    "max": (1, _ANY, lambda *values: max(values)),
    "sum": (1, _ANY, lambda *values: _checked(_total(values))),
    "mean": (1, _ANY, lambda *values: _checked(_total(values) / len(values))),
    "round": (1, 2, _round),
    "floor": (1, 1, _exactly(math.floor)),
    "ceil": (1, 1, _exactly(math.ceil)),
    "factorial": (1, 1, _factorial),
    "gcd": (1, _ANY, lambda *values: Fraction(math.gcd(*map(_whole, values)))),
    "lcm": (1, _ANY, lambda *values: _lcm([_whole(value) for value in values])),
    "pow": (2, 2, _power),
    "mod": (2, 2, lambda a, b: _apply(lambda x, y: x % y, a, b) if b != 0 else _refuse("division by zero")),
    "log": (1, 2, _log),
    "ln": (1, 1, _log),
    "log2": (1, 1, lambda value: _log(value, Fraction(2))),
    "log10": (1, 1, lambda value: _log(value, Fraction(10))),
    "exp": (1, 1, _real(math.exp)),
    "sin": (1, 1, _real(math.sin)),
    "cos": (1, 1, _real(math.cos)),
    "tan": (1, 1, _real(math.tan)),
}


def _total(values: tuple[Number, ...]) -> Number:
    total: Number = Fraction(0)
    for value in values:
        total = _checked(_apply(lambda a, b: a + b, total, value))
    return total


def _lcm(values: list[int]) -> Fraction:
    result = 1
    for value in values:
        result = math.lcm(result, value)
        _checked(Fraction(result))
    return Fraction(result)
