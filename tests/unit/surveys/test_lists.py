"""What a user gives as a list, as targets."""

import pytest

from oversmooth.errors import Conflict, MissingValue, TargetNotFound, UnknownName, UnreadableData
from oversmooth.surveys.survey import listed
from tests.small_checkpoints import checkpoint


def targets(*arguments, **options):
    return [one.target for one in listed(*arguments, **options)]


def test_a_text_file_has_one_target_per_line_and_comments(tmp_path):
    (tmp_path / "list.txt").write_text("# models\nowner/a\n\n  owner/b  # the second\nowner/a\n")
    assert targets(tmp_path / "list.txt") == ["owner/a", "owner/b"]


def test_a_table_has_targets_in_a_column_that_is_found_or_named_and_years_where_it_has_them(tmp_path):
    (tmp_path / "list.csv").write_text("downloads,modelId,createdAt,other\n5,owner/a,2023-05-01,x/a\n3,owner/b,,x/b\n")
    found = listed(tmp_path / "list.csv")
    assert [(one.target, one.year) for one in found] == [("owner/a", 2023), ("owner/b", None)]
    assert targets(tmp_path / "list.csv", column="other") == ["x/a", "x/b"]
    with pytest.raises(UnknownName, match="othr"):
        targets(tmp_path / "list.csv", column="othr")


def test_a_parquet_table_is_read_alike(tmp_path):
    import pandas

    pandas.DataFrame({"id": ["owner/a", "owner/b"], "year": [2020, 2021]}).to_parquet(tmp_path / "list.parquet")
    assert [(one.target, one.year) for one in listed(tmp_path / "list.parquet")] == [
        ("owner/a", 2020),
        ("owner/b", 2021),
    ]


def test_a_folder_of_models_is_every_model_in_it(tmp_path):
    for name in ("a", "deep/b"):
        (tmp_path / name).mkdir(parents=True)
        for file, content in checkpoint("llama", 0).items():
            (tmp_path / name / file).write_bytes(content)
    (tmp_path / "single.safetensors").write_bytes(b"")
    (tmp_path / "notes.md").write_text("no model")
    (tmp_path / ".hidden").mkdir()
    expected = [tmp_path / "single.safetensors", tmp_path / "a", tmp_path / "deep/b"]
    assert targets(tmp_path) == [str(path) for path in expected]


def test_a_training_run_is_its_checkpoints_in_order(tmp_path):
    for number in (500, 1000, 20):
        (tmp_path / f"checkpoint-{number}").mkdir()
    assert targets(tmp_path) == [str(tmp_path / f"checkpoint-{number}") for number in (20, 500, 1000)]


def test_targets_can_be_given_as_they_are():
    assert targets(["owner/a", "owner/b", "owner/a"]) == ["owner/a", "owner/b"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("empty.txt", b"", "none"),
        ("bytes.txt", b"\xff\xfe\x00", "no text"),
        ("columns.csv", b"a,b\n1,2\n", "a, b"),
        ("broken.parquet", b"no parquet", "Parquet"),
    ],
)
def test_a_list_without_targets_is_refused_with_what_was_found(name, content, found, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableData, match=found):
        targets(tmp_path / name)


def test_a_list_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TargetNotFound, match="A single model is a list too"):
        targets(tmp_path / "absent.txt")


def test_a_list_or_a_query_and_not_both():
    with pytest.raises(MissingValue, match="A list, --author"):
        targets(None)
    with pytest.raises(Conflict, match="a query of the hub"):
        targets(["owner/a"], top=3)
