"""Reading documents, splitting them and cutting them into token sequences."""

import importlib.util
import json
from pathlib import Path

import pytest
from calibrate.tiny_llama import byte_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from sglang_kvtc.calibrate.corpus import (
    BUILTIN,
    Document,
    Domain,
    domains_of,
    in_turn,
    merged_domains,
    read_documents,
    split_documents,
    token_sequences,
    tokenize,
)
from sglang_kvtc.errors import ConfigError


def documents(source: str, count: int, length: int) -> list[Document]:
    return [Document(source, f"{source}{i}", chr(65 + i) * length) for i in range(count)]


def test_builtin_text_has_prose_and_code_in_both_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    calibration, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    for part in (calibration, held_out):
        assert {document.source for document in part} == {"builtin prose", "builtin code"}
    assert not {document.name for document in calibration} & {document.name for document in held_out}


def test_builtin_text_has_no_tables_tests_or_build_records(tokenizer: PreTrainedTokenizerFast) -> None:
    names = {document.name for document in read_documents([BUILTIN], tokenizer)}
    assert {"pydoc_data.topics:with", "argparse.py", "asyncio/tasks.py"} <= names
    assert not [name for name in names if name.startswith(("encodings/", "test/", "_sysconfigdata", "site-packages"))]


def test_the_split_depends_on_a_documents_name_alone() -> None:
    assert len({Document("a", "tomllib", text).is_held_out for text in ("", "x", "y")}) == 1
    held_out = sum(Document("a", str(number), "").is_held_out for number in range(4000))
    assert 900 < held_out < 1100


def test_data_too_small_to_split_is_all_for_calibration() -> None:
    held_out_name = next(str(number) for number in range(100) if Document("a", str(number), "").is_held_out)
    only = [Document("a", held_out_name, "text")]
    assert split_documents(only) == (only, [])


def test_directory_with_text_jsonl_and_parquet_is_read_in_order_of_names(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "b.txt").write_text("prose")
    records = [{"text": "one\u2028line"}, {"messages": [{"role": "user", "content": "hi"}]}]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "ignored.md").write_text("not text data")
    found = [(document.name, document.text) for document in read_documents([str(tmp_path)], tokenizer)]
    assert found == [("b.txt", "prose"), ("sub/a.jsonl:1", "one\u2028line"), ("sub/a.jsonl:3", "<user>hi\n")]


def test_parquet_rows_are_documents(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["first", "second"], "other": [1, 2]}), tmp_path / "a.parquet")
    found = [document.text for document in read_documents([str(tmp_path / "a.parquet")], tokenizer)]
    assert found == ["first", "second"]


def test_parquet_without_pyarrow_names_the_package_to_install(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        read_documents([str(tmp_path / "a.parquet")], tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", "unknown suffix '.csv'"),
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
        ("a.txt", b" \n", "no text found"),
        ("a.jsonl", b'{"text": "a"}\n{', "a.jsonl:2: not a line of JSON"),
        ("a.jsonl", b'{"body": "a"}', "a.jsonl:1: expected an object with 'text'"),
        ("a.jsonl", b'["a"]', "expected an object with 'text'"),
        ("a.jsonl", b'{"messages": [{"content": "a"}]}', "every message needs 'role' and 'content'"),
        ("a.parquet", b"no parquet", "cannot be read as Parquet"),
    ],
)
def test_unusable_files_are_refused_by_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_documents([str(tmp_path / name)], tokenizer)
    assert name in str(caught.value)


def test_missing_path_and_empty_directory_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_documents([str(tmp_path / "absent")], tokenizer)
    with pytest.raises(ConfigError, match=r"no \.txt"):
        read_documents([str(tmp_path)], tokenizer)


def test_messages_need_a_chat_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="no chat template"):
        read_documents([str(tmp_path / "a.jsonl")], without)


def test_reading_a_source_stops_after_the_wanted_characters(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "x" * 10}) for _ in range(100)))
    assert len(read_documents([str(tmp_path / "a.jsonl")], tokenizer, max_characters=35)) == 4


def test_sequences_have_the_wanted_tokens_half_of_them_in_short_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    sequences = token_sequences(documents("a", 20, 2000), tokenizer, num_tokens=6000, max_length=64, seed=0)
    lengths = [len(sequence.token_ids) for sequence in sequences]
    assert sum(lengths) == 6000
    assert max(lengths) == 64
    short = sum(length for length in lengths if length <= 16)
    assert abs(short - 3000) <= 64


def test_short_documents_do_not_count_as_long_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    # Nine of ten documents are too short for a long sequence: half of the tokens come from the tenth all the same.
    mixed = [Document("a", str(number), "x" * (20 if number % 10 else 3000)) for number in range(200)]
    sequences = token_sequences(mixed, tokenizer, num_tokens=3000, max_length=128, seed=0)
    (domain,) = domains_of(sequences, max_length=128)
    assert domain.tokens == 3000
    assert abs(domain.long_tokens - 1500) <= 128


def test_documents_that_are_all_short_give_short_sequences_only(tokenizer: PreTrainedTokenizerFast) -> None:
    sequences = token_sequences(documents("a", 20, 30), tokenizer, num_tokens=500, max_length=128, seed=0)
    assert domains_of(sequences, max_length=128) == (Domain("a", 17, 500, 0),)


def test_domains_count_documents_and_tokens_by_source(tokenizer: PreTrainedTokenizerFast) -> None:
    both = documents("b", 3, 100) + documents("a", 2, 1000)
    sequences = token_sequences(both, tokenizer, num_tokens=10**6, max_length=200, seed=0)
    found = domains_of(sequences, max_length=200)
    assert {(domain.name, domain.documents, domain.tokens) for domain in found} == {("a", 2, 2000), ("b", 3, 300)}
    assert all(0 < domain.long_tokens <= domain.tokens for domain in found)
    assert merged_domains([*found, *found]) == tuple(
        Domain(domain.name, 2 * domain.documents, 2 * domain.tokens, 2 * domain.long_tokens) for domain in found
    )


def test_builtin_text_is_mixed_of_long_and_short_sequences_in_every_domain(tokenizer: PreTrainedTokenizerFast) -> None:
    calibration, _ = split_documents(read_documents([BUILTIN], tokenizer))
    sequences = token_sequences(calibration, tokenizer, num_tokens=40_000, max_length=512, seed=0)
    for domain in domains_of(sequences, max_length=512):
        assert abs(domain.tokens - 20_000) <= 512
        assert abs(domain.long_tokens - domain.tokens / 2) <= 512


def test_sources_give_equal_shares_whatever_their_sizes(tokenizer: PreTrainedTokenizerFast) -> None:
    both = documents("small", 4, 2000) + documents("large", 20, 4000)
    sequences = token_sequences(both, tokenizer, num_tokens=2000, max_length=64, seed=0)
    small = sum(len(sequence.token_ids) for sequence in sequences if sequence.name.startswith("small"))
    assert abs(small - 1000) <= 64


def test_no_text_is_used_twice_and_the_end_of_the_text_ends_the_sequences(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(f"{number:07d}," for number in range(400))
    sequences = token_sequences([Document("a", "a", text)], tokenizer, num_tokens=10**6, max_length=64, seed=0)
    assert "".join(tokenizer.decode(sequence.token_ids) for sequence in sequences) == text


def test_order_depends_on_the_seed_only() -> None:
    both = documents("a", 10, 1) + documents("b", 3, 1)
    assert in_turn(both, seed=1) == in_turn(both, seed=1) != in_turn(both, seed=2)
    assert [document.source for document in in_turn(both, seed=1)] == list("ababab" + "a" * 7)


def test_the_first_token_is_added_once() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenize("a", tokenizer) == tokenize("<s>a", tokenizer)
