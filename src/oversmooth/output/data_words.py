"""What a model was run on, in words for the terminal and for the page."""

from oversmooth.results import DataFacts, TextFacts


def how_much(data: DataFacts) -> str:
    """How many sequences of what."""
    skipped = f", {data.skipped} skipped (fewer than two tokens)" if data.skipped else ""
    tokens = f", {data.tokens} tokens" if data.tokens else ""
    return f"{data.sequences} sequence{'s' * (data.sequences != 1)}{tokens} of {data.description}{skipped}"


def how_made(data: DataFacts) -> list[str]:
    """How the data became inputs, how much of a text was used, and what else was done; a line each."""
    lines = [f"Preprocessing: {data.preprocessing}."] if data.preprocessing else []
    lines += [text_words(data.text)] if data.text is not None else []
    return [*lines, *data.notes]


def text_words(text: TextFacts) -> str:
    """How much of a text was used, and how much of it the tokenizer knows."""
    of_all = f"of {text.characters:,} " if text.characters is not None else ""
    share = f" ({text.characters_used / text.characters:.1%})" if text.characters else ""
    rest = "" if text.characters is not None else "; the data were not read to their end"
    return (
        f"Text: {text.characters_used:,} {of_all}characters used{share}{rest}; {text.unknown_tokens:,} of {text.tokens:,} "
        f"tokens unknown ({text.unknown_share:.1%})."
    )
