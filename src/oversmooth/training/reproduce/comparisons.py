"""What is compared with what, by which margin: primary comparisons, and controls that say where a difference comes from."""

from oversmooth.training.reproduce.claim import Compare
from oversmooth.training.reproduce.experiments import DEEP, DIGITS, TENTH
from oversmooth.training.reproduce.tuning import OURS

OWN = ""
"""Compared with nothing: what a variant does by itself."""
ACCURACY, NATS, CHANGE = 0.02, 0.05, 0.1
"""Margins: shares of images, nats of loss, and log(HFC/LFC) over all layers together."""


def compares(setting: str, metric: str, margin: float, *pairs: tuple[str, str], **more: object) -> tuple[Compare, ...]:
    return tuple(
        Compare(setting=setting, metric=metric, of=of, against=against, margin=margin, **more)  # type: ignore[arg-type]
        for of, against in pairs
    )


BOTH = (("sharpen", "vanilla"), ("smooth", "vanilla"), ("sharpen", "free"), ("smooth", "free"))
CONDITIONS = (
    (DIGITS.name, "accuracy"),
    (DIGITS.name, "corruption_accuracy"),
    (TENTH.name, "accuracy"),
    (DEEP.name, "accuracy"),
)
_WHY = {
    ("free", "vanilla"): "the form itself, without a sign",
    ("matched", "vanilla"): "size and orthogonality at the start, without the form",
    ("sharpen-start", "free"): "the sign at the start only",
    ("smooth-start", "free"): "the sign at the start only",
    ("no-identity", "free"): "a smaller H without its identity part",
    ("sharpen", "no-identity"): "the identity part -I/2",
    ("sharpen-measured", "sharpen"): "the interval of the map that acts",
}
CONTROLS = tuple(
    Compare(setting=DIGITS.name, metric=metric, of=of, against=against, margin=ACCURACY, is_primary=False, note=note)
    for metric in ("accuracy", "early_accuracy")
    for (of, against), note in _WHY.items()
) + tuple(
    Compare(
        setting=DIGITS.name,
        metric="early_accuracy",
        of=of,
        against=against,
        margin=ACCURACY,
        is_primary=False,
        note="early speed, a statement of its own",
    )
    for of, against in BOTH
)
BASELINES = ("attnscale", "featscale")
AGAINST_BASELINES = tuple(
    compare
    for of in OURS
    for compare in compares(
        DIGITS.name,
        "accuracy",
        ACCURACY,
        *((of, other) for other in BASELINES),
        note="if it is the variant that validation chose",
    )
)
MEASURED = compares(
    DEEP.name,
    "attention",
    CHANGE,
    ("sharpen-measured", "sharpen"),
    ("smooth-measured", "smooth"),
    is_primary=False,
    note="the interval of the map that acts",
)
