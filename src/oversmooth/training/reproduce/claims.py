"""The table of claims: everything about a claim is said here before it is checked, with the day on which it was written."""

from oversmooth.errors import UnknownName
from oversmooth.training.reproduce import survey, survey_tables, survey_verdicts, trained, training_verdicts
from oversmooth.training.reproduce.claim import Claim, Observations
from oversmooth.training.reproduce.comparisons import (
    ACCURACY,
    AGAINST_BASELINES,
    BASELINES,
    BOTH,
    CHANGE,
    CONDITIONS,
    CONTROLS,
    MEASURED,
    NATS,
    OWN,
    compares,
)
from oversmooth.training.reproduce.experiments import DEEP, MINI_BERT, POSITIVE
from oversmooth.training.reproduce.materials import Materials
from oversmooth.training.reproduce.tuning import OURS

WRITTEN = "2026-11-18"
"""The present form. What was changed when, and what was known by then: docs/reproducibility.md."""
HUB_MODELS = (
    "google/vit-base-patch16-224",
    "facebook/deit-base-patch16-224",
    "facebook/dinov2-base",
    "openai/clip-vit-base-patch32",
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-base",
    "albert/albert-base-v2",
    "openai-community/gpt2",
    "Qwen/Qwen3-0.6B",
)
"""Both fields, encoders and decoders, shared layers, and a recent language model."""


def _recipes(names: tuple[str, ...], variants: tuple[str, ...], more: str = "") -> tuple[str, ...]:
    return tuple(
        f"oversmooth train {name} --variant {variant} --seed {seed}{more}"
        for name in names
        for variant in variants
        for seed in (0, 1, 2)
    )


_SURVEY = tuple(f"oversmooth report {name} -o {name.split('/')[-1]}.html" for name in HUB_MODELS)
_IMAGES = ("cifar100", "imagenet-deit-ti", "imagenet-deit-s")
_SHORT = {"cpu": "nothing beyond claim 2, with its runs of vanilla", "full": "minutes on one GPU"}
_UNCONSTRAINED = ((DEEP, ("vanilla",)), (MINI_BERT[-1], ("vanilla",)))


def _parametrization(materials: Materials) -> Observations:
    return {"runs": trained.training_numbers(materials, trained.PARAMETRIZATION)}


def _vision(materials: Materials) -> Observations:
    return {"runs": trained.training_numbers(materials, trained.VISION), "rates": materials.validation}


def _language(materials: Materials) -> Observations:
    return {"runs": trained.training_numbers(materials, trained.LANGUAGE), "rates": materials.validation}


def _baselines(materials: Materials) -> Observations:
    return {
        "runs": trained.training_numbers(materials, trained.AGAINST),
        "chosen": [{"variant": chosen}] if (chosen := trained.chosen_of_ours(materials)) else [],
        "rates": materials.validation,
    }


CLAIMS = (
    Claim(
        number=1,
        name="similarity",
        written=WRITTEN,
        statement="Over depth, token features of pretrained models grow more alike in some models and less in others.",
        protocol="Mean cosine between tokens at the embedding and after the last layer, on 16 inputs of each model with its "
        "own preprocessing; per model a studentised bootstrap interval of the difference over inputs, at half a per cent or "
        "less. Models whose tokenizer does not know 5% of the tokens are left out.",
        unit="a pretrained model",
        confirmed_if="it clearly rises in one model and clearly falls in another",
        refuted_if="it clearly goes one way in all models, and they are so many that at most one in ten of such models can "
        "go the other way (95%): 29 or more",
        does_not_show="that these models stand for all: they are those at hand. Texts are built in, and so are pictures, "
        "unless models come with their own.",
        cost={"cpu": "a few minutes", "full": "minutes and about 5 GB of downloads"},
        commands=_SURVEY,
        observe=survey.similarity_over_depth,
        decide=survey_verdicts.similarity,
        tabulate=survey_tables.similarity,
    ),
    Claim(
        number=2,
        name="eigenvalue",
        written=WRITTEN,
        statement="Whether a layer smooths is decided by the dominating eigenvalue of its update, hence by H = W_V W_O.",
        protocol="Per model, the share of layers in which the exponent at measured attention (rung 0) has the sign of the "
        "measured change of log(HFC/LFC), minus the share that the model's own majority answer gets right; sign flips over "
        "models that have layers of both kinds. Layers with shared weights count once. Models trained here are listed apart, "
        "every rung beside rung 0.",
        unit="a pretrained model that has layers of both kinds",
        confirmed_if="the difference is clearly above zero over models",
        refuted_if="it is clearly below zero: the majority answer is the better one",
        does_not_show="anything about infinite depth, where the theorem holds: this is about single layers. A model whose "
        "layers all smooth cannot speak for the theorem: its own majority is always right.",
        cost={"cpu": "a few minutes, and the runs of vanilla", "full": "minutes on one GPU"},
        commands=_SURVEY,
        observe=survey.dominating_eigenvalue,
        decide=survey_verdicts.eigenvalue,
        tabulate=survey_tables.eigenvalue,
        tests=survey_verdicts.eigenvalue_tests,
        needs=_UNCONSTRAINED,
    ),
    Claim(
        number=3,
        name="skip",
        written=WRITTEN,
        statement="Without the skip connection every layer smooths (proved in the paper for one head).",
        protocol="The same layers with the skip taken out of the operator, at the attention of two inputs: for one head a "
        "theorem that is only checked; several heads can leave it where their maps cancel in what tokens share. Layers with "
        "shared weights count once. And forward passes of the real models with the skips around attention, or around both "
        "sub-blocks, taken out: last cosine on four inputs.",
        unit="a layer",
        confirmed_if="every layer smooths; as examples prove nothing, the verdict is then «theorem, checked»",
        refuted_if="a layer sharpens or stays neutral at measured attention, which with one head none can",
        does_not_show="how a model behaves that was trained without skips: taking them out leaves one that nobody trained.",
        cost=_SHORT,
        commands=_SURVEY,
        observe=survey.without_skip,
        decide=survey_verdicts.skip,
        tabulate=survey_tables.skip,
        needs=_UNCONSTRAINED,
    ),
    Claim(
        number=4,
        name="norm-signs",
        written=WRITTEN,
        statement="The sign of the normalization weights can change whether a layer smooths.",
        protocol="Pre-norm layers of models that nobody constrained: share of negative weights in the norm before attention, "
        "and the exponent with those turned positive, both at the attention of the same two inputs. Beside it, sharpened "
        "models trained with and without positive norms.",
        unit="a layer with negative norm weights",
        confirmed_if="the regime of such a layer changes from one that was told to another",
        refuted_if="none of 29 or more such layers moves its exponent by more than 0.01",
        does_not_show="how often it happens elsewhere. Layers whose norm follows the sum are left out: there it changes no "
        "modulus.",
        cost=_SHORT,
        commands=_SURVEY,
        observe=survey.sign_of_norms,
        decide=survey_verdicts.norm_signs,
        tabulate=survey_tables.norm_signs,
        needs=(*_UNCONSTRAINED, (DEEP, ("sharpen",)), (POSITIVE, ("sharpen",))),
    ),
    Claim(
        number=5,
        name="parametrization",
        written=WRITTEN,
        statement="H = V diag(lambda) V^-1 with lambda in [-1, 0] sharpens and with lambda in [0, 1] smooths.",
        protocol="What attention itself does to log(HFC/LFC), summed over layers, in models trained from scratch on digits "
        "(12 layers) and text (mini-bert): its sign in sharpened and in smoothed models, and against the same form with free "
        "signs. The cosine after the last layer, layers that smooth and the form at measured scale are listed beside it.",
        unit="a seed, on digits with its own test fold",
        confirmed_if="in both fields attention sharpens in sharpened models and smooths in smoothed ones, and sharpen lies "
        "above free and smooth below: all of it, the largest p counts",
        refuted_if="in one of them it does the opposite: the smallest p of the four signs, times four",
        does_not_show="what feed-forward blocks do to the same features, nor that features end sharper. Learning rates are "
        "those that scores prefer, and differ between variants.",
        cost={"cpu": "about 30 minutes", "full": "the runs of claims 6 and 7"},
        commands=_recipes(("cifar100", "pile-bert-steps"), trained.FORMS),
        observe=_parametrization,
        decide=training_verdicts.parametrization,
        tests=training_verdicts.parametrization_tests,
        tabulate=trained.what_attention_does,
        compares=tuple(
            compare
            for setting in (DEEP.name, MINI_BERT[-1].name)
            for against in (OWN, "free")
            for compare in compares(setting, "attention", CHANGE, ("sharpen", against), ("smooth", against))
        )
        + MEASURED,
        needs=trained.PARAMETRIZATION,
    ),
    Claim(
        number=6,
        name="vision",
        written=WRITTEN,
        statement="Models that are made to smooth or sharpen generalise at least as well as vanilla in image "
        "classification, and better in one of the two; also with fewer data, corrupted images and more layers.",
        protocol="Test accuracy on digits, five folds so that every image is tested once: 6 layers and 25 epochs, a tenth of "
        "the data, 12 layers; and 60 images of every fold under 75 corruptions. Learning rate of every variant chosen on "
        "validation images among the training images of one fold, for 6 and for 12 layers; a tenth of the data takes that of "
        "6 layers. Against vanilla, and against the same form with free signs, so that a gain is the sign's.",
        unit="a fold with its own seed",
        confirmed_if="in every condition one of the two is better than vanilla and than the free form, and the other not "
        "worse than vanilla by the margin: all of it, the largest p counts (twice in each condition, for the choice of one)",
        refuted_if="in one condition both are worse than vanilla: the smallest p of the four conditions, times four",
        equal_if="in every condition both differ from vanilla by clearly less than it",
        does_not_show="anything about large images or large models: digits are 8 x 8 pixels. Rates are chosen on some of the "
        "images that are tested, for all variants alike. On digits vanilla is near the ceiling: at the spread that was seen, "
        "not even a model without errors would have been clearly better, so the claim could not have been confirmed.",
        cost={
            "cpu": "about an hour",
            "full": "weeks on one GPU; projected in benchmarks/results/train_throughput.json",
        },
        commands=(
            *_recipes(_IMAGES, trained.FORMS),
            *_recipes(("cifar100",), trained.FORMS, " --fraction 0.1"),
            *_recipes(("cifar100-deep",), trained.FORMS),
        ),
        observe=_vision,
        decide=training_verdicts.vision,
        tests=training_verdicts.vision_tests,
        compares=tuple(
            compare for setting, metric in CONDITIONS for compare in compares(setting, metric, ACCURACY, *BOTH)
        )
        + CONTROLS,
        needs=trained.VISION,
    ),
    Claim(
        number=7,
        name="language",
        written=WRITTEN,
        statement="In language, forcing a model to smooth or to sharpen does not help: loss and scores are worse.",
        protocol="Masked-token loss of mini-bert after 150, 300 and 600 steps against vanilla and the free form; the largest "
        "budget decides, the others show the trend. Learning rate of every variant chosen at the largest budget on text that "
        "is neither trained on then nor what the losses are of.",
        unit="a seed",
        confirmed_if="at the largest budget both losses are higher than vanilla's: the larger p counts",
        refuted_if="one of them is lower than vanilla's and than the free form's: twice the smaller p",
        equal_if="both differ from vanilla's by clearly less than it",
        does_not_show="what happens at convergence, in large models, or in fine-tuning: SuperGLUE on small encoders has a "
        "table of its own.",
        cost={"cpu": "about 30 minutes", "full": "12 x 24 hours on one RTX 4090, and fine-tuning"},
        commands=(
            *_recipes(("pile-bert",), trained.FORMS),
            *(
                f"oversmooth finetune pile-bert-{v}-seed0/model --tasks superglue --seeds 0,1,2 --out superglue-{v}"
                for v in trained.FORMS
            ),
        ),
        observe=_language,
        decide=training_verdicts.language,
        tests=training_verdicts.language_tests,
        compares=tuple(
            compare
            for experiment in MINI_BERT
            for compare in compares(experiment.name, "loss", NATS, *BOTH, is_primary=experiment is MINI_BERT[-1])
        ),
        needs=trained.LANGUAGE,
    ),
    Claim(
        number=8,
        name="baselines",
        written=WRITTEN,
        statement="The parametrization compares well with AttnScale and FeatScale.",
        protocol="Test accuracy on digits (five folds) of sharpen or smooth, whichever validation images prefer, against "
        "both baselines; everybody at the learning rate that its own validation chose.",
        unit="a fold with its own seed",
        confirmed_if="it is not worse than either of them by the margin: the larger p counts",
        refuted_if="one of them is better (twice the smaller p), unless it is also confirmed: better by less than the margin",
        does_not_show="how other baselines compare.",
        cost={"cpu": "about 15 minutes", "full": "six runs of cifar100 beside those of claim 6"},
        commands=_recipes(("cifar100",), (*OURS, *BASELINES)),
        observe=_baselines,
        decide=training_verdicts.baselines,
        tests=training_verdicts.baselines_tests,
        compares=AGAINST_BASELINES,
        decides_by=training_verdicts.is_of_the_chosen,
        needs=trained.AGAINST,
    ),
)


FAMILY = 2 * sum(claim.tests is not None for claim in CLAIMS)
"""Tests of being confirmed and of being refuted, of all claims: what Holm's correction is over, whichever are looked at."""


def chosen(name: str) -> tuple[Claim, ...]:
    """A claim by name or number; `all` for every one."""
    if name == "all":
        return CLAIMS
    found = tuple(claim for claim in CLAIMS if name in (claim.name, str(claim.number)))
    if not found:
        raise UnknownName("claim", name, ("all", *(claim.name for claim in CLAIMS)))
    return found
