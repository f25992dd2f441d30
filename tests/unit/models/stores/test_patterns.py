"""Patterns of configs: what they match is what Python's `re` matches, and no pattern takes long."""

import random
import re
import time

import pytest

from oversmooth.models.stores.patterns import Unmatchable, matches

NAMES = ("model.layers.12.mlp.up_proj", "model.layers.3.self_attn.q_proj", "lm_head", "", "a.b", "aaaaab")
IN_USE = (
    *(r".*gate_proj$", r".*mlp\.(gate|up|gate_up|down)_proj.*", r"model\.layers\.(1|2|3)\..*", ".*", "^lm_head$"),
    *(
        r"^model\.layers\.[0-9]+\.mlp.*",
        r"(?!.*self_attn).*proj$",
        r".*\.\d{1,3}\.self_attn\.[qkv]_proj",
        r"[^.]+_head",
    ),
    *(r"(?:a|b)+?b", r"a{2,}b", r"a{5}b", r"a{,3}", r"(a+)+$", r"\w+\.\w+$", "(?=a).b", "x*y?z"),
)


@pytest.mark.parametrize("pattern", IN_USE)
@pytest.mark.parametrize("name", NAMES)
def test_patterns_in_use_match_what_python_matches(pattern, name):
    assert matches(pattern, name) == bool(re.match(pattern, name))
    assert matches(pattern, name, whole=True) == bool(re.fullmatch(pattern, name))


def test_random_patterns_match_what_python_matches():
    rng, compared = random.Random(0), 0
    for _ in range(10_000):
        pattern = "".join(
            rng.choice(["a", "b", ".", "*", "+", "?", "(", ")", "|", "[ab]", "{2}", "^", "$", r"\."]) for _ in range(7)
        )
        name = "".join(rng.choice("ab.") for _ in range(rng.randrange(7)))
        try:
            expected = re.match(pattern, name) is not None, re.fullmatch(pattern, name) is not None
            found = matches(pattern, name), matches(pattern, name, whole=True)
        except (re.error, Unmatchable):
            continue
        assert (pattern, name, found) == (pattern, name, expected)
        compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*$", "(a|aa)+$", "((((a*)*)*)*)*b", ".*.*.*.*.*.*.*.*x", "(?!(a+)+$)(a*)*b", "(a{1,900}){1,900}b"],
)
def test_no_pattern_takes_longer_than_a_moment(pattern):
    start = time.monotonic()
    try:
        assert not matches(pattern, "a" * 200 + "!")
    except Unmatchable as error:
        assert "too long" in str(error)  # noqa: PT017 - either is right
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "(?i)a",
        "(?P<x>a)",
        r"(a)\1",
        r"\bx",
        "a**",
        "*",
        "[",
        "\\",
        "a" * 2000,
        "(" * 900,
        "[z-a]",
        "{2}",
        "(?<=a)b",
    ],
)
def test_what_is_not_read_is_refused_with_a_reason(pattern):
    with pytest.raises(Unmatchable, match=r".+"):
        matches(pattern, "a")
