"""How numbers are written, in every table, page and sentence."""

NOTHING = 1e-12
"""Below this a number is what rounding left of zero: nothing here lives on such a scale."""


def format_cell(value: object) -> str:
    """A number with four significant digits, anything else as it is, nothing for a missing value."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return "0" if abs(value) < NOTHING else f"{value:.4g}"


def signed(value: float, digits: int = 2) -> str:
    """A change with its sign; without one where it rounds to zero, which has none."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]
