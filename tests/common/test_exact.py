"""Products, elementwise functions and attention on the CPU: what is computed beside a row changes none of its bits."""

import random
from functools import partial, reduce
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import int32, list_items, make_paged, make_q, make_spec, make_work, run_decode

from nanoinfer.attention import torch_backend
from nanoinfer.attention.base import KeyRange
from nanoinfer.attention.registry import make_backend
from nanoinfer.common import exact
from nanoinfer.common.exact import threads
from nanoinfer.kernels.reference import rms_norm
from nanoinfer.layers.rope import rope_table
from nanoinfer.sampling.reference import logprobs_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
}


@pytest.fixture
def fresh_counts():
    """Row counts are tried again, and forgotten afterwards."""
    exact.row_counts.cache_clear()
    yield
    exact.row_counts.cache_clear()


# Products


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(56, 48), (33, 77), (300, 256), (1, 16)])
def test_a_row_of_a_product_is_the_same_alone_and_in_any_batch(out_features, in_features, has_bias, dtype):
    # A row of which another order of the sum leaves another rest.
    row, weight = exact.sensitive_operands(out_features, in_features, dtype)
    bias = torch.randn(out_features).mul(1e-3).to(dtype) if has_bias else None
    wanted = exact.linear(row, weight, bias)
    for num_rows in [2, 3, 4, 5, 15, 16, 17, 31, 63, 64, 65, 83, 130]:
        x = torch.randn(num_rows + 1, in_features).to(dtype)
        places = {0, 1, 2, 3, num_rows // 2, num_rows - 1} & set(range(num_rows))
        x[list(places)] = row
        # One element further: another alignment.
        shifted = torch.empty(num_rows * in_features + 1, dtype=dtype)[1:].view(num_rows, -1).copy_(x[:num_rows])
        for given in (x[:num_rows], shifted):
            found = exact.linear(given, weight, bias)
            assert found.shape == (num_rows, out_features)
            assert torch.equal(found[list(places)], wanted.expand(len(places), -1)), num_rows


def test_two_threads_change_no_row_of_a_product_either():
    with threads(2):
        row, weight = exact.sensitive_operands(96, 112, torch.float32)
        wanted = exact.linear(row, weight)
        for num_rows in (3, 6, 70):
            found = exact.linear(row.expand(num_rows, -1), weight)
            assert torch.equal(found, wanted.expand(num_rows, -1))


@DTYPES
def test_columns_of_a_weight_are_widened_some_rows_at_a_time(dtype, monkeypatch):
    """As those of another weight that has no others."""
    x, weight, sizes = torch.randn(5, 40).to(dtype), torch.randn(33, 90).to(dtype), []
    monkeypatch.setattr("nanoinfer.common.exact._WIDENED_ELEMENTS", 400)
    columns, library = weight[:, 50:], F.linear

    def linear(x, some, bias=None):
        assert some.is_contiguous() and some.data_ptr() % 64 == 0 and some.dtype == torch.float32
        sizes.append(len(some))
        return library(x, some, bias)

    monkeypatch.setattr(exact.F, "linear", linear)
    exact.wide_linear(x, columns)  # the first time, the library is tried
    sizes.clear()
    found = exact.wide_linear(x, columns)
    assert sizes == [10, 10, 10, 3] and found.dtype == torch.float32
    assert torch.equal(found, exact.wide_linear(x, columns.clone()))
    torch.testing.assert_close(found, x.float() @ columns.float().T)


def test_rows_that_are_products_of_their_own_lie_where_they_are_asked_for():
    x, weight, bias = torch.randn(3, 20), torch.randn(30, 20), torch.randn(30)
    out = torch.empty(3, 30)
    assert exact.linear(x, weight, bias, (7, 13, 10), out) is out
    wanted = [exact.linear(x, *one) for one in zip(weight.split((7, 13, 10)), bias.split((7, 13, 10)), strict=True)]
    assert torch.equal(out, torch.cat(wanted, 1)) and torch.equal(exact.linear(x, weight, bias, (7, 13, 10)), out)


def test_a_product_without_rows():
    assert exact.linear(torch.zeros(0, 8), torch.ones(3, 8)).shape == (0, 3)


def library_that_counts(calls, noise):
    """A product that treats each row alike on any processor, plus noise(number of rows): [rows, 1]."""

    def linear(x, weight, bias=None):
        calls.append(len(x))
        return (x[:, None] * weight).sum(-1) + noise(len(x)) + (0 if bias is None else bias)

    return linear


def in_lanes(terms, lanes):
    """Sum terms [n, ...] as a vectorised loop does: every `lanes`-th one by one, then one lane after the other."""
    sums = torch.zeros(lanes, *terms.shape[1:])
    for begin in range(0, len(terms), lanes):
        some = terms[begin : begin + lanes]
        sums[: len(some)] += some
    return reduce(torch.add, sums)


def in_blocks(terms, size):
    return reduce(torch.add, [in_lanes(block, 1) for block in terms.split(size)])


@pytest.fixture(params=[(7, 33), (33, 65)], ids="{0[0]} to {0[1]} columns".format)
def sizes(request):
    return range(*request.param)


@DTYPES
def test_operands_show_every_other_order_of_a_sum_at_every_size(sizes, dtype):
    """Whatever a library may do with terms that it adds up in float32, the bits of the result tell."""
    for in_features in sizes:
        row, weight = exact.sensitive_operands(256, in_features, dtype)
        terms = (row.float() * weight.float()).T
        orders = [in_lanes(terms, lanes) for lanes in (1, 2, 4, 8, 16, 32) if lanes < in_features - 1]
        orders += [in_lanes(terms.flip(0), 1), in_blocks(terms, 3), in_blocks(terms, -(-in_features // 2))]
        found = [order.to(dtype) for order in orders]
        for i, j in combinations(range(len(found)), 2):
            assert not torch.equal(found[i], found[j]), (in_features, i, j)


@DTYPES
@pytest.mark.parametrize("in_features", [3, 4, 20, 40])
@pytest.mark.parametrize("out_features", [1, 8, 100])
@pytest.mark.sampled(
    *(f"{out}-{size}-torch.float32" for out in (1, 8, 100) for size in (3, 4, 20, 40)),
    "8-40-torch.bfloat16", "100-4-torch.bfloat16", "1-20-torch.float16", "100-40-torch.float16",
)  # fmt: skip
def test_counts_that_sum_in_another_order_are_refused(out_features, in_features, dtype, fresh_counts, monkeypatch):
    def linear(x, weight, bias=None):
        terms = (x[:, None].float() * weight.float()).permute(2, 0, 1)
        found = in_lanes(terms, {4: 2, 16: 1, 64: 1}[len(x)])
        return (found if bias is None else found + bias).to(x.dtype)

    monkeypatch.setattr(exact.F, "linear", linear)
    for has_bias in (False, True):
        assert exact.row_counts(out_features, in_features, dtype, has_bias, 1) == (16, 64)


@pytest.mark.parametrize("in_features", [1, 2])
def test_where_no_operands_show_an_order_rows_are_computed_one_by_one(in_features, fresh_counts, monkeypatch):
    calls = []
    monkeypatch.setattr(exact.F, "linear", library_that_counts(calls, lambda rows: torch.zeros(rows, 1)))
    exact.linear(torch.randn(3, in_features), torch.randn(10, in_features))
    assert calls == [1, 1, 1]


@pytest.mark.parametrize(
    ("noise", "counts"),
    [
        (lambda rows: torch.zeros(rows, 1), (4, 16, 64)),
        (lambda rows: torch.full((rows, 1), float(rows < 16)), (16, 64)),
        (lambda rows: torch.full((rows, 1), float(rows > 16)), (4, 16)),
        (lambda rows: torch.full((rows, 1), float(rows)), (16,)),
        (lambda rows: torch.arange(rows)[:, None].float(), (1,)),
        (lambda rows: (torch.arange(rows)[:, None] == 40).float(), (4, 16)),
    ],
    ids=["all agree", "few differ", "many differ", "each differs", "by place", "by place among many"],
)
def test_only_row_counts_that_agree_are_used(noise, counts, fresh_counts, monkeypatch):
    """Whatever a library does with the number of rows or a row's place, the result does not show it."""
    calls = []
    monkeypatch.setattr(exact.F, "linear", library_that_counts(calls, noise))
    x, weight = torch.randn(150, 24), torch.randn(10, 24)
    alone = torch.cat([exact.linear(row, weight) for row in x.split(1)])
    assert exact.row_counts(10, 24, torch.float32, False, torch.get_num_threads()) == counts
    calls.clear()
    for num_rows in (1, 4, 5, 17, 64, 65, 150):
        assert torch.equal(exact.linear(x[:num_rows], weight), alone[:num_rows])
    assert set(calls) <= set(counts)


def test_a_shape_is_tried_once(fresh_counts, monkeypatch):
    calls = []
    monkeypatch.setattr(exact.F, "linear", library_that_counts(calls, lambda rows: torch.zeros(rows, 1)))
    for _ in range(3):
        exact.linear(torch.randn(2, 24), torch.randn(10, 24))
    num_trials = calls.count(16)  # of several weights: this one is small
    assert calls == [16] * num_trials + [4] * num_trials + [64] * num_trials + [4, 4, 4]


# Elementwise functions


@DTYPES
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_value_has_the_same_bits_at_every_place_of_any_tensor(function, dtype):
    function = FUNCTIONS[function]
    x = (torch.randn(3000) * 2).to(dtype)
    wanted = exact.elementwise(function, x)
    assert torch.allclose(wanted.float(), function(x.float()), atol=0.03, rtol=0.02)
    for size in (1, 61, 64, 999):
        assert torch.equal(torch.cat([exact.elementwise(function, part) for part in x.split(size)]), wanted)
    strided = torch.stack((x, -x), dim=1)[:, 0]
    for size in (len(x), 64, 1024):  # a column of whole vectors, too
        assert torch.equal(exact.elementwise(function, strided[:size]), wanted[:size])
        assert torch.equal(exact.elementwise(function, strided[:size, None]), wanted[:size, None])
    assert torch.equal(exact.elementwise(function, x.view(30, 1, 100)), wanted.view(30, 1, 100))


def test_threads_cut_no_vector():
    x = torch.randn(100_003) * 3
    wanted = torch.cat([exact.elementwise(F.silu, part) for part in x.split(4096)])
    with threads(2):
        assert torch.equal(exact.elementwise(F.silu, x), wanted)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 2**14, 2**14 + 1, 50_000])
def test_every_call_is_of_whole_aligned_vectors_and_of_one_thread(count):
    sizes = []

    def function(x):
        assert x.is_contiguous() and x.data_ptr() % 64 == 0 and len(x) % exact.WIDTH == 0
        sizes.append(len(x))
        return x + 1

    for x in (torch.randn(count + 1)[1:], torch.randn(count, 3)[:, 0], torch.randn(count, 2)[:, :1]):
        sizes.clear()
        assert torch.equal(exact.elementwise(function, x), x + 1)
        assert max(sizes) < 32768, "torch gives larger loops to several threads"
        assert sum(sizes) - count < exact.WIDTH


@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_of_a_row_is_the_same_alone_and_in_any_batch(offset):
    x, weight = torch.randn(300, 75), torch.randn(75)
    wanted = rms_norm(x, weight, 1e-6, offset=offset)
    assert torch.equal(torch.cat([rms_norm(row, weight, 1e-6, offset=offset) for row in x.split(1)]), wanted)
    with threads(2):
        assert torch.equal(rms_norm(x, weight, 1e-6, offset=offset), wanted)


def test_positions_do_not_depend_on_the_length_of_the_table():
    rope = dict(rope_type="default", rope_theta=10_000.0)
    long = rope_table(rope, 48, 5000, torch.float32, "cpu")
    with threads(2):
        for count in (1, 77, 2999):
            assert torch.equal(rope_table(rope, 48, count, torch.float32, "cpu"), long[:count])


# Log-probabilities


def test_likeliest_tokens_do_not_depend_on_how_many_others_ask_for():
    """With few bits many logits are equal: of these the first ids come first."""
    logits = (torch.randn(5, 300) * 2).round()
    logits[0, :7] = -0.0
    logits[1, 5:] = float("-inf")
    tokens = torch.zeros(5, dtype=torch.int64)
    *_, values, ids = logprobs_of(logits, tokens, 20)
    wanted_values, wanted_ids = torch.log_softmax(logits, -1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, wanted_values[:, :20]) and torch.equal(ids, wanted_ids[:, :20])
    for top in (0, 1, 2, 7):
        for row in range(5):
            *_, few_values, few_ids = logprobs_of(logits[row : row + 1], tokens[:1], top)
            assert torch.equal(few_values[0], values[row, :top]) and torch.equal(few_ids[0], ids[row, :top])


# Attention


def backend_with(monkeypatch, spec, *, few_at_once):
    if few_at_once:
        monkeypatch.setattr(torch_backend, "MAX_ELEMENTS", 3000)
    return make_backend("torch", spec, "cpu", offload=True)


def prefill_chunks(backend, q, paged, cuts, window):
    """Prefill of all sequences at once, in chunks that end at `cuts`; later keys hold anything until their chunk
    comes."""
    out, spec = torch.full(q.shape, float("nan"), dtype=q.dtype), backend.spec
    kv = torch.full_like(paged.kv, float("nan"))
    num_tokens, count = len(paged.keys[0]), len(paged.keys)
    q = q.view(count, num_tokens, *q.shape[1:])
    out = out.view(q.shape)
    for begin, end in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        for table in paged.tables:
            for at in range(begin, end):
                kv[table[at // spec.block_size], :, at % spec.block_size] = paged.kv[
                    table[at // spec.block_size], :, at % spec.block_size
                ]
        size = end - begin
        key_range = KeyRange(
            cu_seqlens_q=int32([i * size for i in range(count + 1)]),
            query_pos=int32([begin] * count),
            first_block=int32([0] * count),
            kv_end=int32([end] * count),
            load_state=int32([0] * count),
            block_table=int32(paged.tables),
            max_query_len=size,
            num_blocks=[len(table) for table in paged.tables],
            query_rows=(0, count * size),
            store_state=False,
        )
        found = torch.empty(count * size, *q.shape[2:], dtype=q.dtype)
        backend.prefill(q[:, begin:end].flatten(0, 1), kv, key_range, None, found, window)
        out[:, begin:end] = found.view(count, size, *q.shape[2:])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_prefill_gives_a_query_the_same_bits_in_every_chunk(window, dtype, monkeypatch):
    spec, generator = make_spec(head_dim=32, dtype=dtype, windows=(window,)), random.Random(0)
    paged, q = make_paged(spec, [190, 190]), make_q(spec, 380)
    whole = prefill_chunks(backend_with(monkeypatch, spec, few_at_once=False), q, paged, [], window)
    assert whole.isfinite().all()
    for i in range(3):
        backend = backend_with(monkeypatch, spec, few_at_once=i == 1)
        cuts = sorted(generator.sample(range(1, 190), 2 + 3 * i))
        assert torch.equal(prefill_chunks(backend, q, paged, cuts, window), whole), cuts


def test_two_threads_change_no_bit_of_the_attention_either(monkeypatch):
    """Few and small products: threads wait for each other by spinning, for milliseconds where the machine is busy."""
    spec, lens = make_spec(head_dim=32, windows=(40,)), [50, 16, 5]
    backend = backend_with(monkeypatch, spec, few_at_once=False)
    with threads(2):
        paged, q = make_paged(spec, [50]), make_q(spec, 50)
        whole = prefill_chunks(backend, q, paged, [], 40)
        assert torch.equal(prefill_chunks(backend, q, paged, [7, 33], 40), whole)
        paged, q = make_paged(spec, lens), make_q(spec, len(lens))
        out, _ = run_decode(backend, q, paged.kv, paged.tables, lens, 40)
        assert torch.equal(run_decode(backend, q[1:], paged.kv, paged.tables[1:], lens[1:], 40)[0], out[1:])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 15.0])
def test_decode_gives_a_row_the_same_bits_in_every_batch(window, softcap, monkeypatch):
    lens = [1, 700, 16, 33, 400, 5]  # 44 splits are more than one sum of the merge, 25 more than a vector
    spec = make_spec(head_dim=32, softcap=softcap, windows=(window,))
    paged, q = make_paged(spec, lens), make_q(spec, len(lens))
    backend = backend_with(monkeypatch, spec, few_at_once=False)
    out, _ = run_decode(backend, q, paged.kv, paged.tables, lens, window)
    for few_at_once in (False, True):
        backend = backend_with(monkeypatch, spec, few_at_once=few_at_once)
        for rows in ([0], [1], [2], [5], [3, 4], [5, 0, 2], [4, 1]):
            tables, some = [paged.tables[row] for row in rows], [lens[row] for row in rows]
            found, _ = run_decode(backend, q[rows], paged.kv, tables, some, window)
            assert torch.equal(found, out[rows]), rows


def test_what_lies_behind_the_last_token_changes_no_bit_of_decode():
    """Keys and values of whole blocks enter the products: NaN, infinity or other tokens' alike."""
    spec, lens = make_spec(), [21, 38]
    backend, paged, q = make_backend("torch", spec, "cpu", offload=True), make_paged(spec, lens), make_q(spec, 2)
    behind = paged.kv.isnan()
    wanted, _ = run_decode(backend, q, paged.kv, paged.tables, lens)
    for filler in (float("inf"), 0.0, 3e38):
        kv = torch.where(behind, filler, paged.kv)
        assert torch.equal(run_decode(backend, q, kv, paged.tables, lens)[0], wanted)


def test_every_product_of_the_attention_has_one_of_two_shapes(monkeypatch):
    """However long the rows and chunks are: what is not there is masked, not left out."""
    shapes, bmm = set(), torch.bmm

    def recorded(left, right, out):
        assert all(x.is_contiguous() and x.data_ptr() % 64 == 0 for x in (left, right, out))
        shapes.add((*left.shape, right.shape[-1]))
        return bmm(left, right, out=out)

    monkeypatch.setattr(torch_backend.torch, "bmm", recorded)
    spec, lens = make_spec(windows=(20,)), [1, 30, 47]
    backend, paged, q = make_backend("torch", spec, "cpu", offload=True), make_paged(spec, lens), make_q(spec, 3)
    run_decode(backend, q, paged.kv, paged.tables, lens, 20)
    assert shapes == {(2, 3, 16, 16)}
    shapes.clear()
    paged = make_paged(spec, [60])
    prefill_chunks(backend, make_q(spec, 60), paged, [1, 7, 37], 20)
    assert shapes == {(2, 3 * torch_backend.TILE_QUERIES, 16, 16)}


def test_a_library_that_rounds_by_the_place_changes_no_bit_of_the_attention(monkeypatch):
    """A query has the same place of a product in every chunk, and no value is in the rest behind the whole vectors."""

    def bmm(left, right, out):
        places = torch.arange(left.shape[1])[:, None]
        return out.copy_(torch.matmul(left, right) * (1 + 1e-3 * places))

    def by_place(function):
        def changed(x):
            found, whole = function(x), x.numel() // 64 * 64
            found.view(-1)[whole:] *= 1.001
            return found

        return changed

    monkeypatch.setattr(torch_backend.torch, "bmm", bmm)
    for name in ("exp", "log", "tanh"):
        monkeypatch.setattr(torch_backend.torch, name, by_place(getattr(torch, name)))
    spec, lens = make_spec(q_heads=3, kv_heads=1, softcap=15.0, windows=(40, None)), [50, 464, 5]
    backend, paged, q = make_backend("torch", spec, "cpu", offload=True), make_paged(spec, lens), make_q(spec, 3)
    for window in spec.windows:
        out, _ = run_decode(backend, q, paged.kv, paged.tables, lens, window)
        for row in range(3):
            found, _ = run_decode(backend, q[row : row + 1], paged.kv, [paged.tables[row]], [lens[row]], window)
            assert torch.equal(found[0], out[row])
    paged, q = make_paged(spec, [90]), make_q(spec, 90)
    whole = prefill_chunks(backend, q, paged, [], 40)
    assert torch.equal(prefill_chunks(backend, q, paged, [1, 20, 53], 40), whole)


def test_partials_of_a_buffer_do_not_depend_on_what_else_it_holds():
    spec, lens = make_spec(q_heads=2, kv_heads=1), [50, 64, 9]
    backend, paged, q = make_backend("torch", spec, "cpu", offload=True), make_paged(spec, lens), make_q(spec, 3)
    _, wanted = run_decode(backend, q, paged.kv, paged.tables, lens)
    items, _ = list_items(spec, paged.tables, lens, None)
    for item in items:
        partials = backend.partials(len(items))
        backend.decode_partial(q, paged.kv, make_work([item]), int32(lens), partials, None)
        assert torch.equal(partials.out[item[3]], wanted.out[item[3]])
        assert torch.equal(partials.lse[item[3]], wanted.lse[item[3]])
