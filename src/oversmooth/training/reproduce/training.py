"""Claims 5 to 8: what the parametrization does to models that are trained with it, paired over seeds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from oversmooth.training.reproduce.claim import Evidence, Finding, Judgement
from oversmooth.training.reproduce.paired import Difference, paired_difference
from oversmooth.training.reproduce.workshop import Trained, Wanted, Workshop

VARIANTS = ("vanilla", "sharpen", "smooth")
BASELINES = ("attnscale", "featscale")
Number = Callable[[Trained], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One recipe under one condition."""

    recipe: str
    label: str = ""
    fraction: float = 1.0
    overrides: tuple[str, ...] = ()

    def wanted(self, variant: str, seed: int) -> Wanted:
        return Wanted(
            recipe=self.recipe,
            variant=variant,
            seed=seed,
            fraction=self.fraction,
            overrides=self.overrides,
            label=self.label,
        )

    def every(self, seeds: Sequence[int], variants: Sequence[str] = VARIANTS) -> list[Wanted]:
        return [self.wanted(variant, seed) for variant in variants for seed in seeds]

    @property
    def words(self) -> str:
        return f"{self.recipe} {self.label}".strip()


DIGITS = Setting(
    recipe="digits",
    label="short",
    overrides=("training.epochs=5", "evaluation.corruptions=true", "evaluation.corruption_images=100"),
)
FEWER_DATA = Setting(
    recipe="digits",
    label="tenth",
    fraction=0.1,
    overrides=("training.epochs=30", "watch.evaluate_every=30", "watch.save_every=30"),
)
MORE_LAYERS = Setting(recipe="digits", label="24-layers", overrides=("training.epochs=5", "model.depth=24"))
MINI_BERT = Setting(recipe="mini-bert", label="short", overrides=("training.steps=300",))


def accuracy(run: Trained) -> float:
    return run.manifest.results["eval_accuracy"]


def robustness(run: Trained) -> float:
    return run.manifest.results["corruption_accuracy"]


def masked_loss(run: Trained) -> float:
    return run.manifest.results["eval_loss"]


def last_cosine(run: Trained) -> float:
    return run.last("cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The runs of one setting, and differences of one number to vanilla."""

    values: Mapping[str, Sequence[float]]
    """By variant, one per seed."""
    rows: tuple[dict[str, object], ...]
    differences: Mapping[str, Difference]
    runs: tuple[str, ...]


def compared(workshop: Workshop, setting: Setting, number: Number, what: str) -> Compared:
    """Every variant on every seed, beside vanilla."""
    values, folders = _values(workshop, setting, number, VARIANTS)
    differences = {v: paired_difference(values[v], values["vanilla"]) for v in VARIANTS[1:]}
    rows = tuple({"setting": setting.words, **row} for row in _rows(values, differences, what, "minus_vanilla"))
    return Compared(values=values, rows=rows, differences=differences, runs=folders)


def _values(
    workshop: Workshop, setting: Setting, number: Number, variants: Sequence[str]
) -> tuple[dict[str, list[float]], tuple[str, ...]]:
    """One number of every run by variant, in the order of seeds, and the folders of the runs."""
    runs = {v: [workshop.trained(setting.wanted(v, seed)) for seed in workshop.seeds] for v in variants}
    values = {variant: [number(run) for run in found] for variant, found in runs.items()}
    return values, tuple(run.folder for found in runs.values() for run in found)


def _rows(
    values: Mapping[str, Sequence[float]], differences: Mapping[str, Difference], what: str, difference: str
) -> Iterator[dict[str, object]]:
    """Mean and single values of each variant, and its difference where there is one."""
    for variant, found in values.items():
        yield {
            "variant": variant,
            what: round(sum(found) / len(found), 4),
            "seeds": " ".join(f"{value:.4f}" for value in found),
            difference: str(differences[variant]) if variant in differences else "",
        }


def _judged(differences: Iterable[Difference]) -> Judgement:
    """Confirmed if all are clearly positive, refuted if one is clearly negative."""
    signs = [difference.sign for difference in differences]
    return "confirmed" if min(signs) > 0 else "refuted" if min(signs) < 0 else "undecided"


def parametrization_decides(workshop: Workshop) -> Finding:
    """Claim 5: mean cosine after the last layer, sharpened below vanilla below smoothed, in both fields."""
    found = [compared(workshop, setting, last_cosine, "last_cosine") for setting in (DIGITS, MINI_BERT)]
    apart = [paired_difference(each.values["smooth"], each.values["sharpen"]) for each in found]
    words = ", ".join(
        f"{setting.recipe} {difference}" for setting, difference in zip((DIGITS, MINI_BERT), apart, strict=True)
    )
    signs = [(each.differences["sharpen"].sign, each.differences["smooth"].sign) for each in found]
    between = sum(sign == (-1, 1) for sign in signs)
    return Finding(
        judgement=_judged(apart),
        because=f"cosine of smooth minus that of sharpen: {words}; vanilla lies clearly between in {between} of 2",
        evidence=tuple(
            Evidence(title=f"Last-layer cosine, {each.rows[0]['setting']}", rows=each.rows) for each in found
        ),
        runs=tuple(folder for each in found for folder in each.runs),
    )


def vision_accuracy(workshop: Workshop) -> Finding:
    """Claim 6: accuracy with all data, a tenth of it, corrupted images and twice the layers."""
    conditions = (
        ("accuracy", DIGITS, accuracy),
        ("accuracy", FEWER_DATA, accuracy),
        ("corruption_accuracy", DIGITS, robustness),
        ("accuracy", MORE_LAYERS, accuracy),
    )
    found = [compared(workshop, setting, number, what) for what, setting, number in conditions]
    best = [max(difference.sign for difference in each.differences.values()) for each in found]
    judgement: Judgement = (
        "confirmed" if all(sign > 0 for sign in best) else "refuted" if all(sign < 0 for sign in best) else "undecided"
    )
    better = sum(sign > 0 for sign in best)
    return Finding(
        judgement=judgement,
        because=f"a controlled model is clearly better than vanilla in {better} of {len(best)} conditions",
        evidence=tuple(
            Evidence(title=f"{what.replace('_', ' ')}, {setting.words}", rows=each.rows)
            for (what, setting, _), each in zip(conditions, found, strict=True)
        ),
        runs=tuple(dict.fromkeys(folder for each in found for folder in each.runs)),
    )


def language_loss(workshop: Workshop) -> Finding:
    """Claim 7: masked-token loss, which forcing either way raises."""
    found = compared(workshop, MINI_BERT, masked_loss, "eval_loss")
    words = ", ".join(f"{variant} {difference}" for variant, difference in found.differences.items())
    return Finding(
        judgement=_judged(found.differences.values()),
        because=f"masked-token loss against vanilla: {words}",
        evidence=(Evidence(title="Masked-token loss", rows=found.rows),),
        runs=found.runs,
    )


def against_baselines(workshop: Workshop) -> Finding:
    """Claim 8: accuracy of the better controlled model against AttnScale and FeatScale."""
    variants = (*VARIANTS[1:], *BASELINES)
    values, folders = _values(workshop, DIGITS, accuracy, variants)
    ours = max(VARIANTS[1:], key=lambda variant: sum(values[variant]))
    differences = {baseline: paired_difference(values[ours], values[baseline]) for baseline in BASELINES}
    rows = tuple(_rows(values, differences, "accuracy", f"{ours}_minus_it"))
    words = ", ".join(f"{baseline} {difference}" for baseline, difference in differences.items())
    return Finding(
        judgement=_judged(differences.values()),
        because=f"accuracy of {ours} minus that of {words}",
        evidence=(Evidence(title="Accuracy beside the baselines", rows=rows),),
        runs=folders,
    )
