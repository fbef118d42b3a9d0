"""``CalculatorTool``: arithmetic on exact fractions, with no ``eval`` and a bound on everything."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NoReturn

from agentrl.tools.base import Tool, ToolError

Number = Fraction | float
"""Exact while it can be: a float appears only where a root, a logarithm or an angle may not be rational."""

MAX_LENGTH = 1000
"""Characters of an expression."""
MAX_DIGITS = 200
"""Digits of any number on the way, before or after the point."""
SHOWN_DIGITS = 12
"""Significant digits of a result that is not exact."""

_LARGEST = 10**MAX_DIGITS
_SIGNS = str.maketrans(
    {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "[": "(", "]": ")", "π": " pi ", "!": " .factorial "}
)
_NAMES = {"pi": math.pi, "e": math.e, "tau": math.tau}


class CalculatorTool(Tool):
    """Computes an arithmetic expression.

    Whole numbers, decimals and fractions are exact: ``0.1 + 0.2`` is 0.3. ``15%`` is 0.15, and ``15% of 80``
    is 12; between two numbers ``%`` is the remainder. ``^`` is a power, as is ``**``; ``//`` rounds down. An
    expression that is too long or meets a number of more than 200 digits is refused before it costs anything, so no
    expression can hang.

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
    if not expression.strip():
        _refuse("the expression is empty")
    try:
        return _value(ast.parse(_as_python(expression), mode="eval").body)
    except SyntaxError as error:
        _refuse(f"the expression cannot be read ({error.msg}); write numbers, + - * / // % ^ and brackets")
    except (RecursionError, MemoryError):
        _refuse("the expression nests too deeply")
    except ZeroDivisionError:
        _refuse("division by zero")
    except OverflowError:
        _refuse(f"a number has more than {MAX_DIGITS} digits")
    except ValueError as error:
        _refuse(f"there is no such value ({error})")


def show(value: Number) -> str:
    """A value as text: exact where it has at most 12 digits behind the point, else to 12 significant digits."""
    if isinstance(value, Fraction):
        if value.denominator == 1:
            return str(value.numerator)
        if (scaled := value * 10**SHOWN_DIGITS).denominator == 1:
            digits = str(abs(scaled.numerator)).rjust(SHOWN_DIGITS + 1, "0")
            return f"{'-' * (value < 0)}{digits[:-SHOWN_DIGITS]}.{digits[-SHOWN_DIGITS:]}".rstrip("0")
    text = f"{float(value):.{SHOWN_DIGITS}g}"
    return "0" if text == "-0" else text


def _as_python(text: str) -> str:
    """An expression as Python writes it. ``%`` and ``!`` behind a number become attributes, which bind closest."""
    of_calls: list[bool] = []  # for each open bracket; a comma parts arguments inside a call, thousands elsewhere

    def plain(match: re.Match[str]) -> str:
        token = match.group()
        if token.endswith("("):
            of_calls.append(len(token) > 1 or any(of_calls))
        elif token == ")":
            del of_calls[-1:]
        elif not any(of_calls):
            return token.replace(",", "")
        return token

    text = " ".join(text.translate(_SIGNS).split())
    text = re.sub(r"[A-Za-z]\w*\s*\(|[()]|(?<!\d)\d{1,3}(?:,\d{3})+(?![\d,])", plain, text)
    text = re.sub(r"(?<![\w.])0+(?=\d)", "", text)  # Python takes no 007
    text = re.sub(r"%(?!\s*(?:[(.]\s*[(\d]|(?!of\b|mod\b)\w))", " .percent ", text)
    return re.sub(r"(?<=[\w)])\s*\bmod\b", "%", re.sub(r"\bof\b", "*", text))


def _value(node: ast.AST) -> Number:
    """The value of a part of an expression; whatever is no arithmetic is refused."""
    match node:
        case ast.Constant(value=int() | float() as number) if type(number) in (int, float):
            value: Number = Fraction(repr(number)) if math.isfinite(number) else number
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            value = _OPERATORS[type(sign)](_value(left), _value(right))
        case ast.Attribute(value=operand, attr="percent"):
            value = _value(operand) / 100
        case ast.Attribute(value=operand, attr="factorial"):
            value = _factorial(_value(operand))
        case ast.Name(id=name) if name in _NAMES:
            value = _NAMES[name]
        case ast.Call(func=ast.Name(id=name), args=operands, keywords=[]) if name.lower() in _FUNCTIONS:
            given = [_value(operand) for operand in operands]
            try:
                value = _FUNCTIONS[name.lower()](*given)
            except TypeError:
                _refuse(f"{name} does not take {len(given)} arguments")
            value = Fraction(value) if isinstance(value, int) else value
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            _refuse(f"unknown name {name[:30]!r}; there are {', '.join(sorted(_FUNCTIONS))}, pi and e")
        case _:
            _refuse(f"{ast.unparse(node)[:60]!r} is no arithmetic")
    if isinstance(value, complex):
        _refuse("a power of a negative number with a fraction as exponent is not real")
    if not abs(value) < _LARGEST:
        _refuse(f"a number has more than {MAX_DIGITS} digits")
    return float(value) if isinstance(value, Fraction) and value.denominator > _LARGEST else value


def _refuse(text: str) -> NoReturn:
    raise ToolError(f"calculator: {text}.")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        # The size of the result is known before it is computed, so 9^9^9 costs nothing.
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent) <= _LARGEST.bit_length():
            return base**exponent
    return float(base) ** float(exponent)


def _factorial(value: Number) -> Number:
    if value > MAX_DIGITS:
        raise OverflowError
    return Fraction(math.factorial(_whole(value)))


def _whole(value: Number) -> int:
    if value != int(value):
        _refuse(f"a whole number is expected, got {show(value)}")
    return int(value)


def _round(value: Number, places: Number = 0) -> Number:
    """To the nearest, halves away from zero, as people round."""
    scale = Fraction(10) ** max(-MAX_DIGITS, min(MAX_DIGITS, _whole(places)))
    return Fraction(math.floor(abs(Fraction(value)) * scale + Fraction(1, 2)) * (1 if value >= 0 else -1)) / scale


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: vars(math)[name] for name in ("sqrt", "floor", "ceil", "log", "log2", "log10", "exp", "sin", "cos")},
    "tan": math.tan,
    "ln": lambda value: math.log(value),
    "abs": abs,
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "sum": lambda *values: sum(values),
    "mean": lambda *values: sum(values) / len(values),
    "round": _round,
    "factorial": _factorial,
    "gcd": lambda *values: math.gcd(*map(_whole, values)),
    "lcm": lambda *values: math.lcm(*map(_whole, values)),
    "pow": _power,
    "mod": operator.mod,
}
