"""A number with its noun, which is in the singular where there is one of it."""


def counted(number: int, noun: str) -> str:
    """For example "1 probe" and "1,024 configs"; of a noun whose plural takes an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
