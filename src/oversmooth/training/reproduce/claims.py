"""The table of claims; everything about a claim is said here before it is checked."""

from collections.abc import Sequence

from oversmooth.errors import UnknownName
from oversmooth.training.reproduce import survey, training
from oversmooth.training.reproduce.claim import Claim
from oversmooth.training.reproduce.workshop import Wanted

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
_SHORT = {"cpu": "nothing beyond claim 2", "full": "minutes on one GPU"}


def no_runs(seeds: Sequence[int]) -> list[Wanted]:
    return []


def one_seed(seeds: Sequence[int]) -> list[Wanted]:
    return training.DIGITS.every(seeds[:1])


def both_fields(seeds: Sequence[int]) -> list[Wanted]:
    return training.DIGITS.every(seeds) + training.MINI_BERT.every(seeds)


def all_conditions(seeds: Sequence[int]) -> list[Wanted]:
    settings = (training.DIGITS, training.FEWER_DATA, training.MORE_LAYERS)
    return [wanted for setting in settings for wanted in setting.every(seeds)]


def baselines(seeds: Sequence[int]) -> list[Wanted]:
    return training.DIGITS.every(seeds, (*training.VARIANTS[1:], *training.BASELINES))


CLAIMS = (
    Claim(
        number=1,
        name="similarity",
        statement="Over depth, token features of pretrained models grow more alike in some models and less in others.",
        protocol="Mean cosine between tokens at the embedding and after the last layer, 8 built-in samples per model.",
        confirmed_if="it rises in one model and falls in another",
        refuted_if="all of a representative set went one way; two embedded models are none",
        cost={"cpu": "half a minute", "full": "minutes and about 5 GB of downloads"},
        commands=_SURVEY,
        needs=no_runs,
        check=survey.similarity_over_depth,
    ),
    Claim(
        number=2,
        name="eigenvalue",
        statement="Whether a layer smooths is decided by the dominating eigenvalue of its update, hence by H = W_V W_O.",
        protocol="Exponent of every layer at measured attention (rung 0) beside the measured change of log(HFC/LFC) "
        "across its attention branch: pretrained models, and vanilla, sharpened and smoothed models trained on digits.",
        confirmed_if="the signs agree in at least three quarters of all layers, and in more than one answer for all would",
        refuted_if="they agree in at most half",
        cost={"cpu": "two minutes", "full": "minutes on one GPU"},
        commands=_SURVEY,
        needs=one_seed,
        check=survey.dominating_eigenvalue,
    ),
    Claim(
        number=3,
        name="skip",
        statement="Without the skip connection everything smooths.",
        protocol="The same layers with the skip connection taken out of the operator (what-if `no_skip`).",
        confirmed_if="every layer smooths",
        refuted_if="a layer sharpens or stays neutral",
        cost=_SHORT,
        commands=_SURVEY,
        needs=one_seed,
        check=survey.without_skip,
    ),
    Claim(
        number=4,
        name="norm-signs",
        statement="The sign of the normalization weights can change whether a layer smooths.",
        protocol="The same layers with all signs of the norm before attention flipped (what-if `flip_norms`); layers "
        "whose norm follows the sum are left out, because there it changes no modulus.",
        confirmed_if="the regime of a layer changes",
        refuted_if="no exponent moves",
        cost=_SHORT,
        commands=_SURVEY,
        needs=one_seed,
        check=survey.sign_of_norms,
    ),
    Claim(
        number=5,
        name="parametrization",
        statement="H = V diag(lambda) V^-1 with lambda in [-1, 0] sharpens and with lambda in [0, 1] smooths.",
        protocol="Mean cosine after the last layer of models trained from scratch, three seeds, paired; vision (digits, "
        "12 layers) and language (mini-bert).",
        confirmed_if="in both fields smooth lies clearly above sharpen",
        refuted_if="in one field it lies clearly below",
        cost={"cpu": "about ten minutes", "full": "the runs of claims 6 and 7"},
        commands=_recipes(("cifar100", "pile-bert-steps"), training.VARIANTS),
        needs=both_fields,
        check=training.parametrization_decides,
    ),
    Claim(
        number=6,
        name="vision",
        statement="Models that are made to smooth or sharpen generalise at least as well as vanilla in image "
        "classification, and better in one of the two; also with fewer data, corrupted images and more layers.",
        protocol="Test accuracy against vanilla, three seeds, paired: all data, a tenth of them, 15 corruptions at five "
        "severities, twice the layers. At cpu scale on digits for 5 epochs (30 of a tenth), where no variant has "
        "converged: that compares early training.",
        confirmed_if="in every condition one of the two is clearly better than vanilla",
        refuted_if="in every condition both are clearly worse",
        cost={
            "cpu": "about ten minutes",
            "full": "weeks on one GPU; projected in benchmarks/results/train_throughput.json",
        },
        commands=(
            *_recipes(_IMAGES, training.VARIANTS),
            *_recipes(("cifar100",), training.VARIANTS, " --fraction 0.1"),
            *_recipes(("cifar100-deep",), training.VARIANTS),
        ),
        needs=all_conditions,
        check=training.vision_accuracy,
    ),
    Claim(
        number=7,
        name="language",
        statement="In language, forcing a model to smooth or to sharpen does not help: loss and scores are worse.",
        protocol="Masked-token loss after the same number of steps against vanilla, three seeds, paired. At cpu scale "
        "300 steps of mini-bert, where the loss still falls fast; at full scale also SuperGLUE after fine-tuning.",
        confirmed_if="both losses are clearly higher than vanilla's",
        refuted_if="one of them is clearly lower",
        cost={"cpu": "nothing beyond claim 5", "full": "9 x 24 hours on one RTX 4090, and fine-tuning"},
        commands=(
            *_recipes(("pile-bert",), training.VARIANTS),
            *(
                f"oversmooth finetune pile-bert-{v}-seed0/model --tasks superglue --seeds 0,1,2 --out superglue-{v}"
                for v in training.VARIANTS
            ),
        ),
        needs=training.MINI_BERT.every,
        check=training.language_loss,
    ),
    Claim(
        number=8,
        name="baselines",
        statement="The parametrization compares well with AttnScale and FeatScale.",
        protocol="Test accuracy of the better of sharpen and smooth against both, three seeds, paired. At cpu scale on "
        "digits for 5 epochs, as in claim 6.",
        confirmed_if="it is clearly better than both",
        refuted_if="one of them is clearly better",
        cost={"cpu": "about three minutes", "full": "six more runs of cifar100"},
        commands=_recipes(("cifar100",), training.BASELINES),
        needs=baselines,
        check=training.against_baselines,
    ),
)


def chosen(name: str) -> tuple[Claim, ...]:
    """A claim by name or number; `all` for every one."""
    if name == "all":
        return CLAIMS
    found = tuple(claim for claim in CLAIMS if name in (claim.name, str(claim.number)))
    if not found:
        raise UnknownName("claim", name, ("all", *(claim.name for claim in CLAIMS)))
    return found
