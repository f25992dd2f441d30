"""What claims share: analyses and runs kept on disk, and the learning rates that were chosen.

A run that is there is not trained again and one that was killed goes on from its last checkpoint, so that `reproduce` can
be stopped and started at any time.

OUT/survey/   the table, as `oversmooth survey` writes it; `oversmooth report OUT/survey` shows it
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oversmooth.analysis import Stage, analyze
from oversmooth.claims.experiments import RATES, TUNINGS, Experiment, PlannedRun, Rates, settings_of, train_all
from oversmooth.data.batches import Batch
from oversmooth.data.options import DataOptions
from oversmooth.environment.files import json_object, make_folder, read_text_file, require_free
from oversmooth.errors import BrokenFile, MissingDependency, NotLive, NotWritable, WrongBatch
from oversmooth.measurement.passes import open_live
from oversmooth.models.open import LiveModel, open_model, open_source
from oversmooth.recipes.run_folder import MANIFEST, Manifest, first_difference, read_manifest, read_run_folder
from oversmooth.recipes.train import WHAT_IFS
from oversmooth.results import Analysis, Progress, no_progress
from oversmooth.surveys.survey import survey
from oversmooth.surveys.table import SurveyTable
from oversmooth.surveys.worker import Options, content_of

Row = dict[str, Any]
INPUTS = 16
"""Inputs of every pretrained model."""
MOST_UNKNOWN = 0.05
"""Share of unknown tokens above which a model is left out: what happens to them says nothing about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedModel:
    """A pretrained model that runs, and inputs of its own kind, one per batch."""

    live: LiveModel
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished run: its results, the analysis of its model, and what was evaluated on the way."""

    folder: str
    manifest: Manifest
    analysis: Analysis
    evaluations: Mapping[float, Mapping[str, float]] = field(default_factory=dict)
    """By epoch."""

    def last(self, metric: str) -> float:
        """A metric after the last layer."""
        assert self.analysis.measurement is not None, "a trained model can be run"
        mean = self.analysis.measurement.curve(metric)[-1].mean
        assert mean is not None, f"{metric} has a value"
        return mean

    def attention_changes(self) -> list[float]:
        """What attention did to `log(HFC/LFC)`, layer by layer; below 0 it smoothed."""
        assert self.analysis.prediction is not None, "a trained model can be run"
        return [layer.measured for layer in self.analysis.prediction.layers if layer.measured is not None]


@dataclass
class ClaimContext:
    """What the checks of one `reproduce` share."""

    out: Path
    targets: tuple[str, ...]
    """Pretrained models, for the survey; one that is named twice counts once."""
    is_quick: bool = False
    """A smoke check: everything runs, nothing converges."""
    trains: bool = True
    """Whether runs that are missing are trained; otherwise what rests on them counts as not run."""
    rates: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """The learning rate that was chosen, by the experiment that chose it and the variant; `None` for the recipe's own."""
    validation: list[Row] = field(default_factory=list)
    """What every variant came to at every rate on held-out training data: `validation_accuracy` or `validation_loss`."""
    train_all: Callable[[Sequence[PlannedRun], Path, Progress], None] = train_all
    stage: Stage = lambda name: no_progress
    _first_with: dict[str, str] = field(default_factory=dict)
    """The first target that was opened with some weights, by their hash."""
    _analyses: dict[str, Analysis] = field(default_factory=dict)
    _live: dict[str, tuple[SurveyedModel | None, str]] = field(default_factory=dict)
    _trained: dict[PlannedRun, Trained] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.targets = tuple(dict.fromkeys(self.targets))
        short = {target: "/".join([part for part in target.split("/") if part][-2:]) for target in self.targets}
        uses = Counter(short.values())
        self.names = {target: name if uses[name] == 1 else target for target, name in short.items()}
        """The last two parts of each path or hub id; all of them where two would have the same."""

    def surveyed(self) -> list[tuple[str, Analysis]]:
        """Every usable pretrained model by a short name, analysed once."""
        return [(self.names[target], self._analysed(target)) for target in self.targets if self._opened(target)[0]]

    def live_models(self) -> list[tuple[str, SurveyedModel]]:
        """Every usable pretrained model by a short name, ready to run on inputs of its own kind."""
        found = [(self.names[target], self._opened(target)[0]) for target in self.targets]
        return [(name, live) for name, live in found if live is not None]

    def left_out(self) -> list[Row]:
        """Models that are not surveyed, and why."""
        reasons = [(self.names[target], self._opened(target)[1]) for target in self.targets]
        return [{"model": name, "reason": reason} for name, reason in reasons if reason]

    def _opened(self, target: str) -> tuple[SurveyedModel | None, str]:
        if target not in self._live:
            source = open_source(target)
            # Equal for equal weights, whatever their place; the target itself where that cannot be told.
            content = content_of(source, source.stacks(), Options()) or target
            first = self._first_with.setdefault(content, target)
            is_copy = first != target
            self._live[target] = (None, f"it has the weights of {self.names[first]}") if is_copy else _open(target)
        return self._live[target]

    def _analysed(self, target: str) -> Analysis:
        if target not in self._analyses:
            self.stage(f"Analysing {self.names[target]}")
            self._analyses[target] = analyze(target, max_samples=8, solve=2, what_ifs=WHAT_IFS)
        return self._analyses[target]

    def require_place(self, resume: bool) -> None:
        """Refuses a folder that holds something, unless a stopped run of the same scale shall go on there."""
        if not resume:
            require_free(self.out)
            return
        found = self.earlier(MANIFEST)
        if found and found.get("scale") != self.scale:
            what = f"results of scale {found['scale']!r}" if "scale" in found else "something else than a reproduction"
            raise NotWritable(str(self.out), f"it holds {what}", f"Give a new folder for scale {self.scale!r}.")

    @property
    def scale(self) -> str:
        return "quick, a smoke check" if self.is_quick else "cpu"

    def earlier(self, name: str) -> dict[str, Any]:
        """What an earlier run wrote into a file of the folder; empty where there is none."""
        path, what = self.out / name, "what `oversmooth reproduce` wrote"
        return json_object(read_text_file(path, what), str(path), what) if path.is_file() else {}

    def require_targets(self) -> None:
        """Refuses a model that is not there or not declared, before anything is trained."""
        for target in self.targets:
            open_source(target).stacks()

    def hashes(self) -> dict[str, str]:
        """Of the weights of every model that was analysed."""
        found = self._analyses.items()
        return {self.names[target]: analysis.inspection.provenance.weights_sha256 for target, analysis in found}

    def train(self, planned: Sequence[PlannedRun]) -> None:
        """Trains what is not there yet."""
        missing = [each for each in dict.fromkeys(planned) if not self._is_finished(each)]
        if not missing or not self.trains:
            return
        make_folder(self.out / "runs")
        self.train_all(missing, self.out, self.stage("Training"))

    def there(self, planned: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Those that are finished, or will be as soon as they are asked for."""
        return [each for each in planned if self.trains or self._is_finished(each)]

    def _is_finished(self, planned: PlannedRun) -> bool:
        manifest = read_manifest(self.out / planned.folder)
        if manifest is None or not manifest.finished:
            return False
        if difference := first_difference(settings_of(manifest.model_dump(mode="json")), planned.settings):
            if not self.trains:
                return False  # another run is not the planned one; only a new one would need its place
            key, was, now = difference
            change = f"{key.removeprefix('recipe.')} was {was!r} and would be {now!r}"
            reason = f"it holds a run with other settings than are planned now: {change}"
            raise NotWritable(str(self.out / planned.folder), reason, "Remove that run, or give a new folder.")
        return True

    def scores(self, planned: PlannedRun) -> Mapping[str, float]:
        """What the run came to, without the analysis of its model."""
        self.train([planned])
        return self._manifest(planned).results

    def _manifest(self, planned: PlannedRun) -> Manifest:
        manifest = read_manifest(self.out / planned.folder)
        assert manifest is not None, "a finished run has one"
        return manifest

    def trained(self, planned: PlannedRun) -> Trained:
        """The run, from the disk where it is there; read once, because several claims look at it."""
        if planned not in self._trained:
            self.train([planned])
            self._trained[planned] = self._read(planned)
        return self._trained[planned]

    def _read(self, planned: PlannedRun) -> Trained:
        folder = self.out / planned.folder
        run = read_run_folder(folder)
        if run.analysis is None or run.analysis.measurement is None or run.analysis.prediction is None:
            expected = "a finished run with the whole analysis of its model"
            raise BrokenFile(str(folder), expected, "none", "Remove that run: it is trained again.")
        evaluations = {
            point["epoch"]: {name: value for name, value in point.items() if name.startswith("eval_")}
            for point in run.points
            if "epoch" in point and any(name.startswith("eval_") for name in point)
        }
        manifest = self._manifest(planned)
        return Trained(folder=planned.folder, manifest=manifest, analysis=run.analysis, evaluations=evaluations)


def _open(target: str) -> tuple[SurveyedModel | None, str]:
    """The model, or why it is left out: it cannot be run, or its tokenizer does not know our texts."""
    # Of texts that the tokenizer does not know the share is wanted, instead of random ids in their place.
    reading = DataOptions(batch_size=1, max_samples=INPUTS, allow_unknown=True)
    try:
        live, data = open_live(open_model(target), None, "reproduce", reading)
        batches = tuple(data.batches)
        facts = data.facts(sha256="", sequences=len(batches), tokens=0, skipped=0)
    except (NotLive, WrongBatch) as error:
        return None, str(error).splitlines()[0]
    if facts.origin == "random ids":
        return None, "it has no tokenizer, so that it could only be run on random ids"
    if facts.text is not None and facts.text.unknown_share >= MOST_UNKNOWN:
        return None, f"its tokenizer does not know {facts.text.unknown_share:.0%} of the tokens of our texts"
    return SurveyedModel(live=live, batches=batches), ""


# --- the learning rate of every variant ---

OURS = ("sharpen", "smooth")
"""What validation has to choose between in claim 8."""


def rate_runs(tuning: Experiment, variants: Sequence[str], is_quick: bool) -> dict[tuple[str, float], PlannedRun]:
    """One run per variant and rate."""
    if is_quick and not tuning.is_in_quick:
        return {}
    experiment = tuning.for_scale(is_quick)
    rates = RATES[1:2] if is_quick else RATES  # a smoke check has nothing to choose
    variants = [variant for variant in variants if not is_quick or variant in OURS]
    found = {(variant, rate): experiment.planned(variant, 0, rate) for variant in variants for rate in rates}
    return {key: replace(run, label=f"{run.label}-{key[1]:g}", analyzes=False) for key, run in found.items()}


def chosen_rates(materials: ClaimContext, tuned: Mapping[Experiment, Sequence[str]]) -> Rates:
    """Of every variant the rate that is best on held-out training data, of equal ones the smallest; by who chose it.

    A variant of which not all rates were tried has none. A smoke check, which tries one, leaves the others at the recipe's.
    """
    planned = {tuning: rate_runs(tuning, variants, materials.is_quick) for tuning, variants in tuned.items()}
    materials.train([run for runs in planned.values() for run in runs.values()])
    materials.validation = []
    rates: dict[Experiment, dict[str, float | None]]
    rates = {tuning: {**_chosen(materials, tuning, runs)} for tuning, runs in planned.items()}
    if materials.is_quick:
        rates = {each: {variant: rates[each].get(variant) for variant in tuned[each]} for each in tuned}
    return {tuning.name: chosen for tuning, chosen in rates.items()}


def _chosen(
    materials: ClaimContext, tuning: Experiment, runs: Mapping[tuple[str, float], PlannedRun]
) -> dict[str, float]:
    there = {key: run for key, run in runs.items() if materials.there([run])}
    scores = {key: materials.scores(run).get(f"eval_{tuning.score}") for key, run in there.items()}
    found = {key: score for key, score in scores.items() if score is not None}
    materials.validation += [
        {"chosen_by": tuning.name, "variant": variant, "rate": rate, f"validation_{tuning.score}": round(score, 6)}
        for (variant, rate), score in found.items()
    ]
    chosen = {}
    for variant in dict.fromkeys(variant for variant, _ in runs):
        rates = [rate for of, rate in runs if of == variant]
        tried = {rate: found[variant, rate] for rate in rates if (variant, rate) in found}
        if len(tried) == len(rates):
            chosen[variant] = best_rate(tried, tuning.score)
    return chosen


def best_rate(scores: Mapping[float, float], score: str) -> float:
    """The rate with the highest accuracy or the lowest loss; of equal ones the smallest."""
    better = 1 if score == "accuracy" else -1
    return max(scores, key=lambda rate: (better * scores[rate], -rate))


def rates_table(validation: Sequence[Row], needs: Sequence[tuple[Experiment, Sequence[str]]]) -> list[Row]:
    """For readers: what each variant of these experiments came to at every rate, and which rate that chose for it."""
    wanted: dict[tuple[str, str], Experiment] = {}
    for experiment, variants in needs:
        if experiment.tuned_by is not None:
            wanted |= {(experiment.tuned_by.name, variant): experiment.tuned_by for variant in variants}
    rates = sorted({row["rate"] for row in validation})
    found = []
    for (name, variant), tuning in wanted.items():
        scores = {
            row["rate"]: row[f"validation_{tuning.score}"]
            for row in validation
            if (row["chosen_by"], row["variant"]) == (name, variant)
        }
        if scores:
            chosen = best_rate(scores, tuning.score)
            edge = ", the largest tried" if chosen == max(scores) and len(scores) > 1 else ""
            rounded = {rate: round(score, 3) for rate, score in scores.items()}
            columns = {f"{tuning.score} at {rate:g}": rounded.get(rate) for rate in rates}
            found.append({"chosen on": name, "variant": variant, **columns, "chosen": f"{chosen:g}{edge}"})
    return found


# --- the survey of everything at hand, beside claims 1 and 2 ---

TABLE = "survey"
COLUMNS = ("target", "status", "n_layers", "sharpening_share", "smoothing_share", "mean_tendency")
SEED = re.compile(r"-seed\d+$")


def weights_at_hand(materials: ClaimContext) -> list[Row]:
    """A row per pretrained model and per condition of the runs that are there; none where Parquet cannot be written.

    A table that a stopped run left is continued: what it holds is not computed again.
    """
    names = {target: ("pretrained", materials.names[target]) for target in materials.targets}
    names |= {str(run / "model"): ("trained", SEED.sub("", run.name)) for run in _finished_runs(materials.out)}
    if not names:
        return []
    try:
        survey(tuple(names), materials.out / TABLE, engine="serial")
    except MissingDependency:
        return []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in SurveyTable(materials.out / TABLE).models(COLUMNS):
        if row["target"] in names and row["mean_tendency"] is not None:
            groups.setdefault(names[row["target"]], []).append(row)
    return [_summary(kind, name, groups[kind, name]) for kind, name in sorted(groups)]


def _finished_runs(out: Path) -> list[Path]:
    """All but those that only chose a learning rate."""
    choosing = tuple(f"{tuning.name}-" for tuning in TUNINGS)
    runs = (path for path in (out / "runs").glob("*") if not path.name.startswith(choosing))
    folders = sorted(path for path in runs if (path / "model" / "config.json").is_file())
    return [folder for folder in folders if (manifest := read_manifest(folder)) is not None and manifest.finished]


def _summary(kind: str, name: str, rows: list[Row]) -> Row:
    """Of models that differ in their seed only: how many of their layers sharpen or smooth by their weights, how much."""
    layers = sum(row["n_layers"] for row in rows)
    shares = {
        name: round(sum(row[name] * row["n_layers"] for row in rows) / layers, 4)
        for name in ("sharpening_share", "smoothing_share")
    }
    return {
        "model": name,
        "kind": kind,
        "models": len(rows),
        "layers": layers,
        **shares,
        "mean_tendency": round(sum(row["mean_tendency"] for row in rows) / len(rows), 4) + 0.0,  # never -0.0
    }
