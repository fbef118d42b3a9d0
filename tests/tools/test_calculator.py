"""The calculator is exact where it can be, bounded everywhere, and says what is wrong."""

from __future__ import annotations

import ast
import inspect
import operator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yardstick import within

from agentrl.tools import CalculatorTool, ToolError
from agentrl.tools.builtin import calculator
from agentrl.tools.builtin.calculator import MAX_DIGITS, MAX_LENGTH, evaluate, show


def compute(expression: str) -> str:
    return show(evaluate(expression))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("2^3^2", "512"),
        ("-2^2", "-4"),
        ("2 ** -2", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("1/3 + 1/6", "0.5"),
        ("1/3", "0.333333333333"),
        ("-7 // 2", "-4"),
        ("-0.25 * 1", "-0.25"),
        ("2.5e3 / 1e-2", "250000"),
        ("1,234,567.5 + 1", "1234568.5"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("[1 + 2] * 3", "9"),
        ("5!", "120"),
        ("123456789012345678901234567890 * 2", "246913578024691357802469135780"),
        ("1.0325 ^ 360", "100097.151374"),
        ("1.0000001 ^ 100000", "1.01005016659"),
        ("4 ^ 0.5", "2"),
        ("0 ^ 0", "1"),
        ("1 ^ 1e150", "1"),
        ("0.5 ^ 3000", "0"),
        ("2 * pi", "6.28318530718"),
    ],
)
def test_arithmetic(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("5%", "0.05"),
        ("15% of 80", "12"),
        ("200 * 15%", "30"),
        ("200 + 50%", "200.5"),
        ("(10 + 10)%", "0.2"),
        ("10 % 3", "1"),
        ("10 %(3)", "1"),
        ("-7 % 3", "2"),
        ("7 mod 4", "3"),
        ("10% * 10 % 3", "1"),
        ("1 / 5%", "20"),
        ("3!%^2", "0.0036"),
        ("50% of mod(7, 4)", "1.5"),
        ("max(1,234, 5) + 1,234 % 1,000", "468"),
        ("007 + 1.005", "8.005"),
    ],
)
def test_percent_and_remainder(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sqrt(2)", "1.41421356237"),
        ("sqrt(9/16)", "0.75"),
        ("abs(-3.5)", "3.5"),
        ("min(3, 1, 2) + max(1, 5)", "6"),
        ("min(4) + max(5)", "9"),
        ("sum(1, 2, 3) / mean(1, 2, 3)", "3"),
        ("round(2.5)", "3"),
        ("round(-2.5)", "-3"),
        ("round(2.675, 2)", "2.68"),
        ("round(1234, -2)", "1200"),
        ("floor(-1.5) + ceil(1.2)", "0"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("pow(2, 10) + mod(7, 4)", "1027"),
        ("log(100, 10) + ln(e) + log2(8) + log10(1000)", "9"),
        ("exp(0) + sin(0) + cos(0) + tan(0)", "2"),
        ("factorial(20)", "2432902008176640000"),
        ("MAX(1, 2)", "2"),
    ],
)
def test_functions(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "the expression is empty"),
        ("1 +", "cannot be read"),
        ("(1 + 2", "'(' was never closed"),
        ("1 2", "cannot be read"),
        ("1;2", "cannot be read"),
        ("1/0", "division by zero"),
        ("1 // (2 - 2)", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ^ -1", "division by zero"),
        ("mod(1, 0)", "division by zero"),
        ("sqrt(-1)", "no such value"),
        ("(-8) ^ (1/3)", "not real"),
        ("ln(0)", "no such value"),
        ("log(5, 1)", "division by zero"),
        ("gcd(1.5, 2)", "a whole number is expected, got 1.5"),
        ("0.5!", "a whole number is expected, got 0.5"),
        ("(-1)!", "no such value"),
        ("round(1, 2, 3)", "round does not take 3 arguments"),
        ("sqrt(1, 2)", "sqrt does not take 2 arguments"),
        ("speed(3)", "unknown name 'speed'; there are abs,"),
        ("__import__('os').system('ls')", "is no arithmetic"),
        ("(1).__class__", "is no arithmetic"),
        ("'a' * 9", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("1 if 1 else 2", "is no arithmetic"),
        ("[i for i in 9]", "is no arithmetic"),
        ("sqrt", "unknown name 'sqrt'"),
        ("x", "unknown name 'x'"),
    ],
)
def test_what_cannot_be_computed_is_explained(expression, message):
    with pytest.raises(ToolError) as caught:
        compute(expression)
    assert message in caught.value.message
    assert caught.value.type == "execution"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1+" * (MAX_LENGTH // 2) + "1", f"at most {MAX_LENGTH} are read"),
        ("(" * 400 + "1" + ")" * 400, "nest"),
        ("9" * (MAX_DIGITS + 1), f"more than {MAX_DIGITS} digits"),
        ("1e201", f"more than {MAX_DIGITS} digits"),
        ("1e0000000999999999", f"more than {MAX_DIGITS} digits"),
        ("9**9**9", f"more than {MAX_DIGITS} digits"),
        ("9**9**9**9", f"more than {MAX_DIGITS} digits"),
        ("2^700", f"more than {MAX_DIGITS} digits"),
        ("(1/9)^-99999999", f"more than {MAX_DIGITS} digits"),
        ("1.5^1e9", f"more than {MAX_DIGITS} digits"),
        ("1e150 * 1e150", f"more than {MAX_DIGITS} digits"),
        ("factorial(1e100)", f"more than {MAX_DIGITS} digits"),
        ("9!!", f"more than {MAX_DIGITS} digits"),
        ("lcm(" + ", ".join(str(10**40 + n) for n in range(15)) + ")", f"more than {MAX_DIGITS} digits"),
        ("exp(1000)", f"more than {MAX_DIGITS} digits"),
        ("1e199 * exp(400) * exp(400)", f"more than {MAX_DIGITS} digits"),
    ],
)
def test_every_bound_acts_at_once(expression, message):
    def refused() -> str:
        with pytest.raises(ToolError) as caught:
            compute(expression)
        return caught.value.message

    said = within(30, refused)
    assert message in said
    assert len(said) < 300


def test_what_reaches_a_bound_still_works():
    assert compute("(" * 100 + "1" + ")" * 100) == "1"
    assert compute("1+" * 499 + "1") == "500"
    assert compute("-" * 300 + "1") == "1"
    assert len(compute("10^199")) == MAX_DIGITS


def test_a_long_fraction_goes_on_as_a_float():
    assert compute("+".join(f"1/{n}" for n in range(101, 201))) == "0.690653430482"


def test_there_is_no_eval():
    names = {n.id for n in ast.walk(ast.parse(inspect.getsource(calculator))) if isinstance(n, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__", "getattr"}


def test_the_schema_is_short_and_the_tool_takes_an_expression():
    function = CalculatorTool().schema()["function"]
    assert function["name"] == "calculator"
    assert list(function["parameters"]["properties"]) == ["expression"]
    assert len(str(function)) < 500
    assert CalculatorTool()(expression="1+1") == "2"


NUMBERS = st.integers(-50, 50)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv}


def nested(inner):
    return st.tuples(st.sampled_from(sorted(OPERATORS)), inner, inner)


def written(tree) -> str:
    return str(tree) if isinstance(tree, int) else f"({written(tree[1])} {tree[0]} {written(tree[2])})"


def exact(tree):
    # A floor is an int, and an int divided by an int is a float.
    return Fraction(tree if isinstance(tree, int) else OPERATORS[tree[0]](exact(tree[1]), exact(tree[2])))


@given(tree=st.recursive(NUMBERS, nested, max_leaves=12))
@settings(max_examples=200, deadline=None)
def test_agrees_with_exact_arithmetic(tree):
    try:
        expected = exact(tree)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(written(tree))
    else:
        assert evaluate(written(tree)) == expected


@given(text=st.text(max_size=60) | st.text("0123456789.,+-*/%^!()e mod of sqrt", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_computed_or_refused(text):
    try:
        result = compute(text)
    except ToolError as error:
        assert error.type == "execution"
    else:
        assert result
