"""Scores answers of the Reasoning Gym datasets whose own scorers would evaluate an answer as Python.

Each score is the library's for the same answer; an answer is parsed as what it must be, a list or an expression, and
nothing in it is ever called, looked up or run. What only evaluation could understand (``sum([1, 2])``) is worth what
the library gives to an answer that raises.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_MAX_LIST_CHARS, _MAX_SUM_CHARS, _MAX_EXPRESSION_CHARS = 20_000, 1_000, 5_000
# A power's exponent, and the bits of any number in it.
_MAX_EXPONENT, _MAX_BITS = 200, 10_000
_INTEGERS = re.compile(r"\b\d+\b")
_SYMBOL = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,20}")
_NAMES = ("pi", "E", "I")
_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "exp", "log", "ln", "sqrt", "Abs", "Integral"),
)

Score = Callable[[str, Mapping[str, Any], Any], float]


class AnswerError(ValueError):
    """An answer is not the list or the expression that it must be."""


def string_insertion(answer: str, entry: Mapping[str, Any], _config: Any) -> float:
    """1.0 for the string, 0.1 for the list of its characters."""
    return _exact_or_listed(answer, entry["answer"], lambda value: "".join(value), 0.1)


def spiral_matrix(answer: str, entry: Mapping[str, Any], _config: Any) -> float:
    """1.0 for the numbers, 0.1 for a list of them."""
    return _exact_or_listed(answer.strip(), entry["answer"].strip(), lambda value: " ".join(map(str, value)), 0.1)


def binary_matrix(answer: str, entry: Mapping[str, Any], _config: Any) -> float:
    """1.0 for the matrix, 0.1 for the list of its rows."""
    return _exact_or_listed(answer, entry["answer"], _board, 0.1)


def n_queens(answer: str, entry: Mapping[str, Any], _config: Any) -> float:
    """1.0 for a solution, 0.5 for the list of its rows."""
    solutions = entry["metadata"]["valid_answers"]
    if answer in solutions:
        return 1.0
    try:
        return 0.5 if _board(parse_list(answer)) in solutions else 0.0
    except (AnswerError, TypeError):
        return 0.0


def puzzle24(answer: str, _entry: Mapping[str, Any], config: Any) -> float:
    """1.0 for an expression of four numbers in the range that makes 24."""
    try:
        solved = int(parse_arithmetic(answer.strip())) == 24
    except (AnswerError, ArithmeticError):
        return 0.01
    numbers = [int(digits) for digits in _INTEGERS.findall(answer)]
    in_range = all(config.min_value <= number <= config.max_value for number in numbers)
    return 1.0 if solved and len(numbers) == 4 and in_range else 0.01


def countdown(answer: str, entry: Mapping[str, Any], _config: Any) -> float:
    """1.0 for an expression of exactly the given numbers that makes the target, 0.05 for any other."""
    try:
        value = float(parse_arithmetic(answer.strip()))
    except (AnswerError, ArithmeticError):
        return 0.01
    numbers, target = [int(digits) for digits in _INTEGERS.findall(answer)], entry["metadata"]["target"]
    is_close = abs(value - target) <= 1e-6 + 1e-5 * abs(target)
    return 1.0 if is_close and sorted(numbers) == sorted(entry["metadata"]["numbers"]) else 0.05


def polynomial_multiplication(answer: str, entry: Mapping[str, Any], _config: Any) -> float:
    """1.0 for the expanded product."""
    try:
        return float(parse_expression(answer) == parse_expression(entry["answer"]))
    except (AnswerError, ArithmeticError, TypeError):
        return 0.0


def integration(answer: str, entry: Mapping[str, Any], _config: Any) -> float:
    """1.0 for an antiderivative of the integrand."""
    import sympy

    variable = sympy.Symbol(entry["metadata"]["variable"])
    try:
        derivative = sympy.diff(parse_expression(answer, (variable.name, "C")), variable)
        integrand = parse_expression(entry["metadata"]["integrand"], (variable.name,))
        return float(sympy.simplify(derivative - integrand) == 0)
    except (AnswerError, ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):
        return 0.0


#: The scores by dataset.
SCORES: dict[str, Score] = {
    "binary_matrix": binary_matrix,
    "countdown": countdown,
    "intermediate_integration": integration,
    "n_queens": n_queens,
    "polynomial_multiplication": polynomial_multiplication,
    "puzzle24": puzzle24,
    "simple_integration": integration,
    "spiral_matrix": spiral_matrix,
    "string_insertion": string_insertion,
}
_SYMBOLIC = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
# Looked through: what they evaluate is their own text, never an answer.
_REVIEWED = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"}
_EVALUATORS = {"eval", "exec", "parse_expr", "sympify", "parse_latex", "lambdify", "unsafe_load"}


def why_confined(name: str, dataset_class: type) -> str | None:
    """Return why answers to the dataset ``name`` may be judged in a sandbox alone; None where they may anywhere."""
    if name in _SYMBOLIC:
        return f"dataset {name} leaves the policy's expressions to SymPy, which bounds neither work nor memory"
    if name not in SCORES and name not in _REVIEWED and _evaluates(dataset_class):
        return f"dataset {name} may evaluate the policy's answers as Python"
    return None


def _evaluates(dataset_class: type) -> bool:
    """Whether the module of the class calls anything that evaluates text; so does one that cannot be read."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[dataset_class.__module__]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return True
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any((getattr(call, "id", None) or getattr(call, "attr", "")) in _EVALUATORS for call in calls)


def parse_list(text: str) -> Any:
    """Return the list, tuple, string or number that ``text`` writes as a Python literal. AnswerError for all else."""
    if len(text) > _MAX_LIST_CHARS:
        raise AnswerError(f"longer than {_MAX_LIST_CHARS} characters")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise AnswerError("no Python literal") from None


def parse_arithmetic(text: str) -> Fraction:
    """Return the exact value of numbers under ``+ - * / **`` and parentheses. AnswerError for anything else.

    ZeroDivisionError for a division by zero. Exponents are integers up to 200 and numbers have at most 10 000 bits.
    """
    return Fraction(_value(_parsed(text, _MAX_SUM_CHARS), _number, _no_name, _no_call))


def parse_expression(text: str, symbols: tuple[str, ...] = ()) -> Any:
    """Return the SymPy expression of numbers, symbols, constants and common functions under ``+ - * / **``.

    ``symbols`` are taken as such, also where SymPy knows the name otherwise. AnswerError for anything else.
    """
    import sympy

    def name(identifier: str) -> Any:
        if identifier in symbols:
            return sympy.Symbol(identifier)
        if identifier in _NAMES:
            return getattr(sympy, identifier)
        if hasattr(sympy, identifier) or not _SYMBOL.fullmatch(identifier):
            raise AnswerError(f"{identifier} is no symbol")
        return sympy.Symbol(identifier)

    def number(value: int | float, written: str) -> Any:
        if isinstance(value, int):
            return sympy.Integer(value)
        # SymPy has decimals of any exponent, and writes a thousand million digits for some.
        if "e" in written.lower() and not 1e-300 < value < 1e300:
            raise AnswerError("a decimal out of range")
        return sympy.Float(written)

    def call(function: str, arguments: list[Any]) -> Any:
        if function not in _FUNCTIONS or function in symbols or not 1 <= len(arguments) <= 2:
            raise AnswerError(f"{function} is no function")
        return getattr(sympy, function)(*arguments)

    return _value(_parsed(text, _MAX_EXPRESSION_CHARS), number, name, call)


def _parsed(text: str, max_chars: int) -> tuple[ast.expr, str]:
    if len(text) > max_chars:
        raise AnswerError(f"longer than {max_chars} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body, text.strip()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise AnswerError("no expression") from None


def _value(
    parsed: tuple[ast.expr, str],
    number: Callable[[int | float, str], Any],
    name: Callable[[str], Any],
    call: Callable[[str, list[Any]], Any],
) -> Any:
    """The value of an expression whose leaves are made by ``number``, ``name`` and ``call``."""
    tree, text = parsed

    def value(node: ast.expr) -> Any:
        # A long sum is a deep tree on its left side, which needs no recursion.
        rest: list[tuple[ast.operator, ast.expr]] = []
        while isinstance(node, ast.BinOp):
            rest.append((node.op, node.right))
            node = node.left
        result = leaf(node)
        for operator, right in reversed(rest):
            result = _combined(operator, result, value(right))
        return result

    def leaf(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as constant) if type(constant) is not bool:
                return number(constant, (ast.get_source_segment(text, node) or "").replace("_", ""))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return +value(operand)
            case ast.Name(id=identifier):
                return name(identifier)
            case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
                return call(function, [value(argument) for argument in arguments])
            case _:
                raise AnswerError(f"{type(node).__name__} is no part of an expression")

    try:
        return value(tree)
    except RecursionError:
        raise AnswerError("nested too deeply") from None


def _combined(operator: ast.operator, left: Any, right: Any) -> Any:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow():
            return _power(left, right)
        case _:
            raise AnswerError(f"{type(operator).__name__} is no operator of an expression")


def _power(base: Any, exponent: Any) -> Any:
    """``base ** exponent`` where that is no bomb: SymPy, too, multiplies numbers out at once."""
    if isinstance(base, Fraction):
        if exponent.denominator != 1:
            raise AnswerError("only integer exponents")
        exponent, coefficients = int(exponent), [base]
    else:
        coefficients = [part for part in base.atoms() if part.is_Rational]
    size = abs(exponent) if isinstance(exponent, int) or exponent.is_number else 0
    if size != 0 and not size <= _MAX_EXPONENT:
        raise AnswerError(f"an exponent beyond {_MAX_EXPONENT}")
    bits = max((max(abs(int(_part(c, 0))), int(_part(c, 1))).bit_length() for c in coefficients), default=0)
    if size != 0 and bits * size > _MAX_BITS:
        raise AnswerError(f"a number of more than {_MAX_BITS} bits")
    return base**exponent


def _part(number: Any, which: int) -> int:
    return int((number.numerator, number.denominator)[which])


def _number(value: int | float, written: str) -> Fraction:
    return Fraction(value) if isinstance(value, int) else Fraction(_float_text(written))


def _float_text(written: str) -> str:
    """A decimal as written; one with an exponent could be a number of a billion digits."""
    if "e" in written.lower():
        raise AnswerError("no exponents in decimals")
    return written


def _no_name(identifier: str) -> Any:
    raise AnswerError(f"{identifier} is no number")


def _no_call(function: str, _arguments: list[Any]) -> Any:
    raise AnswerError(f"{function} is no number")


def _exact_or_listed(answer: str, right: str, written: Callable[[Any], str], partly: float) -> float:
    if answer == right:
        return 1.0
    try:
        return partly if written(parse_list(answer)) == right else 0.0
    except (AnswerError, TypeError, ValueError):
        return 0.0


def _board(rows: Any) -> str:
    return "\n".join(" ".join(map(str, row)) for row in rows)
