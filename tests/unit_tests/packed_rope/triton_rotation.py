"""rotate_triton against one segment at a time in float64: run by test_rotary_triton.py.

Not collected by name: on a CPU Triton must be interpreted, which is settled by TRITON_INTERPRET=1
before the first import of triton, so these tests have a process of their own.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles import segments
from shared_cases import load_cases

from megatron.packed_rope import (
    BackendNotAvailable,
    FreqsError,
    PackedInputError,
    PackedLayout,
    apply_packed_rotary,
)
from megatron.packed_rope.fused import BACKEND_VARIABLE
from megatron.packed_rope.rotary_triton import _rotate, rotate_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def problem(tokens, num_rows, *, heads=3, dim=16, rotary=16, dtype=torch.float32):
    """t that wants a gradient, that gradient's input, and freqs of up to some radians."""
    t, grad = (random(tokens, heads, dim, dtype=dtype, seed=seed) for seed in (0, 1))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return t.requires_grad_(), grad, 4 * random(num_rows, 1, 1, rotary, dtype=wide, seed=2)


def tolerance(dtype, size, mscale):
    """One rounding to dtype of a number of this size, and the few of its float32 arithmetic.

    Triton's interpreter cuts bfloat16 off instead of rounding it (the compiled kernel rounds:
    test_triton_aot.py), which is twice as far.
    """
    cut_off = dtype == torch.bfloat16 and DEVICE == "cpu"
    eps = torch.finfo(dtype).eps / (1 if cut_off else 2)
    arithmetic = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    return mscale * size * (eps + 4 * arithmetic)


def largest(difference):
    return difference.abs().max().item() if difference.numel() else 0.0


def check(t, grad, freqs, rows, out, interleaved=False, mscale=1.0):
    """Forward and gradient of the first tokens, which read these rows; the others finite."""
    (found,) = torch.autograd.grad(out, t, grad)
    real, selected = len(rows), freqs[rows]
    for result, source, inverse in ((out, t, False), (found, grad, True)):
        source, result = source.detach(), result.detach()
        expected = segments.rotate(source[:real], selected, interleaved, mscale, inverse)
        bound = tolerance(t.dtype, max(largest(expected), largest(source)), mscale)
        assert largest(result[:real].double() - expected) <= bound
        assert result.isfinite().all()
        assert result.dtype == t.dtype
        assert result.is_contiguous()


LAYOUTS = ["packed", "per_sequence", "packed_local"]
OPTIONS = list(itertools.product([False, True], [16, 10], [1.0, 1.2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("interleaved", "rotary", "mscale"), OPTIONS)
def test_each_segment_comes_out_as_if_alone(interleaved, rotary, mscale, dtype):
    lengths = [8, 24, 0, 16, 8]
    places = [(1, 0, "zigzag")]
    places += [(cp, rank, cut) for cp in (2, 4) for rank in range(cp) for cut in CUTS]
    for (cp, rank, cut), layout in itertools.product(places, LAYOUTS):
        expected_rows = segments.rows(lengths, layout, cp, rank, cut)
        num_rows = len(expected_rows) if layout == "packed_local" else sum(lengths)
        t, grad, freqs = problem(len(expected_rows), num_rows, rotary=rotary, dtype=dtype)
        rows = layout_of(lengths, t, cp, rank, cut).rows(layout, num_rows=num_rows)
        out = rotate_triton(t, freqs, rows, interleaved=interleaved, mscale=mscale)
        check(t, grad, freqs, expected_rows, out, interleaved, mscale)


CUTS = ["zigzag", "contiguous"]


def layout_of(lengths, t, cp=1, rank=0, cut="zigzag", starts=None):
    return PackedLayout(
        torch.tensor(segments.boundaries(lengths), dtype=torch.int32, device=DEVICE),
        num_tokens=t.shape[0],
        cp_size=cp,
        cp_rank=rank,
        cp_layout=cut,
        start_positions=None if starts is None else torch.tensor(starts, device=DEVICE),
    )


@pytest.mark.parametrize("case", [c for c in load_cases("rows.json") if "rows" in c])
def test_the_shared_cases_rotate_by_their_rows(case, monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    rows = [row for row in case["rows"] if row is not None]
    num_rows = case.get("freqs_rows") or max(max(rows) + 1, len(rows))
    if case["layout"] == "packed":
        num_rows = case.get("freqs_rows") or case["cu_seqlens"][-1]
    t, grad, freqs = problem(case["tokens"], num_rows, heads=2, dim=8, rotary=8)
    starts = case.get("start_positions")
    out = apply_packed_rotary(
        t,
        freqs,
        torch.tensor(case["cu_seqlens"], dtype=torch.int32, device=DEVICE),
        freqs_layout=case["layout"],
        cp_size=case["cp"],
        cp_rank=case["rank"],
        cp_layout=case.get("cp_layout", "zigzag"),
        start_positions=None if starts is None else torch.tensor(starts, device=DEVICE),
        fused=True,
    )
    check(t, grad, freqs, rows, out)


@pytest.mark.parametrize("cut", CUTS)
def test_start_positions_and_segments_of_length_one(cut):
    cp, lengths, starts = (1, [1, 1, 5, 1], [7, 0, 3, 2])
    t, grad, freqs = problem(8, 9)
    rows = layout_of(lengths, t, cp, 0, cut, starts).rows("per_sequence", num_rows=9)
    expected = segments.rows(lengths, "per_sequence", cp, 0, cut, starts)
    check(t, grad, freqs, expected, rotate_triton(t, freqs, rows))


@pytest.mark.parametrize("lengths", [[1] * 4000, [1], [33] * 31])
def test_many_segments_and_one_token(lengths):
    t, grad, freqs = problem(sum(lengths), max(lengths), heads=1, dim=4, rotary=4)
    rows = layout_of(lengths, t).rows("per_sequence", num_rows=max(lengths))
    expected = segments.rows(lengths, "per_sequence")
    check(t, grad, freqs, expected, rotate_triton(t, freqs, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_tail_padding_without_rows_is_copied_bit_by_bit(interleaved, dtype):
    t, grad, freqs = problem(13, 10, dtype=dtype)
    with torch.no_grad():
        t[10], t[11], t[12] = float("inf"), float("nan"), -0.0
    out = rotate_triton(t, freqs, interleaved=interleaved, mscale=1.5)
    (found,) = torch.autograd.grad(out, t, grad)
    assert torch.equal(bits(out[10:]), bits(t[10:]))
    assert torch.equal(found[10:], grad[10:])
    clean = t.detach().clone()
    clean[10:] = 0
    same = rotate_triton(clean, freqs, interleaved=interleaved, mscale=1.5)
    assert torch.equal(same[:10], out[:10])


def bits(x):
    return x.detach().contiguous().view(torch.uint8)


def test_dims_past_the_rotary_dim_are_copied_bit_by_bit():
    t, grad, freqs = problem(9, 9, dim=24, rotary=10, dtype=torch.bfloat16)
    out = rotate_triton(t, freqs, mscale=1.5)
    (found,) = torch.autograd.grad(out, t, grad)
    assert torch.equal(out[..., 10:], t[..., 10:])
    assert torch.equal(found[..., 10:], grad[..., 10:])
    assert torch.equal(rotate_triton(t, freqs[..., :0]), t)


def test_a_row_outside_freqs_gives_nan_and_touches_no_other_token():
    t, _, freqs = problem(4, 3)
    rows = torch.tensor([0, 3, -1, 2], device=DEVICE)
    out = rotate_triton(t, freqs, rows)
    assert out[1:3].isnan().all()
    assert torch.equal(out[[0, 3]], rotate_triton(t[[0, 3]], freqs[[0, 2]]))


@pytest.mark.parametrize("heads", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("dim", [2, 6, 72, 80, 128])
def test_any_number_of_heads_and_dims(heads, dim):
    t, grad, freqs = problem(11, 11, heads=heads, dim=dim, rotary=dim, dtype=torch.bfloat16)
    for interleaved in (False, True):
        out = rotate_triton(t, freqs, interleaved=interleaved)
        check(t, grad, freqs, list(range(11)), out, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "view",
    ["heads first", "every second head", "one head", "every second dim", "dims first", "qkv"],
)
def test_any_strides(view, interleaved):
    base = random(2, 10, 6, 32)
    t = {
        "heads first": base[0].transpose(0, 1),
        "every second head": base[0, :, ::2],
        "one head": base[0, :, :1].expand(-1, 4, -1),
        "every second dim": base[0, ..., ::2],
        "dims first": base[0].permute(2, 1, 0)[:, :, :8],
        "qkv": base.flatten(0, 1)[:, 2:4, 16:],
    }[view]
    freqs = random(2 * t.shape[2], 1, 1, t.shape[0]).permute(3, 1, 2, 0)[..., ::2]
    rows = torch.arange(2 * t.shape[0], device=DEVICE)[::2] // 2
    out = rotate_triton(t, freqs, rows, interleaved=interleaved)
    plain = (x.contiguous() for x in (t, freqs, rows))
    assert out.is_contiguous()
    assert torch.equal(out, rotate_triton(*plain, interleaved=interleaved))
    leaf = t.detach().clone().requires_grad_()
    weights = random(*t.shape, seed=5)
    strided = weights.transpose(0, 1).contiguous().transpose(0, 1)
    grads = [
        torch.autograd.grad(rotate_triton(leaf, freqs, rows, interleaved=interleaved), leaf, g)[0]
        for g in (weights, strided, weights[:1, :1, :1].expand_as(weights))
    ]
    assert torch.equal(grads[0], grads[1])
    assert grads[2].isfinite().all()


def test_angles_of_any_size_and_freqs_of_any_dtype():
    angles = torch.cat([torch.linspace(-size, size, 2001) for size in (8.0, 1e4, 1e6, 1e8)])
    freqs = angles.to(DEVICE)[:, None, None, None].expand(-1, 1, 1, 2)
    t = torch.tensor([1.0, 0.0], device=DEVICE).expand(freqs.shape[0], 1, 2)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        cast = freqs.to(dtype) if dtype.itemsize >= 4 else freqs[:2001].to(dtype)
        out = rotate_triton(t[: len(cast)], cast)
        expected = segments.rotate(t[: len(cast)], cast.double())
        assert largest(out.double() - expected) <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("tokens", [0, 5])
def test_inputs_are_untouched_and_the_output_is_new(tokens):
    t, grad, freqs = problem(tokens, 5)
    rows = torch.arange(tokens, device=DEVICE)
    inputs = [x.detach() for x in (t, grad, freqs, rows)]
    before = [x.clone() for x in inputs]
    for index in (rows, None):
        out = rotate_triton(t, freqs, index)
        (found,) = torch.autograd.grad(out, t, grad)
        assert all(map(torch.equal, inputs, before))
        assert out.shape == found.shape == t.shape
        if tokens:
            pointers = {x.data_ptr() for x in inputs}
            assert not pointers & {out.data_ptr(), found.data_ptr()}


@pytest.mark.parametrize("interleaved", [False, True])
def test_second_derivative(interleaved):
    t, _, freqs = problem(5, 4, heads=1, dim=6, rotary=4, dtype=torch.float64)
    rows = torch.tensor([0, 3, 3, 1, 2], device=DEVICE)

    def rotated(t):
        return rotate_triton(t, freqs, rows, interleaved=interleaved, mscale=1.1)

    assert torch.autograd.gradcheck(rotated, (t,))
    assert torch.autograd.gradgradcheck(rotated, (t,))


@pytest.mark.parametrize("with_rows", [False, True])
def test_opcheck(with_rows):
    t, _, freqs = problem(6, 5, dim=10, rotary=8, dtype=torch.bfloat16)
    rows = torch.tensor([4, 0, 1, 1, 2, 3], device=DEVICE) if with_rows else None
    strided = t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for x in (t, t.detach(), strided):
        results = torch.library.opcheck(_rotate, (x, freqs, rows, True, 1.2, False))
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_a_break_bit_equal(backend):
    torch.compiler.reset()
    t, grad, freqs = problem(12, 24, rotary=10, dtype=torch.bfloat16)
    cu = torch.tensor([0, 8, 24], dtype=torch.int32, device=DEVICE)

    def rotated(t, freqs, cu):
        layout = PackedLayout(cu, num_tokens=t.shape[0], cp_size=2, cp_rank=1)
        return rotate_triton(t, freqs, layout.rows("packed", num_rows=24), mscale=1.2)

    eager = rotated(t, freqs, cu)
    compiled = torch.compile(rotated, fullgraph=True, backend=backend)(t, freqs, cu)
    assert torch.equal(compiled, eager)
    found, expected = (torch.autograd.grad(out, t, grad)[0] for out in (compiled, eager))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"t": torch.zeros(4, 16)}, PackedInputError, "(4, 16)"),
        ({"t": torch.zeros(4, 2, 16, dtype=torch.int32)}, PackedInputError, "torch.int32"),
        ({"freqs": torch.zeros(4, 1, 2, 16)}, FreqsError, "(4, 1, 2, 16)"),
        ({"freqs": torch.zeros(4, 1, 1, 18)}, FreqsError, "rotary dim 18"),
        ({"freqs": torch.zeros(4, 1, 1, 7)}, FreqsError, "rotary dim 7"),
        ({"freqs": torch.zeros(4, 1, 1, 16, dtype=torch.int64)}, FreqsError, "torch.int64"),
        ({"freqs": torch.zeros(4, 1, 1, 16, requires_grad=True)}, FreqsError, "requires_grad=True"),
        ({"freqs": torch.zeros(4, 1, 1, 16, device="meta")}, PackedInputError, "meta"),
        ({"rows": torch.zeros(3, dtype=torch.int64)}, PackedInputError, "(3,)"),
        ({"rows": torch.zeros(4)}, PackedInputError, "torch.float32"),
        ({"rows": torch.zeros(4, dtype=torch.int64, device="meta")}, PackedInputError, "meta"),
    ],
)
def test_bad_input_is_typed(change, kind, words):
    good = {
        "t": torch.zeros(4, 2, 16),
        "freqs": torch.zeros(4, 1, 1, 16),
        "rows": torch.zeros(4, dtype=torch.int64),
    }
    on_device = {
        name: x if x.is_meta else x.detach().to(DEVICE).requires_grad_(x.requires_grad)
        for name, x in (good | change).items()
    }
    with pytest.raises(kind, match="expected") as error:
        rotate_triton(**on_device)
    assert words in str(error.value)


def test_the_backend_variable_chooses_the_kernel(monkeypatch):
    t, grad, freqs = problem(6, 6)
    cu = torch.tensor([0, 2, 6], device=DEVICE)
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    out = apply_packed_rotary(t, freqs, cu, mscale=1.2, interleaved=True, fused=True)
    assert torch.equal(out, rotate_triton(t, freqs, mscale=1.2, interleaved=True))
    check(t, grad, freqs, list(range(6)), out, True, 1.2)
    monkeypatch.setenv(BACKEND_VARIABLE, "te")
    with pytest.raises(BackendNotAvailable, match="fused=True"):
        apply_packed_rotary(t, freqs, cu, fused=True)
