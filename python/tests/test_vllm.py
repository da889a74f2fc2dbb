"""Tests of gt_kernels.compat.vllm.  They compare every function and argument with plain float64 loops over tokens, on
pages in vLLM's layout.  They also test install() on a package with vLLM's names."""

import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import tempfile
import unittest
import unittest.mock

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import torch.nn.functional as F

from gt_kernels import ArgumentError, UnsupportedError, c
from gt_kernels.compat import vllm
from test_updates import launches

DEVICES = ["cpu"]
if torch.cuda.is_available() and c.gt_device_supported(-1) == c.GT_OK:
    DEVICES.append("cuda")
TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
H, P, G, N, D, W = 4, 6, 2, 5, 8, 4
ROWS = 7


def relative(found, right):
    return ((found.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30)).item()


def pool_of(shape, layout, dtype=torch.float32, device="cpu"):
    """A pool of random rows.  layout: None is packed; "apart" has gaps, as in pages with several states; "transposed"
    is vLLM's layout of convolution states."""
    if layout == "apart":
        return torch.randn(ROWS, 3, *shape).to(device, dtype)[:, 1]
    if layout == "transposed":
        return torch.randn(ROWS, *reversed(shape)).to(device, dtype).permute(0, *range(len(shape), 0, -1))
    return torch.randn(ROWS, *shape).to(device, dtype)


def integers(values, device="cpu", dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def plain_conv(x, weight, bias, window, activation):
    """The convolution of one sequence: x [T,D], window [D,W-1] -> (y [T,D], the next window)."""
    everything = torch.cat([window.double().t(), x.double()])
    width = weight.shape[1]
    y = torch.stack([(everything[t:t + width].t() * weight.double()).sum(1) for t in range(len(x))]) if len(x) \
        else x.double()
    y = y if bias is None else y + bias.double()
    return F.silu(y) if activation else y, everything[len(everything) - width + 1:].t()


def plain_scan(state, x, dt, A, B, C, D=None, z=None, bias=None, softplus=True, limit=None):
    """One sequence: x dt z [T,H,P], A [H,P,N], B C [T,G,N], D bias [H,P] -> (y [T,H,P], the state after each token)."""
    state, x, dt, A, B, C = (tensor.double() for tensor in (state, x, dt, A, B, C))
    dt = dt if bias is None else dt + bias.double()
    dt = F.softplus(dt) if softplus else dt
    dt = dt if limit is None else dt.clamp(*limit)
    B, C = (tensor.repeat_interleave(x.shape[1] // tensor.shape[1], 1) for tensor in (B, C))
    y, states = torch.zeros_like(x), []
    for t in range(len(x)):
        state = state * torch.exp(dt[t][..., None] * A) + (dt[t] * x[t])[..., None] * B[t][:, None]
        states.append(state)
        y[t] = (state * C[t][:, None]).sum(-1)
    y = y if D is None else y + x * D.double()
    return y if z is None else y * F.silu(z.double()), states


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)

    def near(self, found, right, *dtypes):
        self.assertLess(relative(found, right), max(TOLERANCE[dtype] for dtype in dtypes))

    def same_but(self, pool, before, rows):
        others = [row for row in range(ROWS) if row not in rows]
        self.assertTrue(torch.equal(pool[others], before[others]))


class Convolution(Case):
    def test_prefill(self):
        dtypes = itertools.product((torch.float32, torch.bfloat16), TOLERANCE)
        cases = [dict(dtype=a, state=b, layout=layout) for a, b in dtypes for layout in (None, "apart", "transposed")]
        cases += [dict(width=width, columns=columns) for width in (2, 3, 4) for columns in (width - 1, width + 2)]
        cases += [dict(activation=activation) for activation in (None, False, True, "swish")]
        cases += [dict(bias=False), dict(start=None), dict(start=torch.int32), dict(indices=False), dict(plain=False)]
        for device, case in itertools.product(DEVICES, cases):
            with self.subTest(device=device, **case):
                self.check_prefill(device, **case)

    def check_prefill(self, device, dtype=torch.float32, state=torch.float32, layout=None, width=W, columns=None,
                      activation="silu", bias=True, start=torch.bool, indices=True, plain=True):
        """The sequences include an empty one, one shorter than the window, one with a null block, and one whose row is
        outside the pool."""
        bounds, rows = [0, 6, 6, 7, 9, 11, 20], [3, 6, 5, 0, -1, 1] if indices else range(6)
        x = torch.randn(22, D).to(device, dtype).t()
        x = x if plain else x.contiguous()
        weight, b = torch.randn(D, width, device=device), torch.randn(D, device=device) if bias else None
        pool = pool_of((D, columns or width - 1), layout, state, device)
        before, fresh = pool.clone(), [0, 1, 1, 0, 0, 1]
        y = vllm.causal_conv1d_fn(
            x, weight, b, pool, integers(bounds, device), integers(rows, device) if indices else None,
            None if start is None else integers(fresh, device).to(start), activation, metadata=object(),
            null_block_id=0 if indices else None)
        self.assertEqual((y.shape, y.dtype), (x.shape, dtype))
        rounded, right, expected = x.t().to(state), torch.zeros(22, D).double(), before.clone()
        for s, row in enumerate(rows):
            if (row > 0 or not indices) and bounds[s] < bounds[s + 1]:
                window = before[row, :, :width - 1] if start is not None and fresh[s] else torch.zeros(D, width - 1)
                right[bounds[s]:bounds[s + 1]], after = plain_conv(
                    rounded[bounds[s]:bounds[s + 1]].cpu(), weight.cpu(), None if b is None else b.cpu(), window.cpu(),
                    activation)
                expected[row, :, :width - 1] = after.to(device, state)
        self.near(y.t().cpu(), right, dtype, state)
        self.assertTrue(torch.equal(pool, expected))

    def test_prefill_copies_no_states(self):
        """A prefill leaves float32 and 16-bit states in their pool."""
        with unittest.mock.patch.object(vllm, "_take_rows") as take:
            for state in (torch.float32, torch.bfloat16, torch.float16):
                self.check_prefill("cpu", state=state, layout="transposed", columns=W + 1)
        take.assert_not_called()

    def test_one_token_and_more(self):
        dtypes = itertools.product((torch.float32, torch.bfloat16), TOLERANCE)
        cases = [dict(dtype=a, state=b, layout=layout) for a, b in dtypes for layout in (None, "apart", "transposed")]
        cases += [dict(T=T, columns=columns, width=width) for T in (None, 1, 5, 20) for columns in (3, 6)
                  for width in (2, 4)]
        cases += [dict(indices=2), dict(indices=0), dict(null=None), dict(null=3), dict(out=True), dict(packed=True),
                  dict(activation=True), dict(activation=None)]
        for device, case in itertools.product(DEVICES, cases):
            with self.subTest(device=device, **case):
                self.check_update(device, **case)

    def check_update(self, device, dtype=torch.float32, state=torch.float32, layout=None, T=None, columns=3, width=W,
                     indices=1, null=0, out=False, packed=False, activation="silu"):
        rows = [4, 0, 2, 3, -1] if indices else range(5)
        null = null if indices else None
        x = torch.randn((5, D) if T is None else (5, D, T)).to(device, dtype)
        weight, bias = torch.randn(D, width, device=device), torch.randn(D, device=device)
        pool = pool_of((D, columns), layout, state, device)
        before, options = pool.clone(), {}
        if indices:
            named = integers(rows, device)
            options["conv_state_indices"] = named if indices == 1 else torch.stack([named, named + 1], 1)
        if packed:
            options.update(query_start_loc=torch.arange(6, dtype=torch.int32, device=device), max_query_len=1)
        memory = torch.full_like(x, 9) if out else None
        y = vllm.causal_conv1d_update(x, pool, weight, bias, activation, null_block_id=null, out=memory, **options)
        self.assertEqual((y.shape, y.dtype), (x.shape, dtype))
        self.assertTrue(not out or y is memory)
        expected, tokens = before.clone(), x.reshape(5, D, T or 1).to(state).transpose(1, 2)
        right = torch.zeros(5, T or 1, D).double()
        for b, row in enumerate(rows):
            if row != null and row >= 0:
                window = before[row, :, :width - 1].cpu()
                right[b], after = plain_conv(tokens[b].cpu(), weight.cpu(), bias.cpu(), window, activation)
                expected[row, :, :width - 1] = after.to(device, state)
        self.near(y.cpu(), right.transpose(1, 2).reshape(x.shape), dtype, state)
        self.assertTrue(torch.equal(pool, expected))

    def test_speculative(self):
        """Several rounds of drafts, with a different number of accepted tokens in each.  The results are the same as
        without the rejected tokens."""
        for device, dtype, width, layout in itertools.product(DEVICES, (torch.float32, torch.bfloat16), (2, 4),
                                                              (None, "transposed")):
            for packed in (True, False):
                with self.subTest(device=device, dtype=dtype, width=width, layout=layout, packed=packed):
                    self.check_speculative(device, dtype, width, layout, packed)

    def check_speculative(self, device, dtype, width, layout, packed):
        rows, most = [4, 0, 2, 6], 3
        pool = pool_of((D, width - 1 + most), layout, dtype, device)
        weight, bias = torch.randn(D, width, device=device), torch.randn(D, device=device)
        windows = {row: pool[row, :, :width - 1].clone() for row in rows}
        accepted = [1, 1, 1, 1]
        for lengths in ([3, 3, 3, 3], [3, 2, 1, 0], [2, 1, 3, 3]) if packed else ([3] * 4, [3] * 4):
            before = pool.clone()
            bounds = [0, *itertools.accumulate(lengths)]
            drafts = [torch.randn(length, D).to(device, dtype) for length in lengths]
            options = {"num_accepted_tokens": integers(accepted, device), "conv_state_indices": integers(rows, device)}
            if packed:
                x = torch.cat([*drafts, torch.randn(2, D).to(device, dtype)])
                y = vllm.causal_conv1d_update(x, pool, weight, bias, True, query_start_loc=integers(bounds, device),
                                              max_query_len=most, **options)
                self.assertFalse(y[bounds[-1]:].any())
            else:
                x = torch.stack(drafts).transpose(1, 2).contiguous()
                y = vllm.causal_conv1d_update(x, pool, weight, bias, True, **options)
                y = y.transpose(1, 2).reshape(-1, D)
            for b, row in enumerate(rows):
                if row == 0 or not lengths[b]:
                    self.assertFalse(y[bounds[b]:bounds[b + 1]].any())
                    self.assertTrue(torch.equal(pool[row], before[row]))
                    continue
                window = before[row][:, accepted[b] - 1:accepted[b] + width - 2]
                self.assertTrue(torch.equal(window, windows[row]))
                right, _ = plain_conv(drafts[b].cpu(), weight.cpu(), bias.cpu(), window.cpu(), True)
                self.near(y[bounds[b]:bounds[b + 1]].cpu(), right, dtype)
                rest = slice(width - 2 + lengths[b], None)
                self.assertTrue(torch.equal(pool[row, :, rest], before[row, :, rest]))
                accepted[b] = 1 + (b + sum(lengths)) % lengths[b]
                windows[row] = torch.cat([window, drafts[b][:accepted[b]].t()], 1)[:, accepted[b]:]
            self.same_but(pool, before, rows)

    def test_refusals(self):
        x, pool, weight = torch.zeros(D, 5), torch.zeros(ROWS, D, 3), torch.zeros(D, W)
        good = {"x": x, "weight": weight, "bias": None, "conv_states": pool, "query_start_loc": integers([0, 5])}
        update = {"x": x.t(), "conv_state": pool, "weight": weight, "query_start_loc": integers([0, 2, 5]),
                  "max_query_len": 3, "num_accepted_tokens": integers([1, 1]), "conv_state_indices": integers([1, 2])}
        for function, values, changes, text in (
                (vllm.causal_conv1d_fn, good, {"conv_states": pool[:, :4]}, r"conv_states has shape \[7, 4, 3\]"),
                (vllm.causal_conv1d_fn, good, {"conv_states": pool[..., :2]}, "must have at least W - 1 = 3 inputs"),
                (vllm.causal_conv1d_fn, good, {"conv_states": pool[:1].expand_as(pool)}, "must not be expanded"),
                (vllm.causal_conv1d_fn, good, {"query_start_loc": integers([0])}, "must have at least 2 elements"),
                (vllm.causal_conv1d_fn, good, {"query_start_loc": integers([0, 9])}, "query_start_loc"),
                (vllm.causal_conv1d_fn, good, {"cache_indices": integers([])}, "cache_indices .* each of 1 sequences"),
                (vllm.causal_conv1d_fn, good, {"has_initial_state": integers([])}, "has_initial_state"),
                (vllm.causal_conv1d_fn, good, {"weight": torch.zeros(D, 5)},
                 r"width 5 \(must be 2 to 4\) is not supported"),
                (vllm.causal_conv1d_fn, good, {"activation": "relu"}, "activation 'relu' is not supported"),
                (vllm.causal_conv1d_fn, good, {"null_block_id": "a", "cache_indices": integers([1])},
                 "null_block_id = 'a': must be an integer"),
                (vllm.causal_conv1d_update, update, {"max_query_len": -1}, "max_query_len = -1: must be positive"),
                (vllm.causal_conv1d_update, update, {}, r"conv_state has .* W - 2 \+ 3 inputs a row, for 3 tokens"),
                (vllm.causal_conv1d_update, update, {"conv_state": pool.repeat(1, 1, 2),
                                                     "num_accepted_tokens": integers([1])},
                 "num_accepted_tokens has .* each of 2 sequences"),
                (vllm.causal_conv1d_update, update, {"out": torch.zeros(4, D)}, r"out has shape \[4, 8\]")):
            with self.subTest(function.__name__, text=text):
                with self.assertRaisesRegex((ArgumentError, UnsupportedError),
                                            f"^gt_kernels.compat.vllm.{function.__name__}: .*{text}"):
                    function(**{**values, **changes})
                self.assertFalse(pool.any())


def update_arguments(tokens, device="cpu", dtype=torch.float32, form="heads", parameters=torch.float32, without=()):
    """x, dt, A, B, C, D, dt_bias, z of selective_state_update.  form: "heads" as in Mamba-2, with expanded tensors;
    "full", like heads, but without expanded tensors; "channels" as in Mamba-1."""
    shape = (H, P) if form != "channels" else (D,)

    def tensor(*size, dtype=dtype):
        return torch.randn(size).to(device, dtype)

    values = {"x": tensor(tokens, *shape), "dt": tensor(tokens, *shape),
              "A": -tensor(*shape, N, dtype=torch.float32).abs(), "B": tensor(tokens, G, N), "C": tensor(tokens, G, N),
              "D": tensor(*shape, dtype=parameters), "dt_bias": tensor(*shape, dtype=parameters),
              "z": tensor(tokens, *shape)}
    if form == "heads":
        for name, kept in (("dt", 2), ("A", 1), ("D", 1), ("dt_bias", 1)):
            value = values[name]
            values[name] = value[(slice(None),) * kept + (slice(1),) * (value.dim() - kept)].expand_as(value)
    if form == "channels":
        values.update(B=values["B"][:, 0], C=values["C"][:, 0])
    return {name: None if name in without else value for name, value in values.items()}


def plain_update(state, values, tokens):
    """plain_scan of the tokens in the slice `tokens`, for arguments in any form."""
    x, dt, A, B, C, skip, bias, z = (None if v is None else v.cpu() for v in values.values())
    if x.dim() == 2:
        x, dt, z = (None if v is None else v[:, None] for v in (x, dt, z))
        A, state, skip, bias = (None if v is None else v[None] for v in (A, state.cpu(), skip, bias))
    B, C = (v if v.dim() == 3 else v[:, None] for v in (B, C))
    y, states = plain_scan(state.cpu(), x[tokens], dt[tokens], A, B[tokens], C[tokens], skip,
                           None if z is None else z[tokens], bias)
    shape = values["x"].shape[1:]
    return y.reshape(-1, *shape), [state.reshape(*shape, -1) for state in states]


class Update(Case):
    def test_one_token(self):
        cases = [dict(form=form, state=state, dtype=dtype, layout=layout) for form in ("heads", "full", "channels")
                 for state in TOLERANCE for dtype in (torch.float32, torch.bfloat16)
                 for layout in (None, "apart", "transposed")]
        cases += [dict(form=form, **more) for form in ("heads", "full", "channels") for more in (
            dict(columns=2), dict(target="other"), dict(target="other", layout="apart", state=torch.bfloat16),
            dict(target="other", layout="transposed", state=torch.float64), dict(null=None), dict(null=5),
            dict(out=True), dict(columns=0), dict(without=("z",)), dict(without=("D", "dt_bias")),
            dict(parameters=torch.bfloat16))]
        for device, case in itertools.product(DEVICES, cases):
            with self.subTest(device=device, **case):
                self.check_one_token(device, **case)

    def check_one_token(self, device, form, state=torch.float32, dtype=torch.float32, layout=None, columns=1,
                        target=None, null=0, out=False, without=(), parameters=torch.float32):
        """Without indices sequence s uses row s.  With other targets, one sequence writes the row that another
        reads."""
        rows = [4, 0, 5, -1, 2] if columns else list(range(5))
        targets = [5, 3, 0, 1, 6] if target else rows
        null = null if columns else None
        values = update_arguments(5, device, dtype, form, parameters, without)
        pool = pool_of(values["A"].shape, layout, state, device)
        before, options = pool.clone(), {}
        if columns:
            named = integers(rows, device)
            named = named if columns == 1 else torch.stack([named, named + 1], 1)
            options = {"state_batch_indices": named, "dst_state_batch_indices": named}
            if target:
                options["dst_state_batch_indices"] = integers(targets, device, torch.int64)
        memory = torch.full_like(values["x"], 9) if out else None
        y = vllm.selective_state_update(pool, *list(values.values())[:7], values["z"], True, null_block_id=null,
                                        out=memory, **options)
        self.assertEqual((y.shape, y.dtype), (values["x"].shape, dtype))
        self.assertTrue(not out or y is memory)
        expected, is_padding = before.clone().double(), [row == null or row < 0 for row in rows]
        for s, (row, to) in enumerate(zip(rows, targets)):
            if is_padding[s]:
                self.assertFalse(y[s].any())
                continue
            right, states = plain_update(before[row], values, slice(s, s + 1))
            self.near(y[s:s + 1].cpu(), right, dtype, state)
            if to != null:
                expected[to] = states[0].to(device)
        self.near(pool, expected, state)
        self.same_but(pool, before, [to for to, skip in zip(targets, is_padding) if to != null and not skip])

    def test_packed(self):
        for device, form, state, target in itertools.product(DEVICES, ("heads", "full", "channels"), TOLERANCE,
                                                             (None, "other")):
            with self.subTest(device=device, form=form, state=state, target=target):
                bounds, rows = [0, 3, 3, 4, 20, 22], [4, 6, 0, 2, 1]
                targets = [2, 5, 3, 4, 6] if target else rows
                values = update_arguments(23, device, form=form)
                pool = pool_of(values["A"].shape, "apart", state, device)
                before, expected = pool.clone(), pool.clone().double()
                y = vllm.selective_state_update(
                    pool, *list(values.values())[:7], values["z"], True, integers(rows, device), cu_seqlens=integers(
                        bounds, device), dst_state_batch_indices=integers(targets, device) if target else None)
                for s, (row, to) in enumerate(zip(rows, targets)):
                    if row and bounds[s] < bounds[s + 1]:
                        tokens = slice(bounds[s], bounds[s + 1])
                        right, states = plain_update(before[row], values, tokens)
                        self.near(y[tokens].cpu(), right, torch.float32, state)
                        expected[to] = states[-1].to(device)
                self.near(pool, expected, state)
                self.assertFalse(y[22:].any())
                self.same_but(pool, before, [to for s, to in enumerate(targets) if s not in (1, 2)])

    def test_a_state_after_every_token(self):
        """The next call starts from the state after the accepted tokens, in whichever row that is."""
        for device, form, state, layout in itertools.product(DEVICES, ("heads", "full", "channels"), TOLERANCE,
                                                             (None, "apart")):
            for packed, target in ((True, None), (True, "other"), (False, None)):
                with self.subTest(device=device, form=form, state=state, layout=layout, packed=packed, target=target):
                    self.check_every_token(device, form, state, layout, packed, target)

    def check_every_token(self, device, form, state, layout, packed, target):
        sources = [[4, 1, 0], [3, 5, 6], [0, 0, 0], [2, 4, 4]]
        targets = [[4, 1, 0], [5, 3, 6], [2, 2, 2], [2, 2, 2]] if target else sources
        accepted, lengths = [2, 3, 1, 0], [3, 2, 2, 0] if packed else [1] * 4
        bounds = [0, *itertools.accumulate(lengths)]
        values = update_arguments(bounds[-1] + 2 * packed, device, form=form)
        pool = pool_of(values["A"].shape, layout, state, device)
        before, expected = pool.clone(), pool.clone().double()
        options = {"dst_state_batch_indices": integers(targets, device)} if target else {}
        if packed:
            options["cu_seqlens"] = integers(bounds, device)
        y = vllm.selective_state_update(
            pool, *list(values.values())[:7], values["z"], True, integers(sources, device),
            num_accepted_tokens=integers(accepted, device), **options)
        written = []
        for s, (row, to) in enumerate(zip(sources, targets)):
            row, tokens = row[max(accepted[s] - 1, 0)], slice(bounds[s], bounds[s + 1])
            if row == 0:
                self.assertFalse(y[tokens].any())
                continue
            right, states = plain_update(before[row], values, tokens)
            self.near(y[tokens].cpu(), right, torch.float32, state)
            for place, after in zip(to, states):
                if place:
                    expected[place] = after.to(device)
                    written.append(place)
        self.near(pool, expected, state)
        self.assertFalse(y[bounds[-1]:].any())
        self.same_but(pool, before, written)

    def test_kernels_of_decoding(self):
        """Decoding copies no pages and writes y to the memory given.  The only other kernel computes the indices."""
        values, rows = update_arguments(3), integers([1, 0, 4])
        for state in (torch.float32, torch.bfloat16):
            pool, out = pool_of((H, P, N), "apart", state), torch.zeros(3, H, P)
            seen = launches(lambda: vllm.selective_state_update(pool, **values, dt_softplus=True, out=out,
                                                                state_batch_indices=rows))
            self.assertEqual(seen.names, ["sub", "ssd_step", "copy_"])
            window, weight, x = pool_of((D, W + 1), "transposed", state), torch.randn(D, W), torch.randn(3, D).to(state)
            seen = launches(lambda: vllm.causal_conv1d_update(x, window, weight, None, "silu", rows))
            self.assertEqual(seen.names, ["sub", "conv1d_step"])

    def test_heads_take_the_step_of_heads(self):
        """Tensors that are expanded over a head take ssd_step, also if the call runs one step per token."""
        values, pool = update_arguments(4), torch.zeros(ROWS, H, P, N)
        with unittest.mock.patch.object(vllm.gt, "ssd_step", wraps=vllm.gt.ssd_step) as step:
            for options in ({}, {"cu_seqlens": integers([0, 2, 4]), "num_accepted_tokens": integers([1, 1])}):
                vllm.selective_state_update(pool, *list(values.values())[:7], values["z"], True,
                                            integers([[1, 2], [3, 4], [5, 6], [2, 3]]), **options)
        self.assertEqual(step.call_count, 1 + 2)

    def test_stochastic_rounding(self):
        """Stochastic rounding gives neighbours of the float32 state with the right mean.  Each call and each sequence
        draws different numbers."""
        for device, state, target in itertools.product(DEVICES, (torch.float16, torch.bfloat16), (None, "other")):
            with self.subTest(device=device, state=state, target=target):
                values = {name: value[:1].expand(value.shape).contiguous() if name in "x dt B C z" else value
                          for name, value in update_arguments(5, device).items()}
                values["dt"] = values["dt"][..., :1].expand(5, H, P)
                pool, rows = pool_of((H, P, N), None, state, device)[:1].repeat(11, 1, 1, 1), [1, 2, 3, 4, 5]
                exact, before = pool[:5].float(), pool.clone()
                arguments = list(values.values())[:7]
                vllm.selective_state_update(exact, *arguments, values["z"], True)
                options = {"dst_state_batch_indices": integers([6, 7, 8, 9, 10], device)} if target else {}
                found = []
                for _ in range(40):
                    pool.copy_(before)
                    vllm.selective_state_update(pool, *arguments, values["z"], True, integers(rows, device), **options,
                                                enable_stochastic_rounding=True, cache_philox_rounds=5)
                    found.append(pool[6:] if target else pool[1:6].clone())
                    found[-1] = found[-1].clone()
                found = torch.cat(found).float()
                unit = torch.finfo(state).eps * exact[0].abs() + torch.finfo(state).tiny
                self.assertTrue(((found - exact[0]).abs() <= unit * 1.01).all())
                self.assertFalse(torch.equal(found[0], found[1]) or torch.equal(found[0], found[5]))
                self.assertLess(((found.mean(0) - exact[0]) / unit).abs().max().item(), 0.2)  # 200 draws: 5.6 sigma

    def test_refusals(self):
        values, pool = update_arguments(3), torch.zeros(ROWS, H, P, N)
        rows = integers([1, 2, 3])
        good = {"state": pool, **values, "state_batch_indices": rows}
        for changes, text in (
                ({"state_batch_indices": rows[:2]}, "state_batch_indices has .* each of 3 sequences"),
                ({"dst_state_batch_indices": rows[:2]}, "dst_state_batch_indices has .* each of 3 sequences"),
                ({"state_batch_indices": None, "dst_state_batch_indices": rows}, "without state_batch_indices"),
                ({"state_batch_indices": None, "num_accepted_tokens": rows}, "without state_batch_indices"),
                ({"num_accepted_tokens": rows[:2]}, "num_accepted_tokens has"),
                ({"cu_seqlens": integers([3])}, "cu_seqlens has .* at least 2 elements"),
                ({"enable_stochastic_rounding": True}, "enable_stochastic_rounding = True: state has dtype torch.f"),
                ({"enable_stochastic_rounding": 3}, "enable_stochastic_rounding = 3: must be True or False"),
                ({"enable_stochastic_rounding": True, "state": pool.half(), "cu_seqlens": integers([0, 1, 2, 3])},
                 "enable_stochastic_rounding with cu_seqlens is not supported"),
                ({"out": torch.zeros(3, H)}, "out has shape"),
                ({"out": torch.zeros(1, H, P).expand(3, H, P)}, "out has strides"),
                ({"state": pool[:0]}, "state has shape .* Z = 0|state has shape .* must have a row"),
                ({"B": torch.zeros(3, 3, N), "C": torch.zeros(3, 3, N)}, "its 3 groups must divide 4"),
                ({"state": pool[:1].expand_as(pool)}, "must not be expanded")):
            with self.subTest(text=text):
                with self.assertRaisesRegex((ArgumentError, UnsupportedError),
                                            f"^gt_kernels.compat.vllm.selective_state_update: .*({text})"):
                    vllm.selective_state_update(**{**good, **changes})
                self.assertFalse(pool.any())


class Prefill(Case):
    BOUNDS, ROWS = [0, 5, 6, 140, 150], [3, 1, 6, 2]

    def heads(self, device, dtype=torch.float32, T=150, D="H"):
        def tensor(*shape, dtype=dtype):
            return torch.randn(shape).to(device, dtype)
        return {"x": tensor(T, H, P), "dt": tensor(T, H), "A": -tensor(H, dtype=torch.float32).exp() * 0.1,
                "B": tensor(T, G, N), "C": tensor(T, G, N),
                "D": {None: None, "H": tensor(H, dtype=torch.float32), "HP": tensor(H, P, dtype=torch.float32)}[D],
                "z": tensor(T, H, P), "dt_bias": tensor(H, dtype=torch.float32)}

    def plain(self, values, start, tokens, **options):
        x, dt, A, B, C, skip, z, bias = (None if v is None else v.cpu() for v in values.values())
        skip = skip if skip is None or skip.dim() == 2 else skip[:, None].expand(H, P)
        return plain_scan(start.cpu(), x[tokens], dt[tokens][..., None].expand(-1, H, P),
                          A[:, None, None].expand(H, P, N), B[tokens], C[tokens], skip,
                          None if z is None else z[tokens], None if bias is None else bias[:, None].expand(H, P),
                          **options)

    def test_mamba2(self):
        cases = [dict(dtype=dtype, state=state, layout=layout, pool=True, start=start)
                 for dtype in (torch.float32, torch.bfloat16) for state in TOLERANCE for layout in (None, "apart",
                 "transposed") for start in (False, True)]
        cases += [dict(start=True), dict(), dict(state=torch.bfloat16), dict(limit=(0.1, 0.5)), dict(softplus=False),
                  dict(z=False), dict(D="HP"), dict(D=None), dict(chunks=True), dict(chunks=True, start=True),
                  dict(chunks=True, start=True, limit=(0.1, 0.5)), dict(chunks=True, state=torch.float16, z=False)]
        for device, case in itertools.product(DEVICES, cases):
            with self.subTest(device=device, **case):
                self.check_mamba2(device, **case)

    def check_mamba2(self, device, dtype=torch.float32, state=None, layout=None, pool=False, start=False, z=True, D="H",
                     softplus=True, limit=None, chunks=False):
        values = self.heads(device, dtype, D=D)
        if not z:
            values["z"] = None
        if not softplus:
            values["dt"] = values["dt"].abs()
            values["dt_bias"] = None
        starts = torch.randn(4, H, P, N).to(device, state or torch.float32) if start else None
        cut = [0, 5, 6, 64, 70, 140, 150]
        options = dict(cu_seqlens=integers(self.BOUNDS, device), cu_chunk_seqlens=integers(cut, device),
                       last_chunk_indices=integers([0, 1, 4, 5], device), seq_idx=integers([0, 1, 2, 2, 2, 3], device),
                       initial_states=starts, state_dtype=state, return_intermediate_states=chunks,
                       dt_softplus=softplus, **({} if limit is None else {"dt_limit": limit}))
        out = torch.full((150, 2, H, P), 9.0, device=device, dtype=dtype)[:, 0]
        places = pool_of((H, P, N), layout, state, device) if pool else None
        before = places.clone() if pool else None
        found = vllm.mamba_chunk_scan_combined_varlen(
            **values, out=out, chunk_size=64, final_states_out=places,
            final_state_indices=integers(self.ROWS, device) if pool else None, **options)
        if pool:
            self.assertIsNone(found)
            self.same_but(places, before, self.ROWS)
            found = places[self.ROWS]
        self.assertEqual(found.dtype, state or dtype)
        states = []
        for s in range(4):
            tokens = slice(self.BOUNDS[s], self.BOUNDS[s + 1])
            first = starts[s] if start else torch.zeros(H, P, N)
            right, after = self.plain(values, first, tokens, softplus=softplus, limit=limit)
            self.near(out[tokens].cpu(), right, dtype)
            ends = [end for end in cut if tokens.start < end <= tokens.stop] if chunks else [tokens.stop]
            states += [after[end - tokens.start - 1] for end in ends]
        self.near(found.cpu(), torch.stack(states), state or dtype, dtype)

    def test_refusals_of_mamba2(self):
        pool, one = torch.zeros(ROWS, H, P, N), integers([0, 150])
        good = dict(self.heads("cpu"), chunk_size=64, cu_seqlens=one, cu_chunk_seqlens=one, last_chunk_indices=one[:1],
                    seq_idx=one[:1], out=torch.zeros(150, H, P))
        for changes, text in (
                ({"out": None}, "out is None"),
                ({"cu_seqlens": None}, "cu_seqlens is None"),
                ({"initial_states": pool[:0]}, "initial_states has shape"),
                ({"final_states_out": pool}, "final_state_indices is None"),
                ({"final_states_out": pool, "final_state_indices": one[:0]}, "final_state_indices has"),
                ({"final_states_out": pool[:, :2], "final_state_indices": one[:1]}, "final_states_out has shape"),
                ({"final_states_out": pool, "final_state_indices": one[:1], "return_intermediate_states": True},
                 "final_states_out with return_intermediate_states is not supported"),
                ({"return_intermediate_states": True, "seq_idx": None}, "seq_idx is None"),
                ({"return_intermediate_states": True, "seq_idx": one}, "seq_idx has .* each of 1 chunks"),
                ({"dt_limit": (1, 0)}, "dt_limit = "), ({"chunk_size": 0}, "chunk_size = 0: must be positive")):
            with self.subTest(text=text):
                with self.assertRaisesRegex((ArgumentError, UnsupportedError),
                                            f"^gt_kernels.compat.vllm.mamba_chunk_scan_combined_varlen: .*{text}"):
                    vllm.mamba_chunk_scan_combined_varlen(**{**good, **changes})
                self.assertFalse(pool.any() or good["out"].any())

    def test_mamba1(self):
        cases = [dict(dtype=dtype, state=state, layout=layout) for dtype in (torch.float32, torch.bfloat16)
                 for state in TOLERANCE for layout in (None, "apart", "transposed")]
        cases += [dict(packed=packed, **more) for packed in (True, False) for more in (
            dict(), dict(start=None), dict(start=torch.int32), dict(groups=None), dict(groups=1), dict(z=False),
            dict(indices=False), dict(null=None), dict(null=3))]
        for device, case in itertools.product(DEVICES, cases):
            with self.subTest(device=device, **case):
                self.check_mamba1(device, **case)

    def check_mamba1(self, device, dtype=torch.float32, state=torch.float32, layout=None, packed=True, start=torch.bool,
                     groups=G, z=True, indices=True, null=0):
        bounds = [0, 5, 5, 6, 20, 24] if packed else [0, 6, 12, 18, 24, 30]
        rows, fresh, T = [4, 2, 1, 0, 3] if indices else list(range(5)), [1, 1, 0, 1, 1], bounds[-1]
        null = null if indices else None

        def tensor(*shape, dtype=dtype):
            value = torch.randn(*shape, T).to(device, dtype)
            return value if packed else value.reshape(*shape, 5, 6).movedim(-2, 0).contiguous()

        u, delta, gate = tensor(D), tensor(D), tensor(D) if z else None
        B, C = (tensor(*(() if groups is None else (groups,)), N) for _ in range(2))
        A = -torch.rand(D, N, device=device)
        skip, bias = torch.randn(D, device=device), torch.randn(D, device=device)
        pool = pool_of((D, N), layout, state, device)
        before, expected = pool.clone(), pool.clone().double()
        y = vllm.selective_scan_fn(u, pool, delta, A, B, C, skip, gate, bias, True,
                                   query_start_loc=integers(bounds, device) if packed else None,
                                   cache_indices=integers(rows, device) if indices else None, null_block_id=null,
                                   has_initial_state=None if start is None else integers(fresh, device).to(start))
        self.assertEqual((y.shape, y.dtype), (u.shape, dtype))

        def flat(value):  # tokens first, with a head index, all sequences one after another
            value = value if packed else value.movedim(0, -2).flatten(-2)
            return value.movedim(-1, 0).cpu()

        y, u, delta, gate, B, C = (None if value is None else flat(value) for value in (y, u, delta, gate, B, C))
        B, C = (v if v.dim() == 3 else v[:, None] for v in (B, C))
        size = D // B.shape[1]  # channels of a group: the heads of plain_scan
        heads = [v.cpu().reshape(B.shape[1], size, *v.shape[1:]) for v in (A, skip, bias)]
        for s, row in enumerate(rows):
            if row == null or bounds[s] == bounds[s + 1]:
                continue
            tokens = slice(bounds[s], bounds[s + 1])
            first = before[row].cpu() if start is not None and fresh[s] else torch.zeros(D, N)
            x, dt, g = (None if v is None else v[tokens].reshape(-1, B.shape[1], size) for v in (u, delta, gate))
            right, states = plain_scan(first.reshape(B.shape[1], size, N), x, dt, heads[0], B[tokens], C[tokens],
                                       heads[1], g, heads[2])
            self.near(y[tokens], right.reshape(-1, D), dtype, state)
            expected[row] = states[-1].reshape(D, N).to(device)
        self.near(pool, expected, state, dtype)
        self.same_but(pool, before, [row for s, row in enumerate(rows) if row != null and bounds[s] < bounds[s + 1]])

    def test_refusals_of_mamba1(self):
        u, pool, B = torch.zeros(D, 5), torch.zeros(ROWS, D, N), torch.zeros(G, N, 5)
        good = dict(u=u, ssm_states=pool, delta=u, A=torch.zeros(D, N), B=B, C=B, query_start_loc=integers([0, 5]))
        for changes, text in (
                *(({name: integers([0])}, f"{name} .a prefix cache with .*. is not supported") for name in (
                    "block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx")),
                ({"cache_indices": integers([[0, 1]])}, r"cache_indices has shape \[1, 2\]"),
                ({"cache_indices": integers([])}, "cache_indices has"),
                ({"has_initial_state": integers([])}, "has_initial_state has"),
                ({"query_start_loc": integers([0, 7])}, "query_start_loc"),
                ({"ssm_states": pool[:, :3]}, "ssm_states has shape"), ({"C": B[:1]}, "must have 2 groups"),
                ({"ssm_states": pool[:1].expand_as(pool)}, "must not be expanded")):
            with self.subTest(text=text):
                with self.assertRaisesRegex((ArgumentError, UnsupportedError),
                                            f"^gt_kernels.compat.vllm.selective_scan_fn: .*{text}"):
                    vllm.selective_scan_fn(**{**good, **changes})
                self.assertFalse(pool.any())

    def test_norm(self):
        for device, dtype, before, size, gated in itertools.product(DEVICES, (torch.float32, torch.bfloat16),
                                                                    (True, False), (None, 4), (True, False)):
            with self.subTest(device=device, dtype=dtype, before=before, size=size, gated=gated):
                x, z = (torch.randn(3, 5, D).to(device, dtype) for _ in range(2))
                weight, bias = torch.randn(D, device=device), torch.randn(D, device=device)
                y = vllm.rms_norm_gated(x, weight, bias, z if gated else None, 1e-3, size, before)
                gate = F.silu(z.double()) if gated else 1
                right = x.double() * (1 if before else gate)
                right = right.unflatten(-1, (-1, size or D))
                right = (right / (right.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(-2) * weight + bias
                self.near(y, right * (gate if before else 1), dtype)


class Server(Case):
    def test_pages(self):
        """A layer as vLLM's mixer calls it: pages hold both of its states, and convolution states are transposed.  The
        test runs a prompt in chunks, then drafts, some of which are accepted.  Outputs are the same as without the
        rejected tokens."""
        most, inner, channels = 3, H * P, H * P + 2 * G * N
        weight, bias = torch.randn(channels, W), torch.randn(channels)
        A, skip, dt_bias = -torch.rand(H), torch.randn(H), torch.randn(H)
        xBC, dt = torch.randn(2, 60, channels), torch.randn(2, 60, H)
        cells = (W - 1 + most - 1) * channels
        pages = torch.zeros(9, cells + inner * N)
        conv = pages[:, :cells].view(9, -1, channels).transpose(1, 2)
        ssm = pages[:, cells:].view(9, H, P, N)
        y, done = torch.zeros(2, 60, H, P), [0, 0]
        blocks = integers([[4, 2, 7], [1, 8, 3]])

        def split(rows):
            x, B, C = rows.split([inner, G * N, G * N], -1)
            return x.view(-1, H, P), B.view(-1, G, N), C.view(-1, G, N)

        for lengths in ([20, 3], [1, 12]):
            at = [slice(done[s], done[s] + lengths[s]) for s in range(2)]
            bounds, has_state = integers([0, lengths[0], sum(lengths)]), integers(done) > 0
            rows = vllm.causal_conv1d_fn(torch.cat([xBC[s, at[s]] for s in range(2)]).t(), weight, bias,
                                         activation="silu", conv_states=conv, has_initial_state=has_state,
                                         cache_indices=blocks[:, 0], query_start_loc=bounds, metadata=None).t()
            x, B, C = split(rows)
            out = torch.empty_like(x)
            vllm.mamba_chunk_scan_combined_varlen(
                x, torch.cat([dt[s, at[s]] for s in range(2)]), A, B, C, chunk_size=8, D=skip, z=None, dt_bias=dt_bias,
                seq_idx=None, cu_seqlens=bounds, cu_chunk_seqlens=None, last_chunk_indices=None,
                initial_states=torch.where(has_state[:, None, None, None], ssm[blocks[:, 0]], 0), dt_softplus=True,
                out=out, state_dtype=ssm.dtype, final_states_out=ssm, final_state_indices=blocks[:, 0])
            for s, part in enumerate(out.split(lengths)):
                y[s, at[s]] = part
                done[s] += lengths[s]
        accepted = integers([1, 1])
        for kept in ([1, 3], [2, 2], [3, 1], [1, 1]):
            at = [slice(done[s], done[s] + most) for s in range(2)]
            tokens, bounds = torch.cat([xBC[s, at[s]] for s in range(2)]), integers([0, 3, 6])
            for s in range(2):  # drafts after the accepted ones are wrong tokens
                tokens[s * most + kept[s]:(s + 1) * most] += 1
            rows = vllm.causal_conv1d_update(tokens, conv, weight, bias, "silu", conv_state_indices=blocks,
                                             num_accepted_tokens=accepted, query_start_loc=bounds, max_query_len=most)
            x, B, C = split(rows)
            out = torch.empty_like(x)
            vllm.selective_state_update(
                ssm, x, torch.cat([dt[s, at[s]] for s in range(2)])[..., None].expand(-1, -1, P),
                A[:, None, None].expand(-1, P, N), B, C, skip[:, None].expand(-1, P), dt_bias[:, None].expand(-1, P),
                dt_softplus=True, state_batch_indices=blocks, dst_state_batch_indices=blocks, out=out,
                num_accepted_tokens=accepted, cu_seqlens=bounds)
            for s in range(2):
                y[s, done[s]:done[s] + kept[s]] = out[s * most:s * most + kept[s]]
                done[s] += kept[s]
            accepted = integers(kept)
        for s in range(2):
            rows, _ = plain_conv(xBC[s, :done[s]], weight, bias, torch.zeros(channels, W - 1), True)
            x, B, C = split(rows)
            right, _ = plain_scan(torch.zeros(H, P, N), x, dt[s, :done[s], :, None].expand(-1, H, P),
                                  A[:, None, None].expand(H, P, N), B, C, skip[:, None].expand(H, P), None,
                                  dt_bias[:, None].expand(H, P))
            self.near(y[s, :done[s]], right, torch.float32)
        self.assertFalse(pages[[0, 5, 6]].any())

    def test_no_call_waits(self):
        """Decoding calls can be captured in a CUDA graph, so none of them waits for the device."""
        if "cuda" not in DEVICES:
            self.skipTest("no GPU")
        values, pool = update_arguments(6, "cuda"), pool_of((H, P, N), "apart", device="cuda")
        conv, x = pool_of((D, W + 2), "transposed", torch.bfloat16, "cuda"), torch.randn(6, D, device="cuda")
        weight, blocks, bounds = torch.randn(D, W, device="cuda"), integers([[4, 2, 1], [0, 0, 0]], "cuda"), integers(
            [0, 3, 3], "cuda")
        accepted = integers([2, 1], "cuda")

        def calls(pool, conv):
            return (vllm.selective_state_update(pool, *list(values.values())[:7], values["z"], True, blocks,
                                                num_accepted_tokens=accepted, cu_seqlens=bounds),
                    vllm.selective_state_update(pool, *list(values.values())[:7], values["z"], True,
                                                torch.arange(6, device="cuda")),
                    vllm.causal_conv1d_update(x, conv, weight, None, "silu", blocks, accepted, bounds, 3),
                    vllm.causal_conv1d_update(x, conv, weight, None, "silu", torch.arange(6, device="cuda")))

        both = [[tensor.clone() for tensor in (pool, conv)] for _ in range(2)]
        calls(pool, conv)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = calls(*both[0])
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip((*found, *both[0]), (*calls(*both[1]), *both[1])):
            self.assertTrue(torch.equal(a, b))


PARAMETERS = {  # parameters of vLLM's functions in the release that the module's docstring names
    "causal_conv1d": {
        "causal_conv1d_fn": "x weight bias conv_states query_start_loc cache_indices=None has_initial_state=None "
        "activation='silu' pad_slot_id=-1 null_block_id=0 metadata=None validate_data=False",
        "causal_conv1d_update": "x conv_state weight bias=None activation=None conv_state_indices=None "
        "num_accepted_tokens=None query_start_loc=None max_query_len=-1 null_block_id=0 validate_data=False out=None"},
    "layernorm_gated": {"rms_norm_gated": "x weight bias z=None eps=1e-06 group_size=None norm_before_gate=True"},
    "mamba_ssm": {
        "selective_scan_fn": "u ssm_states delta A B C D=None z=None delta_bias=None delta_softplus=False "
        "query_start_loc=None cache_indices=None has_initial_state=None null_block_id=0 block_size=1024 "
        "block_idx_first_scheduled_token=None block_idx_last_scheduled_token=None initial_state_idx=None "
        "cu_chunk_seqlen=None last_chunk_indices=None",
        "selective_state_update": "state x dt A B C D dt_bias z=None dt_softplus=False state_batch_indices=None "
        "dst_state_batch_indices=None null_block_id=0 out=None num_accepted_tokens=None cu_seqlens=None "
        "is_blackwell=False enable_stochastic_rounding=False cache_philox_rounds=0"},
    "ssd_combined": {
        "mamba_chunk_scan_combined_varlen": "x dt A B C chunk_size cu_seqlens cu_chunk_seqlens last_chunk_indices "
        "seq_idx out D=None z=None dt_bias=None initial_states=None dt_softplus=False dt_limit=(0.0,inf) "
        "return_intermediate_states=False state_dtype=None final_states_out=None final_state_indices=None"},
}


OPS = "vllm.model_executor.layers.mamba.ops"


class Install(unittest.TestCase):
    def test_parameters(self):
        for functions in PARAMETERS.values():
            for name, text in functions.items():
                ours = inspect.signature(getattr(vllm, name)).parameters.values()
                self.assertEqual(" ".join(str(parameter).replace(", ", ",") for parameter in ours), text)

    def setUp(self):
        """Writes a package with vLLM's names and parameters, and a client that imports its functions."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.ops = os.path.join(folder.name, *OPS.split("."))
        os.makedirs(self.ops)
        for module, functions in PARAMETERS.items():
            self.write(f"{module}.py", "inf = float('inf')\n" + "".join(
                f"def {name}({text.replace(' ', ', ')}): return 'theirs'\n" for name, text in functions.items()))
        self.write("../mixer.py", "".join(f"from .ops.{module} import {name} as mixer_{name}\n"
                                          for module, functions in PARAMETERS.items() for name in functions))
        mock = unittest.mock.patch.multiple(sys, path=[folder.name, *sys.path], dont_write_bytecode=True)
        mock.start()
        self.addCleanup(mock.stop)
        modules = unittest.mock.patch.dict(sys.modules)
        modules.start()
        self.addCleanup(modules.stop)
        importlib.invalidate_caches()

    def write(self, name, text):
        with open(os.path.join(self.ops, name), "w") as file:
            file.write(text)

    def replaced(self):
        """The names of functions that are replaced in vLLM's modules and in their client."""
        mixer, found = importlib.import_module("vllm.model_executor.layers.mamba.mixer"), set()
        for module, functions in PARAMETERS.items():
            module = importlib.import_module(f"{OPS}.{module}")
            for name in functions:
                self.assertIs(vars(module)[name], vars(mixer)[f"mixer_{name}"])
                if vars(module)[name] is getattr(vllm, name):
                    found.add(name)
        return found

    def test_install(self):
        every = {name for functions in PARAMETERS.values() for name in functions}
        self.assertEqual(set(vllm.__all__), every | {"install"})
        self.assertEqual(self.replaced(), set())
        for _ in range(2):
            self.assertEqual(vllm.install(), [f"{OPS}.{module}" for module in PARAMETERS])
            self.assertEqual(self.replaced(), every)

    def test_plugin(self):
        """vLLM's processes call plugin() through the package's entry point.  It installs only on demand."""
        project = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "pyproject.toml")
        with open(project) as file:
            self.assertIn("\n[project.entry-points.'vllm.general_plugins']\n"
                          "gt_kernels = 'gt_kernels.compat.vllm:plugin'\n", file.read())
        for value, count in (("0", 0), ("1", 6)):
            with unittest.mock.patch.dict(os.environ, GT_KERNELS_VLLM=value):
                vllm.plugin()
            self.assertEqual(len(self.replaced()), count)

    def test_another_release(self):
        """install() replaces nothing if a function has other parameters or is missing."""
        for module, functions in PARAMETERS.items():
            for name in functions:
                for text in (f"def {name}(x): pass", f"{name} = None"):
                    with self.subTest(text=text):
                        self.setUp()
                        with open(os.path.join(self.ops, f"{module}.py"), "a") as file:
                            file.write(text + "\n")
                        self.assertEqual(self.replaced(), set())
                        said = (rf"^gt_kernels.compat.vllm.install: {OPS}.{module}.{name} has the parameters .*: must "
                                r"be .*, as in vLLM 0.33.0 \(commit 4ba787ec9\)$")
                        with self.assertRaisesRegex(UnsupportedError, said):
                            vllm.install()
                        self.assertEqual(self.replaced(), set())
                        self.doCleanups()

    def test_without_vllm(self):
        """Without vLLM the functions work, and install() does nothing."""
        with unittest.mock.patch.object(sys, "path", sys.path[1:]):
            if importlib.util.find_spec("vllm") is None:
                self.assertEqual(vllm.install(), [])


if __name__ == "__main__":
    unittest.main()
