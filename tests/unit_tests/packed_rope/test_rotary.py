"""apply_packed_rotary against one segment at a time in float64, and its guarantees."""

from __future__ import annotations

import itertools

import pytest
import torch
from counting import count_working_ops
from oracles import segments
from shared_cases import load_cases
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.packed_rope import (
    FreqsError,
    PackedInputError,
    SegmentLengthError,
    apply_packed_rotary,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def pack(lengths, *, heads=3, dim=16, rotary=16, dtype=torch.float32, tail=0, cp=1, num_rows=None):
    """t of one rank, freqs of the whole pack, cu_seqlens, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths) // cp + tail
    t = torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    freqs = torch.randn(num_rows or sum(lengths), 1, 1, rotary, generator=generator)
    freqs = freqs.double() if dtype == torch.float64 else freqs
    cu = torch.tensor(segments.boundaries(lengths), dtype=torch.int32)
    return t.requires_grad_(), freqs, cu, grad


def largest(difference):
    return difference.abs().max().item() if difference.numel() else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("layout", ["packed", "per_sequence", "packed_local"])
@pytest.mark.parametrize("cp_layout", ["zigzag", "contiguous"])
def test_each_segment_comes_out_as_if_alone(layout, cp, cp_layout, dtype):
    lengths = [8, 24, 0, 16, 8]
    for rank, interleaved, rotary, mscale in itertools.product(
        range(cp), [False, True], [16, 10], [1.0, 1.2]
    ):
        rows = segments.rows(lengths, layout, cp, rank, cp_layout)
        num_rows = len(rows) if layout == "packed_local" else None
        t, freqs, cu, grad = pack(lengths, rotary=rotary, dtype=dtype, cp=cp, num_rows=num_rows)
        out = apply_packed_rotary(
            t,
            freqs,
            cu,
            freqs_layout=layout,
            cp_size=cp,
            cp_rank=rank,
            cp_layout=cp_layout,
            interleaved=interleaved,
            mscale=mscale,
        )
        check(t, freqs, rows, out, grad, interleaved, mscale)


def check(t, freqs, rows, out, grad, interleaved=False, mscale=1.0):
    real = len(rows)
    selected = freqs[rows]
    scale = largest(t.detach()) + largest(grad)
    bound = segments.tolerance(t.dtype) * scale * mscale
    expected = segments.rotate(t.detach()[:real], selected, interleaved, mscale)
    assert largest(out.detach()[:real].double() - expected) <= bound
    (found,) = torch.autograd.grad(out, t, grad)
    expected = segments.rotate(grad[:real], selected, interleaved, mscale, inverse=True)
    assert largest(found[:real].double() - expected) <= bound
    assert out.isfinite().all()
    assert found.isfinite().all()


@pytest.mark.parametrize("case", [c for c in load_cases("rows.json") if "rows" in c])
def test_the_shared_cases_rotate_by_their_rows(case):
    starts = case.get("start_positions")
    rows = [row for row in case["rows"] if row is not None]
    num_rows = case.get("freqs_rows") or max(max(rows) + 1, sum(row is not None for row in rows))
    if case["layout"] == "packed":
        num_rows = case.get("freqs_rows") or case["cu_seqlens"][-1]
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(case["tokens"], 2, 8, generator=generator).requires_grad_()
    grad = torch.randn(case["tokens"], 2, 8, generator=generator)
    freqs = torch.randn(num_rows, 1, 1, 8, generator=generator)
    out = apply_packed_rotary(
        t,
        freqs,
        torch.tensor(case["cu_seqlens"], dtype=torch.int32),
        freqs_layout=case["layout"],
        cp_size=case["cp"],
        cp_rank=case["rank"],
        cp_layout=case.get("cp_layout", "zigzag"),
        start_positions=None if starts is None else torch.tensor(starts),
    )
    check(t, freqs, rows, out, grad)


def test_r02_second_image_reads_its_own_rows():
    lengths = [640, 960]
    t, freqs, cu, grad = pack(lengths)
    out = apply_packed_rotary(t, freqs, cu)
    check(t, freqs, list(range(1600)), out, grad)


def test_r13_tail_padding_changes_no_real_token():
    t, freqs, cu, grad = pack([4, 6], tail=2, num_rows=12)
    out = apply_packed_rotary(t, freqs, cu, freqs_layout="packed")
    check(t, freqs, list(range(10)), out, grad)
    short = apply_packed_rotary(t, freqs[:10], cu)
    assert torch.equal(short[:10], out[:10])
    assert short.isfinite().all()


def test_r28_thousands_of_one_token_segments():
    lengths = [1] * 4000
    t, freqs, cu, grad = pack(lengths, heads=1, dim=4, rotary=4, num_rows=3)
    out = apply_packed_rotary(t, freqs, cu, freqs_layout="per_sequence")
    check(t, freqs, [0] * 4000, out, grad)


def test_r35_one_freqs_tensor_under_two_cu_seqlens():
    t, freqs, windows, grad = pack([3, 5, 4])
    full = torch.tensor([0, 12], dtype=torch.int32)
    by_window = apply_packed_rotary(t, freqs, windows)
    by_image = apply_packed_rotary(t, freqs, full)
    check(t, freqs, list(range(12)), by_window, grad)
    assert torch.equal(by_window, by_image)


@pytest.mark.parametrize("view", ["transposed", "sliced heads", "expanded"])
def test_any_strides_of_t(view):
    base = torch.randn(2, 10, 6, 16)
    t = {
        "transposed": base[0].transpose(0, 1),
        "sliced heads": base[0, :, ::2],
        "expanded": base[0, :, :1].expand(-1, 4, -1),
    }[view]
    cu = torch.tensor([0, 2, t.shape[0]])
    freqs = torch.randn(t.shape[0], 1, 1, 16)
    found = apply_packed_rotary(t, freqs, cu)
    assert torch.equal(found, apply_packed_rotary(t.contiguous(), freqs, cu))


def test_inputs_are_untouched_and_the_output_is_new():
    for lengths, layout, cp in (
        ([4, 8], "packed", 1),
        ([4, 8], "per_sequence", 2),
        ([0], "packed", 1),
    ):
        t, freqs, cu, grad = pack(lengths, cp=cp, tail=1, num_rows=13)
        inputs = [x.detach() for x in (t, freqs, cu, grad)]
        before = [x.clone() for x in inputs]
        out = apply_packed_rotary(t, freqs, cu, freqs_layout=layout, cp_size=cp, cp_rank=0)
        torch.autograd.grad(out, t, grad)
        for now, then in zip(inputs, before, strict=True):
            assert torch.equal(now, then)
        pointers = {x.untyped_storage().data_ptr() for x in inputs}
        assert out.untyped_storage().data_ptr() not in pointers


def test_second_derivative_and_trained_freqs():
    t, freqs, cu, _ = pack([2, 3], heads=1, dim=6, rotary=4, dtype=torch.float64)
    freqs = freqs.double().requires_grad_()

    def rotated(t, freqs):
        return apply_packed_rotary(t, freqs, cu, freqs_layout="packed")

    assert torch.autograd.gradcheck(rotated, (t, freqs))
    assert torch.autograd.gradcheck(lambda t: rotated(t, freqs.detach()), (t,))
    assert torch.autograd.gradgradcheck(lambda t: rotated(t, freqs.detach()), (t,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cp_layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    ("layout", "cp", "rows", "most"),
    [
        ("packed", 1, 4096, 12),
        ("packed_local", 1, 4096, 12),
        ("packed_local", 2, 2048, 12),
        ("auto", 1, 4096, 12),
        ("per_sequence", 1, 4096, 40),
        ("packed", 2, 4096, 40),
        ("per_sequence", 2, 4096, 40),
        ("per_sequence", 4, 4096, 40),
        ("auto", 1, 5000, 40),
        ("auto", 2, 4096, 40),  # packed
        ("auto", 2, 2048, 40),  # one row per local token: packed_local, or a table
        ("auto", 4, 1024, 40),
        ("auto", 4, 1500, 40),  # a table
    ],
)
def test_operations_do_not_grow_with_segments(layout, cp, rows, most, cp_layout, dtype):
    counts = {}
    tokens = 4096
    for number in (4, 64, 512, 4096 // (2 * cp if cp > 1 else 1)):
        lengths = [tokens // number] * number
        t, freqs, cu, _ = pack(lengths, heads=1, dim=8, rotary=8, cp=cp, num_rows=rows, dtype=dtype)
        ops = count_working_ops(
            lambda t=t, freqs=freqs, cu=cu: apply_packed_rotary(
                t, freqs, cu, freqs_layout=layout, cp_size=cp, cp_rank=0, cp_layout=cp_layout
            )
        )
        counts[number] = sum(ops.values())
    assert len(set(counts.values())) == 1, counts
    assert max(counts.values()) <= most, ops


@pytest.mark.parametrize("layout", ["packed", "per_sequence", "packed_local", "auto"])
@pytest.mark.parametrize("cp", [1, 2])
def test_no_host_read_under_fake_tensors(layout, cp):
    # Fake tensors have no values: any host read would raise, whatever the device.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with FakeTensorMode():
        t = torch.randn(8, 2, 16, device=device, requires_grad=True)
        cu = torch.empty(5, dtype=torch.int32, device=device)
        for num_rows in (8, 16, 40):
            freqs = torch.randn(num_rows, 1, 1, 16, device=device)
            out = apply_packed_rotary(t, freqs, cu, freqs_layout=layout, cp_size=cp, cp_rank=0)
            (grad,) = torch.autograd.grad(out.sum(), t)
            assert out.shape == grad.shape == t.shape


@pytest.mark.parametrize(
    ("layout", "cp"), [("packed", 1), ("packed", 2), ("per_sequence", 2), ("auto", 2)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiles_without_a_break_bit_equal_under_aot_eager(layout, cp, interleaved):
    torch.compiler.reset()
    t, freqs, cu, grad = pack([8, 16], cp=cp, rotary=10, dtype=torch.bfloat16, tail=1, num_rows=25)

    def rotated(t, freqs, cu):
        return apply_packed_rotary(
            t, freqs, cu, freqs_layout=layout, cp_size=cp, cp_rank=0, interleaved=interleaved
        )

    eager = rotated(t, freqs, cu)
    (eager_grad,) = torch.autograd.grad(eager, t, grad)
    compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager")(t, freqs, cu)
    (compiled_grad,) = torch.autograd.grad(compiled, t, grad)
    assert torch.equal(compiled, eager)
    assert torch.equal(compiled_grad, eager_grad)


def test_compiled_by_inductor_forward_and_backward():
    torch.compiler.reset()
    t, freqs, cu, grad = pack([8, 16], cp=2)
    rows = segments.rows([8, 16], "packed", 2, 1)
    rotated = torch.compile(apply_packed_rotary, fullgraph=True)
    out = rotated(t, freqs, cu, freqs_layout="packed", cp_size=2, cp_rank=1)
    check(t, freqs, rows, out, grad)
    bad = torch.tensor([0, 6, 24], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="does not fit the CP layout"):
        rotated(t, freqs, bad, freqs_layout="packed", cp_size=2, cp_rank=1)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"t": torch.zeros(10, 16)}, PackedInputError, "(10, 16)"),
        ({"t": torch.zeros(10, 2, 16, dtype=torch.int32)}, PackedInputError, "torch.int32"),
        ({"t": torch.zeros(10, 2, 16).to(torch.float8_e4m3fn)}, PackedInputError, "float8_e4m3fn"),
        ({"cp_size": "2", "cp_rank": 0}, PackedInputError, "cp_size is '2'"),
        ({"cp_size": 2, "cp_rank": 0.5}, PackedInputError, "cp_rank is 0.5"),
        ({"freqs": torch.zeros(10, 16)}, FreqsError, "(10, 16)"),
        ({"freqs": torch.zeros(10, 2, 1, 16)}, FreqsError, "(10, 2, 1, 16)"),
        ({"freqs": torch.zeros(10, 1, 1, 18)}, FreqsError, "rotary dim 18"),
        ({"freqs": torch.zeros(10, 1, 1, 7)}, FreqsError, "rotary dim 7"),
        ({"freqs": torch.zeros(10, 1, 1, 16, dtype=torch.int64)}, FreqsError, "torch.int64"),
        ({"freqs": torch.zeros(10, 1, 1, 16, device="meta")}, PackedInputError, "meta"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0])}, PackedInputError, "torch.float32"),
        (
            {"cu_seqlens": torch.tensor([0, 6, 12]), "cp_size": 2, "cp_rank": 0},
            SegmentLengthError,
            "2 * cp = 4",
        ),
        ({"cp_size": 2, "cp_group": torch}, PackedInputError, "cp_size=2"),
        ({"cp_group": 2}, PackedInputError, "cp_group is 2"),
    ],
)
def test_bad_input_is_typed(change, kind, words):
    good = {
        "t": torch.zeros(10, 2, 16),
        "freqs": torch.zeros(10, 1, 1, 16),
        "cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32),
    }
    with pytest.raises(kind, match=r"expected|pass one|pad each") as error:
        apply_packed_rotary(**(good | change))
    assert words in str(error.value)


def test_a_cp_size_without_a_rank_is_refused():
    t, freqs = torch.randn(8, 2, 4), torch.randn(16, 1, 1, 4)
    with pytest.raises(PackedInputError, match="cp_size 2 without cp_rank"):
        apply_packed_rotary(t, freqs, torch.tensor([0, 8, 16]), cp_size=2)


@pytest.mark.parametrize("name", ["t", "freqs", "cu_seqlens"])
def test_what_is_no_tensor_is_named(name):
    arguments = {
        "t": torch.randn(8, 2, 4),
        "freqs": torch.randn(8, 1, 1, 4),
        "cu_seqlens": torch.tensor([0, 8]),
    }
    with pytest.raises(PackedInputError, match=f"^{name} is a list; expected a tensor"):
        apply_packed_rotary(**arguments | {name: [0, 8]})
