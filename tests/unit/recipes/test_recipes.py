"""Recipes: the shipped ones are valid and hold the published numbers; a wrong one is refused with its key."""

import pytest

from oversmooth.errors import BadRecipe, BadValue, BrokenFile, CannotControl, UnknownName
from oversmooth.recipes.recipe import overridden, shipped_recipes, warm_cosine
from oversmooth.recipes.train import kind_of, load_recipe
from oversmooth.recipes.variants import VARIANTS, require_variant
from oversmooth.recipes.vision import learning_rate, steps_of

VISION = ("digits", "cifar100", "cifar100-deep", "imagenet-deit-ti", "imagenet-deit-s")


def test_the_vision_recipes_are_shipped():
    assert set(VISION) <= set(shipped_recipes())


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_valid_and_begins_with_its_budget(name):
    recipe = load_recipe(name)
    first, *rest = shipped_recipes()[name].read_text().splitlines()
    assert first == f"# Budget: {recipe.budget}."
    assert rest[0].startswith("#")


@pytest.mark.parametrize("name", ["cifar100", "imagenet-deit-ti"])
def test_every_number_of_a_published_recipe_has_its_source_or_its_arithmetic_beside_it(name):
    section = ""
    for line in shipped_recipes()[name].read_text().splitlines():
        section = line.split("]")[0] if line.startswith("[") else section
        is_setting = " = " in line and section not in ("", "[watch")
        if is_setting and not line.startswith(("classes", "image_size", "padding", "crop_ratio", "workers")):
            assert "#" in line, line


def test_cifar100_has_the_published_numbers():
    recipe = load_recipe("cifar100")
    assert steps_of(recipe, 50_000 // 96) == 158_600
    sizes = recipe.model_arguments()
    assert (sizes["img_size"], sizes["patch_size"], sizes["depth"], sizes["embed_dim"]) == (32, 2, 12, 192)
    assert (sizes["num_heads"], sizes["qkv_bias"], sizes["drop_path_rate"], sizes["num_classes"]) == (
        3,
        False,
        0.1,
        100,
    )
    assert recipe.optimizer.model_dump() == {
        "learning_rate": 1.25e-4,
        "weight_decay": 0.05,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "clip_norm": 5.0,
    }
    augmentation = recipe.augmentation
    assert (augmentation.mixup, augmentation.cutmix, augmentation.mix_probability) == (1.0, 0.8, 1.0)
    assert (augmentation.rand_augment, augmentation.padding, augmentation.erasing) == ("rand-m9-n2-mstd1.0", 4, 0.0)
    assert load_recipe("cifar100-deep").model.depth == 24


def test_the_deeper_cifar100_differs_in_depth_alone():
    shallow, deep = (load_recipe(name).model_dump() for name in ("cifar100", "cifar100-deep"))
    assert shallow["model"] | {"depth": 24} == deep["model"]
    same = [name for name in shallow if name not in ("model", "budget", "expected")]
    assert [shallow[name] for name in same] == [deep[name] for name in same]


@pytest.mark.parametrize(("name", "width", "heads"), [("imagenet-deit-ti", 192, 3), ("imagenet-deit-s", 384, 6)])
def test_imagenet_has_the_published_numbers(name, width, heads):
    recipe = load_recipe(name)
    assert steps_of(recipe, 1_281_167 // 256 * 256 // 512) == 750_600
    assert (recipe.model.width, recipe.model.heads, recipe.model.patch_size) == (width, heads, 16)
    assert recipe.training.ema_decay == 0.99996
    assert recipe.augmentation.repeats == 3
    assert (recipe.augmentation.mixup, recipe.augmentation.cutmix, recipe.augmentation.erasing) == (0.8, 1.0, 0.25)


def test_patches_behind_a_convolution_are_counted_in_pixels():
    recipe = load_recipe("cifar100", ["model.stem=convolution", "model.patch_size=8"])
    assert recipe.model_arguments()["patch_size"] == 2
    with pytest.raises(BadRecipe, match=r"model.patch_size must be divisible by the stride of model.stem \(4\); got 2"):
        load_recipe("cifar100", ["model.stem=convolution"])


# --- rates ----------------------------------------------------------------------------------------------------------


def test_the_rate_of_cifar100_warms_up_before_a_whole_cosine():
    recipe, per_epoch = load_recipe("cifar100"), 520
    steps = steps_of(recipe, per_epoch)
    rates = {step: learning_rate(recipe, per_epoch, step, steps) for step in (0, 1300, 2600, 80_600, 158_600)}
    expected = {0: 0.0, 1300: 0.625e-4, 2600: 1.25e-4, 80_600: 0.625e-4, 158_600: 0.0}
    for step, rate in expected.items():
        assert rates[step] == pytest.approx(rate, abs=1e-12)


def test_the_rate_of_imagenet_is_that_of_timms_scheduler_at_every_epoch():
    import torch
    from timm.scheduler import CosineLRScheduler

    recipe, per_epoch = load_recipe("imagenet-deit-ti"), 2502
    search = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=5e-4)
    theirs = CosineLRScheduler(search, t_initial=300, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    for epoch in range(300):
        theirs.step(epoch)
        ours = learning_rate(recipe, per_epoch, epoch * per_epoch + per_epoch // 2, 750_600)
        assert ours == pytest.approx(search.param_groups[0]["lr"], rel=1e-9)


def test_without_warm_up_the_rate_starts_at_its_peak():
    rate = warm_cosine(0, peak=1.0, warmup_steps=0, cosine_steps=10, minimum=0.1, warmup_first=False)
    assert rate == 1.0
    assert warm_cosine(10, peak=1.0, warmup_steps=0, cosine_steps=10, minimum=0.1, warmup_first=False) == 0.1


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_setting_on_the_command_line_wins_and_keeps_its_type():
    settings = ["training.epochs=3", "data.mean=[0.1]", "model.qkv_bias=false", "hardware.precision=bfloat16"]
    recipe = load_recipe("digits", settings)
    assert recipe.training.epochs == 3
    assert recipe.data.mean == [0.1]
    assert recipe.model.qkv_bias is False
    assert recipe.hardware.precision == "bfloat16"


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("training.batch=-1", ("recipe digits", "training.batch must be greater than or equal to 1", "got -1")),
        ("training.batch=many", ("training.batch must be a valid integer", "got 'many'")),
        ("hardware.precision=double", ("hardware.precision", "'float32', 'bfloat16' or 'float16'", "got 'double'")),
        ("augmentation.crop=middle", ("augmentation.crop", "'none', 'pad' or 'resized'")),
        ("model.heads=3", ("model.width must be divisible by model.heads (3); got 64",)),
        ("model.patch_size=3", ("data.image_size must be divisible by model.patch_size (3); got 8",)),
        (
            "data.mean=[0.1, 0.2]",
            ("The lengths of data.mean and data.std must be 1, one number per channel", "got (2, 1)"),
        ),
        ("training.batch=95", ()),
    ],
)
def test_a_bad_value_is_refused_with_its_key_and_what_is_allowed(setting, parts):
    if not parts:
        assert load_recipe("digits", [setting]).training.batch == 95
        return
    with pytest.raises(BadRecipe) as caught:
        load_recipe("digits", [setting])
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_key_is_refused_with_those_close_to_it():
    with pytest.raises(UnknownName, match=r"'training.epoch'.*Close: training.epochs"):
        load_recipe("digits", ["training.epoch=3"])


def test_mixing_needs_pairs():
    with pytest.raises(BadRecipe, match=r"training.batch must be even, because images are mixed in pairs; got 95"):
        load_recipe("digits", ["augmentation.mixup=0.8", "training.batch=95"])


@pytest.mark.parametrize("setting", ["training.epochs", "=3", "kind.word=3"])
def test_a_setting_that_is_none_is_refused(setting):
    with pytest.raises(BadValue, match=r"--set must be section\.key=value"):
        load_recipe("digits", [setting])


def test_a_missing_key_is_named(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(shipped_recipes()["digits"].read_text().replace("classes = 10\n", ""))
    with pytest.raises(BadRecipe, match=r"data\.classes must be given\."):
        load_recipe(str(file))


def test_an_unknown_recipe_is_refused_with_the_known_ones():
    with pytest.raises(UnknownName, match=r"recipe 'digit'. Close: digits. Known: .*cifar100"):
        load_recipe("digit")


@pytest.mark.parametrize(
    ("content", "message"),
    [("kind = [", "a recipe in TOML"), ("kind = 'sound'", "Unknown kind of recipe 'sound'"), ("", "kind of recipe")],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, message):
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises((BrokenFile, UnknownName), match=message):
        load_recipe(str(file))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BrokenFile, match="No such file"):
        load_recipe(str(tmp_path / "none.toml"))


def test_overriding_leaves_the_tables_alone():
    tables = {"a": {"b": 1}}
    assert overridden(tables, ["a.b=2", "a.c=x y"]) == {"a": {"b": 2, "c": "x y"}}
    assert tables == {"a": {"b": 1}}


def test_variants_are_the_three_of_the_paper_controls_and_every_baseline():
    assert VARIANTS[:3] == ("vanilla", "sharpen", "smooth")
    assert {"attnscale", "featscale", "neutreno", "contranorm"} <= set(VARIANTS)
    assert {"free", "matched", "sharpen-start", "smooth-start", "no-identity", "sharpen-measured"} <= set(VARIANTS)
    with pytest.raises(UnknownName, match=r"variant .sharp.\. Close: sharpen"):
        require_variant("sharp")


def test_a_variant_that_no_model_of_a_recipe_has_a_place_for_is_refused_before_any_work():
    with pytest.raises(CannotControl, match="differential cannot be applied to the models of recipes: it needs pairs"):
        require_variant("differential")


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(UnknownName, match="kind of recipe 'audio'"):
        kind_of("audio")


@pytest.mark.parametrize(
    "content",
    ["a=" + "[" * 5000, "a=" + "{b=" * 5000, f"[{'.'.join('a' * 5000)}]", "a=" + "9" * 5000, "a.b=" + "[" * 500],
)
def test_brackets_tables_and_digits_by_the_thousand_are_refused_in_words(tmp_path, content):
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(
        BrokenFile, match=r"expected a recipe in TOML, found (TOML nested too deeply|Exceeds the limit)"
    ):
        load_recipe(str(file))


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000, "{a=" * 5000])
def test_a_setting_too_deep_or_too_long_to_read_is_refused(value):
    with pytest.raises(BadValue, match=r"--set training\.epochs must be a value that can be read") as said:
        load_recipe("digits", [f"training.epochs={value}"])
    assert len(str(said.value)) < 300


@pytest.mark.parametrize(
    ("recipe", "setting", "said"),
    [
        ("digits", "model.depth=1000000000", "model.depth must be less than or equal to 1000"),
        ("mini-bert", "model.layers=1000000000", "model.layers must be less than or equal to 1000"),
        ("digits", "model.width=1000000000", "model.width must be less than or equal to 65536"),
        ("digits", "model.width=65536", "The parameters of the model's blocks must be at most 1e"),
        ("digits", "data.image_size=1000000000", "data.image_size must be less than or equal to 16384"),
    ],
)
def test_sizes_of_models_have_a_bound(recipe, setting, said):
    with pytest.raises(BadRecipe, match=said):
        load_recipe(recipe, [setting])
