"""The divisors of a number, for tests that try all degrees."""


def divisors(number: int) -> list[int]:
    """Return them in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]
