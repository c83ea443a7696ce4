import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import PlanError
from simcore.layout_text import (
    check_layout,
    explain_layout,
    format_layout,
    layers_per_chunk,
    parse_layout,
)

PUBLISHED = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"  # 80 layers on 8 ranks of 5 chunks


def test_the_published_layout_is_read_and_written() -> None:
    chunks = parse_layout(PUBLISHED)
    assert layers_per_chunk(chunks) == [2] + [2] * 34 + [3] + [2] * 3 + [1]
    assert (len(chunks), sum(layers_per_chunk(chunks))) == (40, 80)
    assert chunks[0] == "Ett"
    assert chunks[-1] == "tL"
    assert format_layout(chunks) == PUBLISHED
    check_layout(chunks, num_ranks=8, num_layers=80, stages_per_rank=5)
    check_layout(chunks, num_ranks=8, num_layers=80)


def test_a_layout_is_told_in_words() -> None:
    assert explain_layout(parse_layout(PUBLISHED)) == (
        "40 chunks, 80 layers, 2 to a chunk; chunk 0 has 2 layers and the embedding; chunk 35 has "
        "3 layers; chunk 39 has 1 layer and the loss"
    )


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("Ettt|(tt|)*3,m|L", ["Ettt", "tt", "tt", "tt", "m", "L"]),
        ("E||t*2||L", ["E", "", "tt", "", "L"]),  # chunks that hold nothing
        ("(t*2,|)*2 , t", ["tt", "tt", "t"]),
        ("(t|t)*2", ["t", "tt", "t"]),
        ("EtL", ["EtL"]),
        ("EtL|", ["EtL", ""]),
    ],
)
def test_repeats_bars_and_commas_mean_what_they_do_there(text: str, chunks: list[str]) -> None:
    assert list(parse_layout(text)) == chunks
    assert list(parse_layout(format_layout(chunks))) == chunks


@given(st.lists(st.text("EtmL", max_size=5), min_size=1, max_size=12))
def test_any_chunks_survive_their_text(chunks: list[str]) -> None:
    assert list(parse_layout(format_layout(chunks))) == chunks


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Ex|L", "cannot read 'x|L'"),
        ("E(t|", "cannot read '(t|'"),
        ("E((t|)*2)*2", "cannot read '((t|)*2)*2'"),
        ("E*", "cannot read '*'"),
        ("*3t", "cannot read '*3t'"),
        ("Et*0L", "repeats 't' no times"),
        ("Et*9999999L", "more than 2**20 letters"),
        ("(t*9999|)*9999", "more than 2**20 letters"),
        ("E|t*-1", "cannot read '*-1'"),
    ],
)
def test_a_malformed_layout_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"^layout .*{re.escape(reason)}$"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("text", "sizes", "reason"),
    [
        (PUBLISHED, {"num_ranks": 8, "num_layers": 78}, "layout has 80 layers; the model has 78"),
        (PUBLISHED, {"num_ranks": 7, "num_layers": 80}, "has 40 chunks, not a multiple of 7 ranks"),
        (
            PUBLISHED,
            {"num_ranks": 8, "num_layers": 80, "stages_per_rank": 4},
            "has 40 chunks; 8 ranks with 4 each need 32",
        ),
        ("t|EtL", {"num_ranks": 2, "num_layers": 2}, "must be E first"),
        ("Et|t", {"num_ranks": 2, "num_layers": 2}, "must be E first"),
        ("EtmtL", {"num_ranks": 1, "num_layers": 2}, "must be E first"),
        ("EtL|L", {"num_ranks": 2, "num_layers": 1}, "each of E and L once"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(text: str, sizes: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_layout(parse_layout(text), **sizes)


@pytest.mark.parametrize("chunks", [[], ["Et", "x"], ["t|t"]])
def test_what_are_no_chunks_is_not_written(chunks: list[str]) -> None:
    with pytest.raises(PlanError, match="chunks of the letters E, t, m, L are wanted"):
        format_layout(chunks)
