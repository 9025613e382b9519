"""The recall text: the same for a seed, as long as wished, and each question has one right answer (found by regex)."""

import re
import sys
from pathlib import Path
from random import Random

import pytest

from nanoinfer.recall.text import HEADING, WORDS, Author, write_document

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)

import recall_text
from recall_text import KINDS, Mix, TrainingAuthor, make_document, questions
from recall_tokenizer import train_tokenizer

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
DENSE = Mix(pass_key=0.3, table=0.05, passage=0.05, count=0.2)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(65536)


@pytest.fixture(scope="module")
def count(tokenizer):
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def found_answers(text: str, question: str) -> list[str]:
    """Every answer that the text holds; of counts only the last."""
    if match := re.search(r"pass key of (\w+ \w+)\?", question):
        return [f" {sentence}" for sentence in re.findall(rf"The pass key of {match[1]} is \d+\.", text)]
    if match := re.search(r"number of (\w+) in the table of the (\w+ \w+)\?", question):
        tables = re.findall(rf"Table of the {match[2]}:((?:\n- \w+: \d+)+)\n", text)
        return [cell for table in tables for cell in re.findall(rf"-( {match[1]}: \d+)", table)]
    if match := re.search(r"passage called (\w+ \w+)\.", question):
        return re.findall(rf"\nPassage {match[1]}:([^.]*\.)", text)
    many = re.search(r"the count of (\w+) now\?", question)[1]
    return [f" {sentence}" for sentence in re.findall(rf"The count of {many} is now \d+\.", text)[-1:]]


def test_the_same_seed_gives_the_same_document_and_another_seed_another(count):
    first, again, other = (make_document(seed, 1500, count, [0.2, 0.5]) for seed in (1, 1, 2))
    assert first.text == again.text and first.planted == again.planted
    assert first.text != other.text


@pytest.mark.parametrize(
    "author, wanted",
    [
        (Author, "There was a dark purse under the boot.\nThe pass key of Greta Barlow is 55669."),
        (
            TrainingAuthor,
            "The brave jar stood between the cellar and the abbey. The pass key of Wanda Becker is 75267.",
        ),
    ],
)
def test_the_text_of_a_seed_does_not_change_between_versions(author, wanted):
    author = author(Random(7))
    assert HEADING + "".join(author.filler()) + "".join(author.pass_key().text) == "Records. " + wanted


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_the_only_one_in_the_text(count, seed):
    document = make_document(seed, 6000, count, DEPTHS, DENSE)
    found = questions(document, wished=False)
    assert {question.kind for question in found} == set(KINDS) and len(found) > 150
    for question in found:
        asked = question.prompt_text.removeprefix(document.text)
        assert asked.startswith("\nQuestion: ") and asked.endswith("\nAnswer:")
        assert found_answers(document.text, asked) == [question.answer_text]


def test_counts_go_up_by_one(count):
    text = make_document(0, 8000, count, mix=DENSE).text
    for _, many in recall_text.COUNTED:
        numbers = [int(number) for number in re.findall(rf"count of {many} is now (\d+)", text)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_names_are_unique_and_their_parts_recur(count):
    text = make_document(3, 64 * 1024, count).text
    names = re.findall(r"The pass key of (\w+) (\w+) is", text)
    assert len(names) > 200 and len(set(names)) == len(names)
    assert len({first for first, _ in names}) < len(names) / 2
    assert len({last for _, last in names}) < len(names) / 2
    for title in (r"Table of the (\w+ \w+):", r"Passage (\w+ \w+):"):
        found = re.findall(title, text)
        assert found and len(set(found)) == len(found)


@pytest.mark.parametrize("num_tokens", [400, 1000, 4096, 16384])
@pytest.mark.parametrize("author", [Author, TrainingAuthor])
def test_document_question_and_answer_are_a_sentence_shorter_than_wished_at_most(count, num_tokens, author):
    for seed in range(3):
        document = write_document(author(Random(seed)), num_tokens, count, DEPTHS)
        assert document.num_tokens == count(document.text)
        lengths = [count(question.prompt_text + question.answer_text) for question in questions(document)]
        assert len(lengths) == len(DEPTHS)
        assert num_tokens - 16 <= min(lengths) and max(lengths) <= num_tokens


@pytest.mark.parametrize("author", [Author, TrainingAuthor])
def test_facts_lie_where_they_were_wished(count, author):
    document = write_document(author(Random(5)), 4096, count, DEPTHS)
    planted = [at for at in document.planted if at.wished]
    assert [at.fact.subject[0] for at in planted] == ["pass_key"] * len(DEPTHS)
    for at, depth in zip(planted, DEPTHS):
        text = "".join(at.fact.text)
        assert count(document.text[: document.text.rindex(text)]) == at.start
        latest = document.num_tokens - count(text)  # a fact of depth 1 ends the document
        assert abs(at.start - min(depth * document.num_tokens, latest)) <= 24
    assert {question.depth for question in questions(document)} == {at.start / document.num_tokens for at in planted}


def test_many_facts_of_one_depth_follow_each_other(count):
    document = make_document(5, 8192, count, [0.5] * 20)
    starts = [at.start for at in document.planted if at.wished]
    assert len(starts) == 20 and max(starts) - min(starts) == sum(
        count("".join(at.fact.text)) for at in document.planted if at.wished and at.start < max(starts)
    )
    assert abs(starts[0] - 4096) < 24


def test_a_document_that_is_asked_about_has_other_pass_keys_as_well(count):
    document = write_document(Author(Random(2)), 4096, count, [0.5])
    assert len(document.planted) > 10 and [at.wished for at in document.planted].count(True) == 1


def test_fragments_tokenize_as_the_whole_text_does(tokenizer):
    author = TrainingAuthor(Random(1))
    fragments = [HEADING]
    for i in range(400):
        fact = author.fact(KINDS[i % 4]) if i % 2 else None
        fragments += fact.text if fact else author.filler()
        if fact:
            fragments += fact.asks[0].question + fact.asks[0].answer
    apart = [i for fragment in fragments for i in tokenizer.encode(fragment, add_special_tokens=False)]
    assert apart == tokenizer.encode("".join(fragments), add_special_tokens=False)
    assert tokenizer.decode(apart) == "".join(fragments)


def test_words_and_digits_are_single_tokens(tokenizer):
    assert len(recall_text.all_words()) > 900
    for word in recall_text.all_words():
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word
    assert len(tokenizer.encode(" 48192", add_special_tokens=False)) == 6
    assert not set(WORDS["first_names"]) & set(WORDS["last_names"])


def test_what_cannot_be_written_is_refused(count):
    with pytest.raises(ValueError, match='no kind of fact is called "poem"'):
        TrainingAuthor(Random(0)).fact("poem")
    with pytest.raises(ValueError, match="do not fit in 100 tokens"):
        write_document(Author(Random(0)), 100, count, [0.5] * 20)


def test_a_document_with_more_facts_than_names_is_refused():
    author = TrainingAuthor(Random(0))
    with pytest.raises(ValueError, match="too many facts of the kind table: lower its share or the length"):
        for _ in range(len(recall_text.PLACES) * len(recall_text.VENUES) + 1):
            author.fact("table")
