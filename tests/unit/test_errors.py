"""Every error builds its own text from facts: what was expected, what was found, what to do next."""

import dataclasses
import pickle

import pytest
import torch

from oversmooth import errors
from oversmooth.errors import BadValue, OversmoothError, first_line, whole_message
from oversmooth.models.open import require_target

EXAMPLES = {
    "BadValue": (("every", 0, "at least 1", "Give 1."), ("every must be at least 1; got 0.", "Give 1.")),
    "BadConfig": (("n_head", "a whole number", "'x'"), ("'n_head' of the config must be a whole number", "got 'x'")),
    "MissingValue": (("data.classes",), ("data.classes must be given",)),
    "Conflict": ((["interval", "scale_h"],), ("Give only one of interval, scale_h.",)),
    "NotSupported": (
        ("--data", "for audio models", "they are fed noise", "Leave it out."),
        ("--data is not supported for audio models: they are fed noise.", "Leave it out."),
    ),
    "ClusterUnavailable": (
        ("A cluster of Ray at 'x:1'", "nobody answered."),
        ("A cluster of Ray at 'x:1' cannot be used: nobody answered.", "--engine process"),
    ),
    "DeviceUnavailable": (("cuda", "no driver"), ("The device 'cuda' cannot be used: no driver.", "such as cpu")),
    "MissingDependency": (
        ("timm", "timm", "running it"),
        ("running it needs", "'timm'", "pip install 'oversmooth[timm]'"),
    ),
    "TargetNotFound": (
        ("x", ["a file", "the hub"]),
        ("Nothing was found at 'x'", "a file; the hub", "A target is a model"),
    ),
    "NoModelInFolder": (
        ("f", ["a.txt"], ["inner"]),
        ("Expected weights", "in 'f'", "found a.txt", "Models inside subfolders: inner", "Point at one"),
    ),
    "AmbiguousFolder": (
        ("f/", ["a.gguf", "b.gguf"]),
        ("more than one model", "a.gguf, b.gguf", "oversmooth inspect f/a.gguf"),
    ),
    "BrokenFile": (
        ("f", "a header", "nothing"),
        ("f cannot be read", "expected a header", "found nothing", "copy the file"),
    ),
    "NotWritable": (("f", "no folder"), ("f cannot be written: no folder", "existing, writable folder")),
    "FolderInUse": (("runs/a", "process 7 on host, since noon"), ("'runs/a' is in use", "process 7", "another folder")),
    "ForgottenBake": (
        ("f", "x.parametrizations.weight.0.eigenbasis.psi"),
        ("before `osm.bake`", "holds x.parametrizations", "random numbers", "then save it again"),
    ),
    "OtherStream": (
        ("m", "the output of blocks.0", "the input of blocks.1"),
        ("residual stream of m", "expected the input of blocks.1 to follow from the output of blocks.0", "nn.Module"),
    ),
    "PartialReading": (
        ("m", "partial reading: 40% of the parameters that run are in no part (a.1)"),
        ("m cannot be judged", "40%", "osm.discover(model, inputs)", "arch="),
    ),
    "OtherModel": (("model type", "bert", "gpt2"), ("another model", "model type was bert, is gpt2", "the same data")),
    "RunFailed": (
        ("oversmooth train digits", "No space left on device"),
        ("did not finish", "No space left on device", "oversmooth train digits"),
    ),
    "TokensChanged": (("block 2", 10, 7), ("features of block 2", "expected 10 tokens, found 7", "separately")),
    "UserCodeFailed": (
        ("The metric 'mine'", "raises KeyError: x"),
        ("The metric 'mine' raises KeyError: x.", "correct it, or leave it out"),
    ),
    "UnsafePickle": (
        ("f", "GLOBAL os.system"),
        ("GLOBAL os.system", "nothing was executed", "Convert it to safetensors"),
    ),
    "PackedWeights": (("f", "GPTQ"), ("(GPTQ)", "cannot be read exactly", "original float checkpoint")),
    "RemoteUnavailable": (("http://x", "timeout"), ("http://x could not be read: timeout", "Check the address")),
    "UnknownArchitecture": (
        ("lama", ["llama", "bert"]),
        (
            "model_type 'lama'",
            "Close: llama.",
            "Declared: bert, llama.",
            "--model-type",
            "docs/guides/add-an-architecture.md",
        ),
    ),
    "UnidentifiedWeights": (
        ("f", ["llama", "gemma"], ["a.weight"]),
        ("fit llama, gemma, which differ in mathematics", "--model-type", "oversmooth list architectures"),
    ),
    "NotDiscovered": (
        ("m", "it does not run", "Give inputs."),
        ("Could not discover the value path of m: it does not run.", "Give inputs."),
    ),
    "RefusedArchitecture": (
        ("m", "it has no softmax"),
        ("m has no linear value path", "it has no softmax", "no number is shown"),
    ),
    "ConfigMismatch": (
        ("the heads", 4, "33 columns", "w"),
        ("about the heads", "config says 4", "w says 33 columns", "Check that config.json belongs"),
    ),
    "AdapterMismatch": (
        ("bert", "a matrix", "a vector"),
        ("'bert'", "expected a matrix", "found a vector", "please report it"),
    ),
    "HeadsUnknown": (("w", "they are fused"), ("w does not say how many", "they are fused", "--n-heads (and --n-kv)")),
    "IncompleteWeights": (
        ("m", ["a.weight"], [("b.bias", (3,), (4,))], ["c.weight"]),
        ("1 missing (a.weight)", "b.bias: (3,) in the file, (4,) in the model", "c.weight", "random numbers"),
    ),
    "UnknownTokens": (
        (30, 100, 0.2),
        ("does not know 30 of 100 tokens (30%; at most 20%", "--ids FILE", "--allow-unknown"),
    ),
    "NotLive": (
        ("m", "verify", "no config"),
        ("`verify` has to run", "'m' cannot be run: no config", "oversmooth inspect m"),
    ),
    "UnknownName": (
        ("metric", "cosin", ["cosine", "rank"]),
        ("metric 'cosin'", "Close: cosine.", "Known: cosine, rank."),
    ),
    "NoData": (("the file", 3), ("nothing to measure in the file", "3 sequences were skipped", "give texts")),
    "UnreadableData": (("d.csv", "texts", "numbers"), ("'d.csv'", "expected texts", "found numbers")),
    "WrongBatch": (
        ("token ids", "pixels", "Use a tokenizer."),
        ("expected token ids", "found pixels", "Use a tokenizer."),
    ),
    "NoAttentionMaps": (
        ("layer 3", "rows that sum to 0.5", "Use eager attention."),
        ("attention probabilities of layer 3", "found rows that sum to 0.5", "Use eager attention."),
    ),
    "IllConditioned": ((1e9, 1e6), ("is 1e+09", "above 1e+06", "max_condition=100")),
    "CannotControl": (
        ("sharpen", "layer 2", "it has a bias", "Use smooth."),
        ("sharpen cannot be applied to layer 2: it has a bias", "Use smooth."),
    ),
    "NotReadBack": (
        ("prune", "out", "lacks weights that would be filled with random numbers: a", ("mlp_only_layers",)),
        (
            "prune wrote nothing to out",
            "lacks weights that would be filled",
            "depend on the number of a block: mlp_only_",
        ),
    ),
    "BadRecipe": (
        ("digits", BadValue("training.batch", -1, "greater than 0")),
        ("recipe digits", "training.batch must be greater than 0", "got -1", "--set KEY=VALUE"),
    ),
    "CannotResume": (
        ("out", "seed was 0 and is now 1", "Train in a new folder."),
        ("run in 'out' cannot be resumed", "seed was 0", "Train in a new folder."),
    ),
    "TrainingStopped": (
        (7, "the disk is full", 5),
        ("stopped after step 7", "the disk is full", "checkpoint of step 5 is complete", "--resume after fixing that"),
    ),
}
"""Class name to arguments and to pieces that its text must have."""


def declared() -> dict[str, type[OversmoothError]]:
    found = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    return {
        name: value
        for name, value in found.items()
        if issubclass(value, OversmoothError) and value is not OversmoothError
    }


def test_every_error_has_an_example():
    assert set(declared()) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_says_what_was_expected_what_was_found_and_what_to_do(name):
    arguments, parts = EXAMPLES[name]
    text = str(declared()[name](*arguments))
    for part in parts:
        assert part in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_is_caught_as_one_kind(name):
    arguments, _ = EXAMPLES[name]
    with pytest.raises(OversmoothError):
        raise declared()[name](*arguments)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_arrives_from_another_process_with_its_fields(name):
    arguments, _ = EXAMPLES[name]
    error = declared()[name](*arguments)
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    names = [field.name for field in dataclasses.fields(error)]
    assert [str(getattr(arrived, each)) for each in names] == [str(getattr(error, each)) for each in names]


def huge_fields(kind):
    """Arguments of an error, each as large as its type allows."""
    large = {
        "str": "long words " * 40_000,
        "object": {f"layer.{number}.weight": "x" * 400 for number in range(2000)},
        "Sequence[str]": ["a name of some length"] * 20_000,
        "int": 3,
        "float": 0.5,
    }
    values = []
    for field, example in zip(dataclasses.fields(kind), EXAMPLES[kind.__name__][0], strict=False):
        values.append(large.get(str(getattr(field.type, "__name__", field.type)), large.get(str(field.type), example)))
    return values


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_no_error_prints_more_than_a_few_lines_of_what_it_was_given(name):
    kind = getattr(errors, name)
    error = kind(*huge_fields(kind))
    for text in (str(error), f"{error.problem} {error.next_step}", str(pickle.loads(pickle.dumps(error)))):
        assert len(text) < 2600
    again = dataclasses.replace(error)
    assert vars(again) == vars(error), "the fields themselves stay whole"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({f"layer.{number}": number for number in range(1000)}, "got a dict of 1000 entries ('layer.0', 'layer.1'"),
        (torch.zeros(300, 300), "got a Tensor of shape (300, 300)"),
        (torch.nn.Linear(3, 3), "got a Linear."),
        (10**5000, "got a number of hundreds of digits"),
        (["a" * 10_000] * 3, "characters ...]"),
        ("a" * 10_000, "characters ...]"),
        (0.25, "got 0.25."),
        (b"a" * 10_000, "characters ...]"),
    ],
    ids=["dict", "tensor", "module", "number", "list", "text", "share", "bytes"],
)
def test_a_large_value_is_shown_by_its_kind_or_its_ends(value, words):
    text = str(BadValue("target", value, "a path"))
    assert words in text
    assert len(text) < 1500


def test_what_is_no_target_is_refused_in_few_words():
    with pytest.raises(BadValue, match="a pipeline or a state dict") as caught:
        require_target({f"layer.{number}.weight": number for number in range(300)})
    assert len(str(caught.value)) < 300


def test_a_silent_error_of_another_library_goes_by_its_name():
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("one\ntwo")) == "one"


def test_advice_of_torch_to_run_the_code_in_a_file_is_left_out():
    advice = "Re-running `torch.load` with `weights_only` set to `False` will likely succeed. It can result in code."
    error = ValueError(f"Weights are odd. {advice}\nDo it only if you got the file from a trusted source.")
    assert first_line(error) == whole_message(error) == "Weights are odd. It can result in code."
    assert first_line(ValueError(advice.partition(" It")[0])) == "ValueError"


def test_no_suggestion_is_made_where_nothing_is_close():
    assert "Close" not in str(errors.UnknownArchitecture("zzzzzz", ["llama", "bert"]))


def test_weights_that_fit_nothing_show_what_they_are_called():
    text = str(errors.UnidentifiedWeights("f", [], ["odd.weight"]))
    assert "fit no declared family (for example odd.weight)" in text
    assert "found = osm.discover(model, inputs); osm.inspect('f', arch=found)" in text


def test_an_empty_folder_is_said_to_hold_nothing():
    text = str(errors.NoModelInFolder("f", [], []))
    assert "found nothing." in text
    assert "Point at the folder or the file that holds the weights" in text


def test_a_long_listing_is_cut():
    text = str(errors.NoModelInFolder("f", [f"{i}.txt" for i in range(20)], []))
    assert "7.txt, ..." in text
    assert "8.txt" not in text


def test_data_that_is_empty_is_said_to_be_empty():
    assert "it is empty" in str(errors.NoData("the file", 0))
