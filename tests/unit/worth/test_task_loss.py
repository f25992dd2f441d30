"""Losses against the models' own, and what is said where there is none."""

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import NotSupported, UnknownName, WrongBatch
from tests.contract.tiny_models import tiny_model

FEW = [{"input_ids": torch.arange(3, 15)[None] + shift} for shift in range(4)]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


def causal():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def test_the_loss_of_a_language_model_is_its_own():
    model = causal()
    with torch.no_grad():
        own = torch.stack([model(**batch, labels=batch["input_ids"]).loss for batch in FEW])
    found = osm.task_loss(model, FEW)
    assert found.task == "causal-lm"
    assert found.found.loss == pytest.approx(own.mean().item(), rel=1e-5)
    assert found.found.perplexity == pytest.approx(own.mean().exp().item(), rel=1e-5)
    assert found.counted == 4 * 11


def test_padding_is_not_asked_about():
    model = causal()
    ids = FEW[0]["input_ids"]
    padded = torch.nn.functional.pad(ids, (0, 5))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 5))
    one = osm.task_loss(model, [{"input_ids": ids}])
    two = osm.task_loss(model, [{"input_ids": padded, "attention_mask": mask}])
    assert two.counted == one.counted
    assert two.found.loss == pytest.approx(one.found.loss, rel=1e-5)


def test_a_classifier_is_judged_by_labels_and_data_without_them_are_refused():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)).eval()
    pictures, labels = torch.rand(5, 3, 16, 16), torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        logits = model(pictures).logits
    found = osm.task_loss(model, [{"pixel_values": pictures, "labels": labels}])
    assert found.found.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found.found.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    with pytest.raises(WrongBatch, match="labels, for the loss of a classifier"):
        osm.task_loss(model, [{"pixel_values": pictures}])


def test_an_embedding_model_keeps_its_own_similarities_and_needs_an_original():
    model, _ = tiny_model("bert")
    assert osm.task_loss(model, FEW, original=model).found.loss == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(WrongBatch, match="an original to compare with"):
        osm.task_loss(model, FEW)


@pytest.mark.parametrize(
    ("task", "error", "words"), [("masked-lm", NotSupported, "no head"), ("sums", UnknownName, "sums")]
)
def test_a_task_that_the_model_has_no_head_for_is_refused(task, error, words):
    model, _ = tiny_model("bert")
    with pytest.raises(error, match=words):
        osm.task_loss(model, FEW, task=task)


def test_removing_a_part_costs_what_the_model_without_it_loses():
    from oversmooth.models.hooks.removal import removed
    from oversmooth.models.open import open_source

    model = causal()
    result = osm.ablate(model, FEW, theory=False)
    assert {item.part for item in result.removals} == {"attention", "feed-forward", "block"}
    source = open_source(model)
    for item in result.removals:
        with removed(source.stacks()[0], source.store, item.layer, item.part):
            alone = osm.task_loss(model, FEW).found.loss
        assert item.loss == pytest.approx(alone, rel=1e-5)
        assert item.increase == pytest.approx(alone - result.whole.loss, abs=1e-5)
        assert "influence" in dict(item.cheap)
    assert result.passes <= 1 + 3 * (2 + 1) / 2
    assert osm.Ablation.from_dict(result.to_dict()) == result


def test_a_block_that_does_nothing_costs_nothing_and_has_no_influence():
    model = causal()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    result = osm.ablate(model, FEW, theory=False)
    (item,) = [item for item in result.removals if (item.layer, item.part) == (1, "block")]
    assert item.increase == pytest.approx(0.0, abs=1e-6)
    assert dict(item.cheap)["influence"] == pytest.approx(0.0, abs=1e-9)


# --- masked tokens --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked_folder(tmp_path_factory):
    """A masked language model with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    texts = ["the sea is wide", "a ship sails far into the night", "the old sky was calm", "is the sea blue"]
    words = dict.fromkeys(["[PAD]", "[UNK]", "[MASK]", *(word for text in texts for word in text.split(" "))])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("masked")
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**{**SIZES, "vocab_size": len(words)})).eval().save_pretrained(folder)
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


def masked_questions(folder, seed=0):
    from oversmooth.data.options import DataOptions
    from oversmooth.measurement.passes import Processed
    from oversmooth.models.open import open_model
    from oversmooth.worth.task_loss import open_judged, questions

    how = DataOptions(per_line=True, seed=seed)
    live, data, task = open_judged(open_model(str(folder)), str(folder / "texts.txt"), None, "loss", how)
    assert task == "masked-lm"
    return live, list(questions(live, data, task, how, Processed()))


def test_masked_tokens_are_drawn_from_the_seed_and_asked_for_alone(masked_folder):
    _, asked = masked_questions(masked_folder)
    for question in asked:
        ids, answers = question.inputs["input_ids"], question.answers
        is_masked = ids == 2
        assert torch.equal(is_masked, answers != -100)
        assert (is_masked.sum(1) >= 1).all()
        assert not torch.isin(answers[is_masked], torch.tensor([0, 1, 2])).any()
        assert not is_masked[question.inputs["attention_mask"] == 0].any()
    again, other = masked_questions(masked_folder)[1], masked_questions(masked_folder, seed=1)[1]
    assert torch.equal(asked[0].answers, again[0].answers)
    assert not torch.equal(asked[0].answers, other[0].answers)


def test_the_loss_of_masked_tokens_is_the_models_own(masked_folder):
    live, asked = masked_questions(masked_folder)
    with torch.no_grad():
        own = [live.model(**question.inputs, labels=question.answers).loss for question in asked]
    found = osm.task_loss(str(masked_folder), str(masked_folder / "texts.txt"), per_line=True)
    assert found.task == "masked-lm"
    assert found.found.loss == pytest.approx(own[0].item(), rel=1e-5)
    assert found.counted == int((asked[0].answers != -100).sum())
    assert found.found.perplexity == pytest.approx(own[0].exp().item(), rel=1e-5)


def test_blocks_of_a_masked_language_model_are_chosen_by_the_loss_of_the_same_masks(masked_folder, tmp_path):
    texts = str(masked_folder / "texts.txt")
    result = osm.prune(masked_folder, tmp_path / "out", texts, budget=0.5, by="loss", per_line=True)
    costs = {
        item.layer: item.loss
        for item in osm.ablate(str(masked_folder), texts, per_line=True, parts=("block",)).removals
    }
    assert result.removed == (min(costs, key=costs.get),)
    assert result.after.loss == pytest.approx(min(costs.values()), rel=1e-5)


def test_masks_need_a_tokenizer(masked_folder):
    from transformers import BertForMaskedLM

    model = BertForMaskedLM.from_pretrained(masked_folder)
    with pytest.raises(WrongBatch, match="a tokenizer with a mask token"):
        osm.task_loss(model, FEW[:1])


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = ViTConfig(
        **sizes, image_size=16, patch_size=4, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1}
    )
    folder = tmp_path_factory.mktemp("classifier")
    ViTForImageClassification(config).eval().save_pretrained(folder / "model")
    return folder


def pictures(folder, names):
    from PIL import Image

    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 255, (16, 16, 3), generator=torch.Generator().manual_seed(number)).byte().numpy()
        Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return str(folder)


PIXELS = {"size": 16, "mean": 0.5, "std": 0.5}


def test_classes_of_pictures_are_the_names_of_their_folders(classifier, tmp_path):
    names = ["dog", "cat", "dog", "dog", "cat"]
    folder = pictures(tmp_path / "named", names)
    found = osm.task_loss(str(classifier / "model"), folder, batch_size=2, **PIXELS)
    numbered = pictures(tmp_path / "numbered", [str(int(name == "dog")) for name in names])
    assert (found.task, found.counted) == ("classification", 5)
    assert found.found.loss == pytest.approx(
        osm.task_loss(str(classifier / "model"), numbered, **PIXELS).found.loss, rel=1e-5
    )
    swapped = pictures(tmp_path / "swapped", ["cat" if name == "dog" else "dog" for name in names])
    other = osm.task_loss(str(classifier / "model"), swapped, **PIXELS)
    assert other.found.accuracy == pytest.approx(1 - found.found.accuracy)


def test_classes_of_a_table_are_its_column_label(classifier, tmp_path):
    import json

    folder = pictures(tmp_path / "named", ["dog", "cat", "dog"])
    files = sorted((tmp_path / "named").rglob("*.png"))
    rows = [{"image": {"path": str(file)}, "label": int(file.parent.name == "dog")} for file in files]
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(json.dumps({**row, "image": {"bytes": None, **row["image"]}}) for row in rows))
    of_folder = osm.task_loss(str(classifier / "model"), folder, **PIXELS)
    of_table = osm.task_loss(str(classifier / "model"), str(table), **PIXELS)
    assert of_table.found.loss == pytest.approx(of_folder.found.loss, rel=1e-6)


@pytest.mark.parametrize(
    ("names", "words"), [(["."], "data without any"), (["horse"], "the class 'horse'"), (["7"], "the class '7'")]
)
def test_pictures_without_a_class_that_the_model_knows_are_refused(classifier, names, words, tmp_path):
    with pytest.raises(WrongBatch, match=words):
        osm.task_loss(str(classifier / "model"), pictures(tmp_path / "data", names), **PIXELS)
