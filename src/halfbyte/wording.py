"""Numbers in sentences: what is printed says "1 launch" and "2 launches"."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return "1 layer", "1,200 layers": a number, its thousands apart, and what it counts.

    Args:
        number: how many.
        noun: of one.
        plural: of several; None for `noun` with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
