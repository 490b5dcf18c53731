"""``show``: its model of upstream against the releases themselves, its text, its picture."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from trees import HERE, environment, packed_rope, run_python, unpacked

from megatron.packed_rope import PackedInputError, SegmentLengthError
from megatron.packed_rope.errors import BackendNotAvailable
from megatron.packed_rope.show import add_arguments, run
from megatron.packed_rope.upstream_rows import Pack, Refused, right_rows, upstream_rows

# A checkout of main to hold the model of main against; there is no wheel of it.
MAIN_TREE = os.environ.get("PACKED_ROPE_MAIN")
RELEASES = ["0.10.0", "0.12.0", "0.14.0", "0.16.1", "0.19.2"] + (["main"] if MAIN_TREE else [])


def packs(with_mrope: bool) -> list[Pack]:
    """Random packs that ``show`` takes, small ones, and those where shapes mislead."""
    generator = random.Random(0)
    made = [
        Pack([0, 640, 1600]),
        Pack([0, 4, 8], "mrope", 2),
        Pack([0, 8, 16], "per_sequence", 2),
        Pack([0, 4, 8], "packed_local", 2),
        Pack([0, 4], "packed_local", 2),
        Pack([0, 4, 10], "per_sequence", max_seqlen=10),
        Pack([0, 4, 10], max_seqlen=10),
        Pack([0, 8, 24], "packed", 2, tokens=14),
    ]
    for number in range(200):
        cp_size = generator.choice((1, 1, 2, 4))
        unit = 1 if cp_size == 1 else 2 * cp_size
        lengths = [unit * generator.randrange(5) for _ in range(generator.randrange(1, 5))]
        cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        if cu[-1] == 0:
            continue
        freqs = ("packed", "per_sequence", "packed_local", "mrope")[number % 4]
        tail = generator.choice((0, 0, 0, 2))
        bound = generator.choice((None, cu[-1], cu[-1] + 3))
        made.append(Pack(cu, freqs, cp_size, cu[-1] // cp_size + tail, bound))
    return [pack for pack in made if with_mrope or pack.freqs != "mrope"]


def model_of(release: str, pack: Pack, rank: int) -> list[int] | None:
    try:
        return upstream_rows(release, pack, rank)
    except Refused:
        return None


@pytest.mark.parametrize("release", RELEASES)
def test_upstream_reads_the_rows_that_show_says(release):
    tree = Path(MAIN_TREE) if release == "main" else unpacked(release)
    given = packs(with_mrope=release not in ("0.10.0", "0.11.0"))
    asked = [[p.cu_seqlens, p.freqs, p.cp_size, p.local_tokens, p.bound] for p in given]
    process = subprocess.run(
        [sys.executable, str(HERE / "read_rows.py")],
        input=json.dumps(asked),
        env=environment(tree),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    read = json.loads(process.stdout)
    raises = 0
    for pack, ranks in zip(given, read, strict=True):
        for rank, rows in enumerate(ranks):
            real = pack.real_tokens
            told = model_of(release, pack, rank)
            raises += rows is None
            assert (told and told[:real]) == (rows and rows[:real]), (pack, rank)
    assert raises > 0 or release == "main"


def test_right_rows_of_the_worked_example():
    pack = Pack([0, 4, 8], "mrope", 2)
    assert [right_rows(pack, rank) for rank in (0, 1)] == [[0, 3, 4, 7], [1, 2, 5, 6]]


def show(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def test_text_marks_what_0_14_reads_wrong(capsys):
    assert show("--cu-seqlens", "0,640,1600", "--release", "0.14.0", "0.16.1") == 0
    assert capsys.readouterr().out == (
        "cu_seqlens 0,640,1600; C = 1; packed freqs: row g is global token g of the pack\n"
        "\n"
        "segment  tokens     should read  0.14.0        0.16.1\n"
        "0        0..639     0..639       0..639        0..639\n"
        "1        640..1599  640..1599    0..959 WRONG  640..1599\n"
        "\n"
        "0.14.0  wrong row for 960 of 1600 tokens\n"
        "0.16.1  right\n"
    )


def test_text_of_a_cut_mrope_row(capsys):
    options = ("--cp", "2", "--freqs", "mrope", "--release", "0.12.0", "main")
    assert show("--cu-seqlens", "0,4,8", *options) == 0
    assert capsys.readouterr().out == (
        "cu_seqlens 0,4,8; C = 2; mRoPE in GPTModel: row g is global token g of the pack\n"
        "\n"
        "segment  tokens of rank 0  should read  0.12.0  main\n"
        "0        0                 0            raises  0\n"
        "0        1                 3            raises  7 WRONG\n"
        "1        2                 4            raises  0 WRONG\n"
        "1        3                 7            raises  7\n"
        "\n"
        "segment  tokens of rank 1  should read  0.12.0  main\n"
        "0        0..1              1..2         raises  3..4 WRONG\n"
        "1        2..3              5..6         raises  3..4 WRONG\n"
        "\n"
        "0.12.0  raises: cuts the batch axis instead of the tokens\n"
        "main    wrong row for 6 of 8 tokens\n"
    )


def test_text_of_tail_padding(capsys):
    options = ("--cp", "2", "--tokens", "6", "--release", "0.19.2", "main")
    assert show("--cu-seqlens", "0,8", *options) == 0
    out = capsys.readouterr().out
    assert "padding  4..5              any          raises  any" in out
    assert "0.19.2  raises: t has 6 tokens, the segments 4\nmain    right" in out


def test_long_packs_are_shortened(capsys):
    boundaries = ",".join(str(8 * i) for i in range(1001))
    assert show("--cu-seqlens", boundaries) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 35
    assert "... 977 more spans ..." in lines
    assert "0.14.0  wrong row for 7992 of 8000 tokens" in lines


def test_a_slice_of_one_row_spreads_over_its_segment(capsys):
    # Rank 0 finds one row where it wants two: the release spreads it instead of raising.
    options = ("--cp", "2", "--freqs", "packed_local", "--release", "0.14.0")
    assert show("--cu-seqlens", "0,4,4", *options) == 0
    assert "1                 1            0 WRONG" in capsys.readouterr().out


def test_options_are_read_without_torch():
    code = "import sys, megatron.packed_rope.show; sys.exit('torch' in sys.modules)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (["0,a"], PackedInputError, "integers separated by commas"),
        (["8"], PackedInputError, "start at 0"),
        (["1,8"], PackedInputError, "start at 0"),
        (["0,8,4"], SegmentLengthError, "decreases at segment 1"),
        (["0,6", "--cp", "2"], SegmentLengthError, "not divisible by 2 * cp = 4"),
        (["0,8", "--cp", "0"], PackedInputError, "cp_size 0"),
        (["0,8", "--tokens", "4"], SegmentLengthError, "t has 4"),
        (["0,8", "--max-seqlen", "4"], PackedInputError, "max_seqlen 4"),
        (["0,8", "--release", "0.9.0"], PackedInputError, "0.10.0 to 0.19.x"),
        (["0,8", "-o", "picture.jpg"], PackedInputError, "picture.jpg"),
    ],
)
def test_bad_input_is_refused_in_words(options, error, says):
    with pytest.raises(error) as raised:
        show("--cu-seqlens", *options)
    assert says in str(raised.value)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"picture{suffix}"
    options = ("--cp", "2", "--freqs", "mrope", "--release", "0.12.0", "0.14.0", "-o", str(out))
    assert show("--cu-seqlens", "0,4,8", *options) == 0
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(content) < 150_000


def test_the_same_pack_gives_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        show("--cu-seqlens", "0,4,10", "-o", str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendNotAvailable, match="pip install matplotlib"):
        show("--cu-seqlens", "0,4", "-o", str(tmp_path / "picture.png"))


def test_what_cannot_be_drawn_could_not_run():
    for arguments in (("0,x",), ("0,4", "--release", "9.9"), ("0,4", "-o", "rows.gif")):
        done = packed_rope("show", "--cu-seqlens", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "expected" in done.stderr
