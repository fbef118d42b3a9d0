"""The answers to the problems of :mod:`~agentrl.envs.builtin.python.problems`, made in milliseconds."""

from __future__ import annotations

import functools
import itertools


def prime_sum(low: int, high: int) -> int:
    sieve = bytearray([1]) * (high + 1)
    sieve[:2] = b"\0\0"
    for n in range(2, int(high**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, high + 1, n)))
    return sum(n for n in range(low, high + 1) if sieve[n])


def last_digits(a: int, b: int, c: int, d: int, modulus: int) -> int:
    return (pow(a, b, modulus) + pow(c, d, modulus)) % modulus


def divisors(high: int, count: int) -> int:
    found = [0] * (high + 1)
    for n in range(1, high + 1):
        for multiple in range(n, high + 1, n):
            found[multiple] += 1
    return found.count(count)


def change(amount: int, coins: list[int]) -> int:
    ways = [1] + [0] * amount
    for coin in coins:
        for value in range(coin, amount + 1):
            ways[value] += ways[value - coin]
    return ways[amount]


def lattice(x: int, y: int, blocked: list[list[int]]) -> int:
    closed = {tuple(point) for point in blocked}
    ways = [[0] * (y + 1) for _ in range(x + 1)]
    for i, j in itertools.product(range(x + 1), range(y + 1)):
        if (i, j) not in closed:
            ways[i][j] = 1 if i == j == 0 else (ways[i - 1][j] if i else 0) + (ways[i][j - 1] if j else 0)
    return ways[x][y]


def strings(length: int, letters: int, run: int) -> int:
    ending = [letters] + [0] * (run - 2)  # texts by the length of the run they end with
    for _ in range(length - 1):
        ending = [sum(ending) * (letters - 1), *ending[:-1]]
    return sum(ending)


def recurrence(first: int, second: int, p: int, q: int, r: int, n: int, modulus: int) -> int:
    before, last = first % modulus, second % modulus
    for _ in range(n - 2):
        before, last = last, (p * last + q * before + r) % modulus
    return last


@functools.lru_cache(maxsize=1 << 18)
def _collatz_steps(n: int) -> int:
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def collatz(low: int, high: int) -> int:
    return max(range(low, high + 1), key=lambda n: (_collatz_steps(n), -n))


def look_and_say(start: int, steps: int) -> int:
    digits = str(start)
    for _ in range(steps):
        digits = "".join(f"{len(list(run))}{digit}" for digit, run in itertools.groupby(digits))
    return len(digits)


def substrings(text: str) -> int:
    # A substring that starts at i is new when it is longer than what i shares with any start before it.
    return sum(
        len(text) - i - max((_shared(text[i:], text[j:]) for j in range(i)), default=0) for i in range(len(text))
    )


def _shared(first: str, second: str) -> int:
    return next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def common(first: str, second: str) -> int:
    row = [0] * (len(second) + 1)
    for letter in first:
        above = row
        row = [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if letter == other else max(above[j + 1], row[j]))
    return row[-1]


def cipher(text: str, shift: int) -> int:
    return sum(chr((ord(letter) - 97 + shift) % 26 + 97) in "aeiou" for letter in text)


def circle(people: int, step: int) -> int:
    left = 0  # counted from 0, in a circle of one
    for size in range(2, people + 1):
        left = (left + step) % size
    return left + 1


def cells(size: int, last: int, alive: list[int], steps: int) -> int:
    ring = [int(cell in alive) for cell in range(size)]
    for _ in range(steps):
        ring = [ring[cell - 1] ^ ring[(cell + 1) % size] for cell in range(last + 1)]
    return sum(ring)


def walk(moves: str) -> int:
    done = ""
    for move in moves:
        done = done + done if move == "R" else done + move
    x = y = 0
    seen = {(0, 0)}
    for move in done:
        x, y = x + (move == "E") - (move == "W"), y + (move == "N") - (move == "S")
        seen.add((x, y))
    return len(seen)
