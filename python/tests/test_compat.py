"""Tests of gt_kernels.compat: results against float64 loops over tokens, and the calls that it must refuse."""

import inspect
import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import torch.nn.functional as F

import loops
from gt_kernels import ArgumentError, Error, UnsupportedError, c, compat

DEVICES = ["cpu"]
if torch.cuda.is_available() and c.gt_device_supported(-1) == c.GT_OK:
    DEVICES.append("cuda")


def leaf(*shape, scale=1.0, device="cpu", dtype=torch.float32):
    return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()


def exact(tensors):
    return [None if t is None else t.detach().double().cpu().requires_grad_() for t in tensors]


def bits(value):
    """The bytes of a tensor, for comparisons, since PyTorch 2.4 cannot compare float8 tensors."""
    return value.contiguous().flatten().view(torch.uint8)


class Compat(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)

    def same(self, tensors, outputs, twins, right, tolerance=1e-4):
        """Compares outputs and gradients of all tensors with those of the float64 twins."""
        loss = exact_loss = 0
        for got, expected in zip(outputs, right):
            self.assertEqual(got.shape, expected.shape)
            error = (got.detach().double().cpu() - expected).norm() / expected.norm()
            self.assertLess(error.item(), tolerance)
            weights = torch.randn(expected.shape, dtype=torch.float64)
            loss = loss + (got.double() * weights.to(got.device)).sum()
            exact_loss = exact_loss + (expected * weights).sum()
        used = [i for i, t in enumerate(tensors) if t is not None]
        found = torch.autograd.grad(loss, [tensors[i] for i in used])
        expected = torch.autograd.grad(exact_loss, [twins[i] for i in used])
        for i, a, b in zip(used, found, expected):
            self.assertLess(((a.double().cpu() - b).norm() / b.norm().clamp_min(1e-6)).item(), tolerance, f"gradient {i}")

    def rwkv6(self, device, B=2, T=11, H=3, K=8, V=5, rows=None):
        tensors = [leaf(B, T, H, K, device=device), leaf(B, T, H, K, device=device), leaf(B, T, H, V, device=device),
                   (-torch.rand(B, T, H, K)).to(device).requires_grad_(), leaf(H, K, device=device),
                   leaf(rows or B, H, K, V, device=device)]
        return tensors, exact(tensors)

    def test_rwkv6(self):
        for device in DEVICES:
            for function in (compat.chunk_rwkv6, compat.fused_recurrent_rwkv6):
                for scale, factor in ((None, 8 ** -0.5), (1.0, 1.0), (0.3, 0.3)):
                    (r, k, v, w, u, s), twins = self.rwkv6(device)
                    out = function(r, k, v, w, u, scale=scale, initial_state=s, output_final_state=True)
                    right = loops.wkv6(twins[0] * factor, *twins[1:5], state=twins[5], decay="log")
                    self.same([r, k, v, w, u, s], out, twins, right)
                self.assertIsNone(function(r, k, v, w, u)[1])
                tensors, twins = self.rwkv6(device, B=1, rows=2)
                bounds = torch.tensor([0, 4, 11], device=device)
                out = function(*tensors[:5], 1.0, tensors[5], True, cu_seqlens=bounds)
                self.same(tensors, out, twins, loops.wkv6(*twins[:5], state=twins[5], decay="log", cu_seqlens=bounds.cpu()))

    def test_rwkv6_directions(self):
        tensors, twins = self.rwkv6("cpu")
        out = compat.fused_recurrent_rwkv6(*tensors[:5], 1.0, tensors[5], True, reverse=True)
        y, state = loops.wkv6(*(t.flip(1) for t in twins[:4]), twins[4], state=twins[5], decay="log")
        self.same(tensors, out, twins, (y.flip(1), state))
        out = compat.chunk_rwkv6(*(t.transpose(1, 2) for t in tensors[:4]), tensors[4], 1.0, tensors[5], True,
                                 head_first=True)
        y, state = loops.wkv6(*twins[:5], state=twins[5], decay="log")
        self.same(tensors, out, twins, (y.transpose(1, 2), state))

    def ssd(self, device, B=2, T=12):
        tensors = [leaf(B, T, 4, 6, device=device), leaf(B, T, 4, device=device), leaf(4, device=device),
                   leaf(B, T, 2, 5, device=device), leaf(B, T, 2, 5, device=device), leaf(4, device=device),
                   leaf(B, T, 4, 6, device=device), leaf(4, device=device), leaf(B, 4, 6, 5, device=device)]
        with torch.no_grad():
            tensors[2].copy_(-tensors[2].exp())
        return tensors, exact(tensors)

    def test_chunk_scan(self):
        for device in DEVICES:
            for softplus, limit in ((True, (0.0, float("inf"))), (False, (0.0, float("inf"))), (True, (0.3, 0.8))):
                tensors, twins = self.ssd(device)
                x, dt, A, B, C, D, z, bias, s = tensors
                out = compat.mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, z, bias, s, dt_softplus=softplus,
                                                       dt_limit=limit, return_final_states=True)
                right = loops.ssd(*twins[:8], state=twins[8], softplus=softplus, dt_limit=limit)
                self.same(tensors, out, twins, right)

    def test_chunk_scan_of_sequences(self):
        for device in DEVICES:
            tensors, twins = self.ssd(device)
            x, dt, A, B, C, D, z, bias, s = tensors
            seq_idx = torch.tensor([[0] * 5 + [1] * 7, [0] * 12], dtype=torch.int32, device=device)
            out = compat.mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, z, bias, s, seq_idx=seq_idx, dt_softplus=True,
                                                   return_final_states=True)

            def part(row, start, end, state):
                cut = [twins[i][row:row + 1, start:end] if i in (0, 1, 3, 4, 6) else twins[i] for i in range(8)]
                return loops.ssd(*cut, state=state, softplus=True)

            a, b, e = part(0, 0, 5, twins[8][:1]), part(0, 5, 12, None), part(1, 0, 12, twins[8][1:])
            right = torch.cat([torch.cat([a[0], b[0]], 1), e[0]]), torch.cat([b[1], e[1]])
            self.same(tensors, out, twins, right)

    def split_conv1d_scan(self, device, per_channel=False, beside=0):
        """(tensors, their float64 twins): zxbcdt weight bias dt_bias A D states norm out_weight out_bias"""
        B, T, H, P, G, N, W = 2, 12, 4, 6, 2, 5, 3
        inner, channels = H * P, H * P + 2 * G * N
        tensors = [leaf(B, T, beside + inner + channels + H, device=device), leaf(channels, W, device=device),
                   leaf(channels, device=device), leaf(H, device=device), leaf(H, device=device),
                   leaf(H, P, device=device) if per_channel else leaf(H, device=device),
                   leaf(B, H, P, N, device=device), leaf(inner, device=device),
                   leaf(7, beside // 2 + inner, device=device), leaf(7, device=device)]
        with torch.no_grad():
            tensors[4].copy_(-tensors[4].exp())
        return tensors, exact(tensors)

    def split_conv1d_scan_loop(self, zxbcdt, weight, bias, dt_bias, A, D, states, norm, out_weight, out_bias, *,
                               activation="silu", dt_limit=None, before=True, rows=None, beside=0):
        """rows: for each row of the batch, the bounds of its sequences."""
        H, P, G, N = 4, 6, 2, 5
        outs, finals = [], []
        for b in range(zxbcdt.shape[0]):
            parts, state, bounds = [], states[b:b + 1] if states is not None else None, rows[b] if rows else (0, 12)
            for start, end in zip(bounds, bounds[1:]):
                mlp, z, xBC, dt = zxbcdt[b:b + 1, start:end].split([beside, H * P, H * P + 2 * G * N, H], -1)
                x, Bm, Cm = loops.conv1d(xBC, weight, bias, activation=activation)[0].split([H * P, G * N, G * N], -1)
                y, state = loops.ssd(x.unflatten(2, (H, P)), dt, A, Bm.unflatten(2, (G, N)), Cm.unflatten(2, (G, N)), D,
                                     None, dt_bias, state=state, softplus=True, dt_limit=dt_limit)
                y, final, state = y.flatten(2), state, None
                if norm is None:
                    y = y * F.silu(z)
                else:
                    y = loops.norm_gate(y, z, norm, None, gate_first=not before, heads=G, eps=1e-6)
                first, second = mlp.chunk(2, -1)
                parts.append(torch.cat([F.silu(first) * second, y], -1))
            outs.append(torch.cat(parts, 1))
            finals.append(final)
        y = torch.cat(outs)
        return y if out_weight is None else y @ out_weight.T + out_bias, torch.cat(finals)

    def test_split_conv1d_scan(self):
        names = ("states", "norm", "projection")
        for device in DEVICES:
            for without, options in (((), {}), (("norm",), {}), (("projection",), {"norm_before_gate": False}),
                                     (names, {}), (("states", "projection"), {"activation": None}),
                                     (("norm",), {"activation": None, "dt_limit": (0.3, 0.8)}),
                                     ((), {"dt_limit": (0.3, 0.8), "per_channel": True}),
                                     ((), {"beside": 6}), (("norm",), {"beside": 6, "activation": "swish"}),
                                     ((), {"rows": ((0, 5, 12), (0, 12))}),
                                     (("norm", "states"), {"rows": ((0, 5, 12), (0, 3, 12)), "activation": None})):
                with self.subTest(device=device, without=without, **options):
                    per_channel, beside = options.pop("per_channel", False), options.pop("beside", 0)
                    rows = options.pop("rows", None)
                    tensors, twins = self.split_conv1d_scan(device, per_channel, beside)
                    left = {"states": (6,), "norm": (7,), "projection": (8, 9)}
                    for i in (i for name in without for i in left[name]):
                        tensors[i] = twins[i] = None
                    seq_idx = None
                    if rows:
                        seq_idx = torch.stack([torch.arange(len(r) - 1).repeat_interleave(torch.tensor(r).diff())
                                               for r in rows]).int().to(device)
                    zxbcdt, weight, bias, dt_bias, A, D, states, norm, out_weight, out_bias = tensors
                    out = compat.mamba_split_conv1d_scan_combined(
                        zxbcdt, weight, bias, dt_bias, A, D, 64, states, seq_idx, return_final_states=True,
                        rmsnorm_weight=norm, outproj_weight=out_weight, outproj_bias=out_bias,
                        headdim=None if per_channel else 6, ngroups=2, **options)
                    activation = options.get("activation", "silu") and "silu"
                    right = self.split_conv1d_scan_loop(*twins, activation=activation, rows=rows, beside=beside,
                                                        dt_limit=options.get("dt_limit"),
                                                        before=options.get("norm_before_gate", True))
                    self.same(tensors, out, twins, right)
                    alone = compat.mamba_split_conv1d_scan_combined(
                        zxbcdt, weight, bias, dt_bias, A, D, 64, states, seq_idx, rmsnorm_weight=norm,
                        outproj_weight=out_weight, outproj_bias=out_bias, headdim=None if per_channel else 6, ngroups=2,
                        **options)
                    self.assertTrue(torch.equal(alone, out[0]))

    def test_selective_scan(self):
        for device in DEVICES:
            for kinds in (("constant", "constant"), ("variable", "variable"), ("groups", "groups"),
                          ("constant", "variable"), ("variable", "constant"), ("constant", "groups"),
                          ("groups", "constant"), ("variable", "group"), ("group", "variable")):
                B, D, T, N = 2, 6, 9, 4
                shapes = {"constant": (D, N), "variable": (B, N, T), "group": (B, 1, N, T), "groups": (B, 2, N, T)}
                tensors = [leaf(B, D, T, device=device), leaf(B, D, T, device=device), leaf(D, N, device=device),
                           *(leaf(*shapes[kind], device=device) for kind in kinds), leaf(D, device=device),
                           leaf(B, D, T, device=device), leaf(D, device=device)]
                with torch.no_grad():
                    tensors[2].copy_(-tensors[2].exp())
                twins = exact(tensors)
                out = compat.selective_scan_fn(*tensors, True, True)

                def turned(x):
                    if x.dim() == 2:
                        return x.expand(B, T, D, N)
                    x = x.unsqueeze(1) if x.dim() == 3 else x
                    return x.repeat_interleave(D // x.shape[1], 1).permute(0, 3, 1, 2)

                u, dt, A, Bm, Cm, skip, z, bias = twins
                y, state = loops.selective_scan(u.transpose(1, 2), dt.transpose(1, 2), A, turned(Bm), turned(Cm), skip,
                                                z.transpose(1, 2), bias, softplus=True)
                self.same(tensors, out, twins, (y.transpose(1, 2), state))
                self.assertEqual(out[0].stride(), tensors[0].stride())

    def test_selective_state_update(self):
        for device in DEVICES:
            for heads in (False, True):
                for dtype in (torch.float32, torch.bfloat16):
                    for tied in (False, True) if heads else (False,):
                        with self.subTest(device=device, heads=heads, dtype=dtype, tied=tied), torch.no_grad():
                            self.check_update(device, heads, dtype, tied)

    def check_update(self, device, heads, dtype, tied):
        b, H, P, N, G = 3, 4, 6, 5, 2
        lead = (H, P) if heads else (H * P,)
        x, z = torch.randn(b, *lead), torch.randn(b, *lead)
        dt, bias = torch.randn(b, *lead), torch.randn(lead)
        A = -torch.rand(*lead, N)
        if tied:
            dt, bias = dt[..., :1].expand(b, H, P), bias[:, :1].expand(H, P)
            A = A[:, :1, :1].expand(H, P, N)
        D = torch.randn(lead)
        B, C = torch.randn(b, *((G, N) if heads else (N,))), torch.randn(b, *((G, N) if heads else (N,)))
        pool = torch.randn(7, *lead, N).to(device, dtype)
        slots = torch.tensor([4, 0, 6], dtype=torch.int32, device=device)
        x, z, dt, B, C = (t.to(device, dtype) for t in (x, z, dt, B, C))
        bias, A, D = (t.to(device) for t in (bias, A, D))
        before = pool.double()
        y = compat.selective_state_update(pool, x, dt, A, B, C, D, z, bias, True, state_batch_indices=slots)
        wide = [t.double() for t in (x, z, dt, B, C, bias, A, D)]
        x, z, dt, B, C, bias, A, D = wide
        if not heads:
            B, C = B[:, None], C[:, None]
        per = (H if heads else H * P) // B.shape[1]
        B, C = (t.repeat_interleave(per, 1) for t in (B, C))
        if heads:
            B, C = B[:, :, None], C[:, :, None]
        dt = F.softplus(dt + bias)
        state = before[slots.long()] * torch.exp(dt[..., None] * A) + (dt * x)[..., None] * B
        right = ((state * C).sum(-1) + D * x) * F.silu(z)
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        self.assertLess(((y.double() - right).norm() / right.norm()).item(), limit)
        self.assertLess(((pool[slots.long()].double() - state).norm() / state.norm()).item(), limit)
        self.assertTrue(torch.equal(pool[[1, 2, 3, 5]].double(), before[[1, 2, 3, 5]]))

    def test_norms(self):
        for device in DEVICES:
            for first in (False, True):
                for group in (None, 4):
                    tensors = [leaf(3, 5, 12, device=device), leaf(12, device=device), leaf(12, device=device),
                               leaf(3, 5, 12, device=device)]
                    twins, size = exact(tensors), group or 12
                    x, weight, bias, z = tensors
                    for norm, out in (("rms", compat.rms_norm_gated(x, weight, bias, z, 1e-3, group, not first)),
                                      ("layer", compat.layernorm_fn(x, weight, bias, z, 1e-3, group, not first))):
                        right = loops.norm_gate(twins[0], twins[3], twins[1], twins[2], norm, first, 12 // size, 1e-3)
                        self.same(tensors, [out], twins, [right])

    def test_conv1d(self):
        for device in DEVICES:
            for activation in (None, "silu", "swish"):
                for channels_last in (False, True):
                    tensors = [leaf(2, 6, 9, device=device), leaf(6, 4, device=device), leaf(6, device=device),
                               leaf(2, 6, 3, device=device)]
                    twins = exact(tensors)
                    x, weight, bias, states = tensors
                    given = x.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else x
                    out = compat.causal_conv1d_fn(given, weight, bias, initial_states=states, return_final_states=True,
                                                  activation=activation)
                    y, last = loops.conv1d(twins[0].transpose(1, 2), twins[1], twins[2], state=twins[3],
                                           activation=activation and "silu")
                    self.same(tensors, out, twins, (y.transpose(1, 2), last))
                    self.assertEqual(out[0].stride(), given.stride())
            buffer = torch.empty(2, 6, 3, device=device)
            with torch.no_grad():
                _, last = compat.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=buffer)
            self.assertTrue(last is buffer and torch.equal(last, x.detach()[..., -3:]))

    def test_conv1d_of_sequences(self):
        for device in DEVICES:
            x, weight, bias = leaf(2, 6, 9, device=device), leaf(6, 3, device=device), leaf(6, device=device)
            twins = exact([x, weight, bias])
            seq_idx = torch.tensor([[0] * 4 + [1] * 5, [2] * 6 + [-1] * 3], device=device)
            out = compat.causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu")

            def part(row, start, end):
                return loops.conv1d(twins[0][row:row + 1, :, start:end].transpose(1, 2), *twins[1:], activation="silu")[0]

            right = torch.cat([torch.cat([part(0, 0, 4), part(0, 4, 9)], 1),
                               torch.cat([part(1, 0, 6), part(1, 6, 9) * 0], 1)]).transpose(1, 2)
            self.same([x, weight, bias], [out], twins, [right])

    def test_conv1d_update(self):
        for device in DEVICES:
            for dtype in (torch.float32, torch.bfloat16):
                for length in (None, 1, 5):
                    for size in (3, 6):
                        for ring in (False, True):
                            for slots in (False, True):
                                with self.subTest(dtype=dtype, T=length, S=size, ring=ring, slots=slots):
                                    self.check_conv1d_update(device, dtype, length, size, ring, slots)

    def check_conv1d_update(self, device, dtype, length, size, ring, use_slots):
        b, D, W, T = 3, 6, 4, length or 1
        if ring and T > size - (W - 1) and T > 1:
            return  # some tokens overwrite rows that later tokens of the same call read
        x = torch.randn(b, D, T).to(device, dtype)
        state = torch.randn(7 if use_slots else b, D, size).to(device, dtype)
        weight, bias = torch.randn(D, W, device=device).requires_grad_(), torch.randn(D, device=device)
        slots = torch.tensor([5, -1, 2], dtype=torch.int32, device=device) if use_slots else None
        nexts = torch.tensor([0, 2, 11], dtype=torch.int32, device=device) if ring else None
        before = state.clone()
        y = compat.causal_conv1d_update(x if length else x[..., 0], state, weight, bias, "silu", nexts, slots)
        self.assertEqual(y.shape, x.shape if length else x.shape[:2])
        expected_state = before.clone()
        for i in range(b):
            row = int(slots[i]) if use_slots else i
            if row < 0:
                self.assertEqual(y[i].abs().max().item(), 0)
                continue
            if ring:
                at = int(nexts[i])
                past = torch.stack([before[row, :, (at + j) % size] for j in range(-(W - 1), 0)], -1)
                for t in range(T):
                    expected_state[row, :, (at + t) % size] = x[i, :, t]
            else:
                past = before[row, :, size - (W - 1):]
                expected_state[row] = torch.cat([before[row], x[i]], -1)[:, -size:]
            right, _ = loops.conv1d(x[i:i + 1].double().transpose(1, 2), weight.double(), bias.double(),
                                    state=past[None].double(), activation="silu")
            right = right.detach()
            right = right[0].T if length else right[0, 0]
            error = ((y[i].double() - right).norm() / right.norm()).item()
            self.assertLess(error, 1e-5 if dtype == torch.float32 else 2e-2)
        self.assertTrue(torch.equal(state, expected_state))

    def test_rwkv_lm(self):
        for device in DEVICES:
            tensors = [leaf(2, 7, 16, device=device) for _ in range(4)] + [leaf(2, 8, device=device)]
            twins = exact(tensors)
            out = compat.RUN_CUDA_RWKV6(2, 7, 16, 2, *tensors)
            y, _ = loops.wkv6(*(t.view(2, 7, 2, 8) for t in twins[:4]), twins[4])
            self.same(tensors, [out], twins, [y.flatten(2)])

    def test_mixed_dtypes(self):
        """B and C in float32 with other tensors in 16 bits are not rounded.  The output has the dtype of x."""
        tensors, twins = self.ssd("cpu")
        with torch.no_grad():
            half = [t.bfloat16() if i in (0, 6) else t for i, t in enumerate(tensors)]
            wide = [t.float() if t is not None else t for t in half]
            y = compat.mamba_chunk_scan_combined(*half[:5], 64, *half[5:8])
            self.assertTrue(torch.equal(y, compat.mamba_chunk_scan_combined(*wide[:5], 64, *wide[5:8]).bfloat16()))

    def test_mixed_dtypes_of_rwkv6(self):
        """Mixed dtypes of r, k and v are promoted, as in mamba_ssm's functions.  The output has the dtype of v."""
        (r, k, v, w, u, s), _ = self.rwkv6("cpu")
        with torch.no_grad():
            r, v = r.bfloat16(), v.bfloat16()
            for function in (compat.chunk_rwkv6, compat.fused_recurrent_rwkv6):
                y, state = function(r, k, v, w, u, 1.0, s, True)
                right, right_state = function(r.float(), k, v.float(), w, u, 1.0, s, True)
                self.assertTrue(torch.equal(y, right.bfloat16()) and torch.equal(state, right_state))
            r, k, v, w, u = torch.randn(2, 7, 16).bfloat16(), *torch.randn(3, 2, 7, 16), torch.randn(2, 8)
            self.assertTrue(torch.equal(compat.RUN_CUDA_RWKV6(2, 7, 16, 2, k, r, v.half(), w, u),
                                        compat.RUN_CUDA_RWKV6(2, 7, 16, 2, k, r.float(), v.half().float(), w, u).half()))

    def calls_of_sequences(self, seq_idx):
        """Calls of each function that takes seq_idx: (name, function of its first tensor, first tensor)."""
        (x, dt, A, B, C, D, z, bias, s), _ = self.ssd("cpu")
        split, _ = self.split_conv1d_scan("cpu")
        zxbcdt, weight, conv_bias, dt_bias, split_A, split_D, states, norm, _, _ = split

        def scan(x, initial=None, **options):
            return compat.mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, z, bias, initial, seq_idx, dt_softplus=True,
                                                    **options)

        def fused(zxbcdt, initial=None, **options):
            return compat.mamba_split_conv1d_scan_combined(zxbcdt, weight, conv_bias, dt_bias, split_A, split_D, 64, initial,
                                                           seq_idx, headdim=6, ngroups=2, **options)

        wants = {"return_final_states": True}
        return (("scan", scan, x), ("scan, states", lambda x: scan(x, s, **wants), x),
                ("split", fused, zxbcdt), ("split, states", lambda x: fused(x, states, rmsnorm_weight=norm, **wants), zxbcdt),
                ("convolution", lambda x: compat.causal_conv1d_fn(x.transpose(1, 2)[:, :44], weight, conv_bias, seq_idx,
                                                                  activation="silu"), zxbcdt))

    def test_number_of_sequences(self):
        """y, states and gradients are the same whether the number of sequences is counted or an upper bound is given,
        in eager mode and compiled to one graph."""
        seq_idx = torch.tensor([[0] * 5 + [1] * 7, [4] * 3 + [-1] * 2 + [4] * 7])
        self.addCleanup(compat.most_sequences, None)
        graphs = []

        def backend(graph, example):
            graphs.append(str(graph.graph))
            return torch._dynamo.lookup_backend("aot_eager")(graph, example)

        for what, function, tensor in self.calls_of_sequences(seq_idx):
            def found(function):
                results = function(tensor)
                results = results if isinstance(results, tuple) else (results,)
                return (*results, *torch.autograd.grad(sum(r.square().sum() for r in results), tensor))

            compat.most_sequences(None)
            right = found(function)
            for most in (None, 5):
                compat.most_sequences(most)
                torch._dynamo.reset()
                graphs.clear()
                compiled = torch.compile(function, fullgraph=True, backend=backend)
                for use in (function, compiled)[:1 if what == "split, states" else 2]:
                    with self.subTest(what, most=most, compiled=use is compiled):
                        for a, b in zip(found(use), right):
                            self.assertTrue(torch.allclose(a, b, 1e-5, 1e-5))
                with self.subTest(what, most=most):
                    self.assertTrue(graphs or what == "split, states")
                    self.assertEqual(any("count_bounds" in graph for graph in graphs),
                                     most is None and what in ("scan", "scan, states", "split"))
            compat.most_sequences(4)
            if what in ("scan, states", "split"):
                with self.assertRaisesRegex(ArgumentError, "seq_idx has 5 sequences: must be at most 4"):
                    function(tensor)
                torch._dynamo.reset()
                y = torch.compile(function, fullgraph=True, backend="eager")(tensor)
                self.assertTrue((y[0] if isinstance(y, tuple) else y)[seq_idx >= 0].isnan().all())
        for bad in (0, -1, 2.5, "4"):
            with self.assertRaisesRegex(ArgumentError, "compat.most_sequences: number = "):
                compat.most_sequences(bad)

    def test_padding(self):
        """A negative seq_idx is padding in both functions with a convolution: y is 0, and states do not contain it."""
        for device in DEVICES:
            seq_idx = torch.tensor([[0] * 5 + [-1] * 7, [-1] * 2 + [3] * 8 + [-2] * 2], device=device)
            padding = seq_idx < 0
            for norm in (False, True):
                for activation in (None, "silu"):
                    with self.subTest(device=device, norm=norm, activation=activation):
                        tensors, _ = self.split_conv1d_scan(device)
                        zxbcdt, weight, bias, dt_bias, A, D, _, gain, _, _ = tensors
                        options = {"headdim": 6, "ngroups": 2, "activation": activation, "return_final_states": True,
                                   "rmsnorm_weight": gain if norm else None}
                        y, states = compat.mamba_split_conv1d_scan_combined(zxbcdt, weight, bias, dt_bias, A, D, 64,
                                                                            seq_idx=seq_idx, **options)
                        self.assertEqual(y[padding].abs().max().item(), 0)
                        self.assertEqual(states.abs().max().item(), 0)  # both rows end in padding
                        weights = torch.arange(y.numel(), device=device).view_as(y)
                        found = torch.autograd.grad((y * weights).sum(), zxbcdt)
                        self.assertEqual(found[0][padding].abs().max().item(), 0)
                        for row, start, end in ((0, 0, 5), (1, 2, 10)):
                            alone, _ = compat.mamba_split_conv1d_scan_combined(
                                zxbcdt[row:row + 1, start:end], weight, bias, dt_bias, A, D, 64, **options)
                            self.assertTrue(torch.allclose(alone, y[row:row + 1, start:end], atol=1e-6))
                        y = compat.causal_conv1d_fn(zxbcdt.transpose(1, 2)[:, :44], weight, bias, seq_idx,
                                                    activation=activation)
                        self.assertEqual(y.transpose(1, 2)[padding].abs().max().item(), 0)

    def test_nothing(self):
        """An empty batch, and empty sequences."""
        for B, T in ((0, 5), (2, 0), (0, 0)):
            with self.subTest(B=B, T=T):
                seq_idx = torch.zeros(B, T, dtype=torch.int32)
                x, states = torch.randn(B, T, 4, 6), torch.randn(B, 4, 6, 5)
                options = {"initial_states": states, "seq_idx": seq_idx, "return_final_states": True}
                B_C = x[..., :2, :5]
                y, last = compat.mamba_chunk_scan_combined(x, x[..., 0], -torch.rand(4), B_C, B_C, 64, **options)
                self.assertEqual(y.shape, x.shape)
                self.assertTrue(torch.equal(last, states))
                y, last = compat.mamba_split_conv1d_scan_combined(
                    torch.randn(B, T, 72), torch.randn(44, 3), None, torch.randn(4), -torch.rand(4), torch.randn(4), 64,
                    headdim=6, ngroups=2, **options)
                self.assertEqual(y.shape, (B, T, 24))
                self.assertTrue(torch.equal(last, states))
                x = torch.randn(B, 6, T)
                self.assertEqual(compat.causal_conv1d_fn(x, torch.randn(6, 4), seq_idx=seq_idx).shape, x.shape)
                for size in (3, 5):
                    state = torch.randn(B, 6, size)
                    before = state.clone()
                    self.assertEqual(compat.causal_conv1d_update(x, state, torch.randn(6, 4)).shape, x.shape)
                    self.assertTrue(torch.equal(state, before))
        for lead in ((6,), (3, 2)):
            for indices in (None, torch.zeros(0, dtype=torch.int32)):
                for dtype in (torch.float32, torch.bfloat16):
                    x, B, A = torch.randn(0, *lead), torch.randn(0, 4), -torch.rand(*lead, 4)
                    state = torch.ones(0 if indices is None else 2, *lead, 4, dtype=dtype)
                    y = compat.selective_state_update(state, x, x, A, B, B, state_batch_indices=indices)
                    self.assertEqual(y.shape, x.shape)
                    self.assertTrue((state == 1).all())

    def test_rows_out_of_the_pool(self):
        """In every path of an update, an index outside the pool skips its batch element, even one beyond int32."""
        for device in DEVICES:
            for dtype in (torch.int32, torch.int64):
                outside = [-1, 3, 2 ** 31 - 1, -2 ** 31] + [2 ** 32, 2 ** 32 + 1, -2 ** 40] * (dtype == torch.int64)
                for index in outside:
                    for size, kind in ((2, torch.float32), (5, torch.float32), (2, torch.bfloat16)):
                        for ring in (None, torch.zeros(2, dtype=torch.int32, device=device)):
                            with self.subTest(index=index, size=size, kind=kind, ring=ring is not None):
                                state = torch.randn(3, 6, size, device=device).to(kind)
                                x, weight = torch.randn(2, 6, device=device), torch.randn(6, 3, device=device)
                                self.check_skip(state, index, dtype, lambda indices: compat.causal_conv1d_update(
                                    x, state, weight, cache_seqlens=ring, conv_state_indices=indices))
                    for kind in (torch.float32, torch.bfloat16):
                        with self.subTest(index=index, kind=kind, function="selective_state_update"):
                            state = torch.randn(3, 6, 4, device=device).to(kind)
                            x, B = torch.randn(2, 6, device=device), torch.randn(2, 4, device=device)
                            A = -torch.rand(6, 4, device=device)
                            self.check_skip(state, index, dtype, lambda indices: compat.selective_state_update(
                                state, x, x, A, B, B, state_batch_indices=indices))

    def check_skip(self, state, index, dtype, update):
        before = state.clone()
        y = update(torch.tensor([index, 1], dtype=dtype, device=state.device))
        self.assertEqual(y[0].abs().max().item(), 0)
        self.assertGreater(y[1].abs().max().item(), 0)
        self.assertTrue(torch.equal(state[[0, 2]], before[[0, 2]]))
        self.assertFalse(torch.equal(state[1], before[1]))

    def test_version_counters(self):
        """In every path an update tells autograd that it has changed the state."""
        for device in DEVICES:
            for dtype in (torch.float32, torch.bfloat16):
                for indices in (None, torch.tensor([1, 0], dtype=torch.int32, device=device)):
                    for size in (2, 5):
                        for ring in (None, torch.zeros(2, dtype=torch.int32, device=device)):
                            x, weight = torch.randn(2, 6, device=device), leaf(6, 3, device=device)
                            state = torch.randn(2, 6, size, device=device).to(dtype)
                            y = (state[..., :1].permute(2, 0, 1) * weight[:, 0]).sum()  # autograd saves state
                            compat.causal_conv1d_update(x, state, weight, None, None, ring, indices)
                            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                                y.backward()
                    for lead in ((6,), (3, 2)):
                        x, B, A = (torch.randn(2, *n, device=device) for n in (lead, (4,), ()))
                        scale, A = leaf(*lead, 4, device=device), -torch.rand(*lead, 4, device=device)
                        state = torch.randn(2, *lead, 4, device=device).to(dtype)
                        y = (state * scale).sum()
                        compat.selective_state_update(state, x, x, A, B, B, state_batch_indices=indices)
                        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                            y.backward()
            x, weight = leaf(2, 6, 9, device=device), leaf(6, 3, device=device)
            state = torch.randn(2, 6, 2, device=device)
            y = compat.causal_conv1d_fn(x, weight, initial_states=state)
            compat.causal_conv1d_update(x[..., 0].detach(), state, weight)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                y.sum().backward()

    # ---- bad arguments ----

    def right_calls(self):
        """Yields (function, arguments of a call that works).  Every dimension has a different size."""
        B, T, H, P, G, N, W, r = 2, 11, 4, 6, 2, 5, 3, torch.randn
        A, inner, channels, D = -torch.rand(H), H * P, H * P + 2 * G * N, 7
        seq_idx = torch.zeros(B, T, dtype=torch.int32)
        rwkv6 = {"r": r(B, T, H, N), "k": r(B, T, H, N), "v": r(B, T, H, P), "w": -torch.rand(B, T, H, N), "u": r(H, N)}
        packed = {**{name: value[:1] if name != "u" else value for name, value in rwkv6.items()},
                  "initial_state": r(3, H, N, P), "cu_seqlens": torch.tensor([0, 3, 7, T])}
        chunk = {"x": r(B, T, H, P), "dt": r(B, T, H), "A": A, "B": r(B, T, G, N), "C": r(B, T, G, N), "chunk_size": 64,
                 "D": r(H), "z": r(B, T, H, P), "dt_bias": r(H), "initial_states": r(B, H, P, N)}
        split = {"zxbcdt": r(B, T, inner + channels + H), "conv1d_weight": r(channels, W), "conv1d_bias": r(channels),
                 "dt_bias": r(H), "A": A, "D": r(H), "chunk_size": 64, "initial_states": r(B, H, P, N),
                 "rmsnorm_weight": r(inner), "outproj_weight": r(9, inner), "outproj_bias": r(9), "headdim": P,
                 "ngroups": G}
        scan = {"u": r(B, D, T), "delta": r(B, D, T), "A": -torch.rand(D, N), "B": r(B, N, T), "C": r(B, N, T),
                "D": r(D), "z": r(B, D, T), "delta_bias": r(D)}
        update = {"state": r(B, D, N), "x": r(B, D), "dt": r(B, D), "A": -torch.rand(D, N), "B": r(B, N), "C": r(B, N),
                  "D": r(D), "z": r(B, D), "dt_bias": r(D)}
        heads = {"state": r(5, H, P, N), "x": r(B, H, P), "dt": r(B, H, P), "A": -torch.rand(H, P, N), "B": r(B, G, N),
                 "C": r(B, G, N), "D": r(H, P), "z": r(B, H, P), "dt_bias": r(H, P),
                 "state_batch_indices": torch.tensor([1, 0])}
        tied = {**heads, "dt": r(B, H, 1).expand(B, H, P), "A": A[:, None, None].expand(H, P, N),
                "D": r(H, 1).expand(H, P), "dt_bias": r(H, 1).expand(H, P)}
        norm = {"x": r(3, 5, 12), "weight": r(12), "bias": r(12), "z": r(3, 5, 12), "group_size": 4}
        add = {"x": r(3, 5, 12), "weight": r(12), "bias": r(12), "residual": r(3, 5, 12), "x1": r(3, 5, 12),
               "weight1": r(12), "bias1": r(12), "rowscale": r(3, 5)}
        stream = {name: add[name] for name in ("x", "weight", "bias", "residual", "rowscale")}
        block = {"xz": r(B, 2 * D, T), "conv1d_weight": r(D, 1, W), "conv1d_bias": r(D), "x_proj_weight": r(13, D),
                 "delta_proj_weight": r(D, 3), "out_proj_weight": r(9, D), "out_proj_bias": r(9), "A": -torch.rand(D, N),
                 "D": r(D), "delta_bias": r(D), "B_proj_bias": r(N), "C_proj_bias": r(N), "b_rms_weight": r(N),
                 "c_rms_weight": r(N), "dt_rms_weight": r(D), "seq_idx": seq_idx}
        conv = {"x": r(B, D, T), "weight": r(D, W), "bias": r(D)}
        conv_update = {"x": r(B, D, T), "conv_state": r(B, D, W - 1), "weight": r(D, W), "bias": r(D)}
        return ((compat.chunk_rwkv6, {**rwkv6, "initial_state": r(B, H, N, P)}), (compat.chunk_rwkv6, packed),
                (compat.chunk_rwkv6, {**{name: value.transpose(1, 2) if name != "u" else value
                                         for name, value in rwkv6.items()},
                                      "initial_state": r(B, H, N, P), "head_first": True}),
                (compat.fused_recurrent_rwkv6, {**rwkv6, "initial_state": r(B, H, N, P), "reverse": True}),
                (compat.fused_recurrent_rwkv6, packed),
                (compat.mamba_chunk_scan_combined, chunk),
                (compat.mamba_chunk_scan_combined, {**chunk, "D": r(H, P), "seq_idx": seq_idx}),
                (compat.mamba_split_conv1d_scan_combined, split),
                (compat.mamba_split_conv1d_scan_combined, {**split, "seq_idx": seq_idx, "activation": None}),
                (compat.mamba_split_conv1d_scan_combined,
                 {**split, "zxbcdt": r(B, T, 6 + inner + channels + H), "outproj_weight": r(9, inner + 3)}),
                (compat.selective_scan_fn, scan),
                (compat.selective_scan_fn, {**scan, "B": r(D, N), "C": r(D, N)}),
                (compat.selective_scan_fn, {**scan, "B": r(D, N), "C": r(B, 1, N, T)}),
                (compat.selective_state_update, update), (compat.selective_state_update, heads),
                (compat.selective_state_update, tied),
                (compat.layernorm_fn, norm), (compat.rms_norm_gated, norm), (compat.rmsnorm_fn, norm),
                (compat.layer_norm_fn, add), (compat.rms_norm_fn, add), (compat.mamba_inner_fn, block),
                (compat.layer_norm_fn, stream), (compat.rms_norm_fn, {**stream, "prenorm": True}),
                (compat.causal_conv1d_fn, {**conv, "seq_idx": seq_idx}),
                (compat.causal_conv1d_fn, {**conv, "initial_states": r(B, D, W - 1), "return_final_states": True,
                                           "final_states_out": r(B, D, W - 1)}),
                (compat.causal_conv1d_update, conv_update),
                (compat.causal_conv1d_update, {**conv_update, "conv_state": r(5, D, 8),
                                               "conv_state_indices": torch.tensor([1, 0]),
                                               "cache_seqlens": torch.tensor([3, 9])}),
                (compat.RUN_CUDA_RWKV6, {"B": B, "T": T, "C": 8, "H": 2, **{name: r(B, T, 8) for name in "rkvw"},
                                         "u": r(2, 4)}))

    def refuses(self, function, arguments, name=None, kind=ArgumentError, text=""):
        """Checks that the error names the function and the argument (None: any argument), and that no argument
        changes."""
        before = {key: value.clone() for key, value in arguments.items()
                  if isinstance(value, torch.Tensor) and value.layout is torch.strided}
        with self.assertRaises(Error) as caught:
            function(**arguments)
        self.assertIsInstance(caught.exception, kind)
        message, start = str(caught.exception), f"gt_kernels.compat.{function.__name__}: "
        self.assertEqual(message[:len(start)], start, message)
        words = message[len(start):].replace("[", " ").replace(",", " ").replace(":", " ").split()
        named = [word for word in words if word in inspect.signature(function).parameters or word == "chunk_size"]
        self.assertEqual(named[:1], [name] if name else named[:1], message)
        self.assertTrue(named, message)
        self.assertIn(text, message)
        for key, value in before.items():
            self.assertTrue(torch.equal(bits(value), bits(arguments[key])), key)

    def test_wrong_shapes(self):
        """Each tensor of each function: too short and too long in each dimension, and with one dimension more and
        less."""
        # These dimensions may have any size.
        free = {("causal_conv1d_update", "x"): (2,), ("causal_conv1d_update", "conv_state"): (2,),
                ("causal_conv1d_update", "weight"): (1,), ("causal_conv1d_fn", "weight"): (1,),
                ("mamba_split_conv1d_scan_combined", "conv1d_weight"): (1,), ("mamba_inner_fn", "conv1d_weight"): (2,)}
        # A wrong size here makes another argument wrong.
        others = ("r", "v", "x", "u", "A", "B", "weight", "state", "conv_state", "D", "zxbcdt", "conv1d_weight",
                  "outproj_weight", "cu_seqlens", "xz", "delta_proj_weight", "out_proj_weight")
        for function, right in self.right_calls():
            function(**{name: value.clone() if isinstance(value, torch.Tensor) else value
                        for name, value in right.items()})
            time = {} if "seq_idx" in right else {"zxbcdt": (1,), "x": (2,) * (function is compat.causal_conv1d_fn)}
            for name, value in right.items():
                if not isinstance(value, torch.Tensor):
                    continue
                shape = tuple(value.shape)
                wrong = [shape + (1,), (1,) + shape, shape[1:]]
                for at, size in enumerate(shape):
                    is_pool = at == 0 and "state" in name and "indices" in "".join(right)
                    is_free = at in (*free.get((function.__name__, name), ()), *time.get(name, ()))
                    if not is_pool and not is_free:
                        wrong += [shape[:at] + (n,) + shape[at + 1:] for n in {0, 1, size - 1, size + 1} - {size}]
                for shape in wrong:
                    with self.subTest(function=function.__name__, name=name, shape=shape):
                        blamed = None if name in others and function is not compat.RUN_CUDA_RWKV6 else name
                        self.refuses(function, {**right, name: torch.ones(shape, dtype=value.dtype)}, blamed)

    def test_wrong_kinds(self):
        """Each tensor of each function as something else: no tensor, None, another dtype, sparse, on another device."""
        floats = torch.float32, torch.bfloat16, torch.float16, torch.float64
        for function, right in self.right_calls():
            signature = inspect.signature(function).parameters
            for name, value in right.items():
                if not isinstance(value, torch.Tensor):
                    continue
                wrong = [value.numpy(), value.tolist(), 1.0, "x", value.to_sparse(), value.bool()]
                if value.is_floating_point():
                    wrong += [value.int(), value.long(), value.to(torch.float8_e5m2)]
                else:
                    wrong += [value.to(dtype) for dtype in (*floats, torch.int8, torch.uint8, torch.int16)]
                if signature[name].default is inspect.Parameter.empty and \
                        name not in ("bias", "conv1d_bias", "out_proj_bias"):
                    wrong.append(None)
                for bad in wrong:
                    with self.subTest(function=function.__name__, name=name, bad=getattr(bad, "dtype", type(bad))):
                        self.refuses(function, {**right, name: bad}, name)
                if value.is_floating_point():
                    self.refuses(function, {**right, name: value.to(torch.complex64)}, name, UnsupportedError)
                if name != next(iter(right)) and function is not compat.mamba_split_conv1d_scan_combined:
                    with self.assertRaisesRegex(ArgumentError, f"{function.__name__}: .* is on "):
                        function(**{**right, name: value.to("meta")})

    def test_bad_values(self):
        """Each function with one bad value: values that the original refuses, and values that mean a default in the C
        API."""
        nan, infinity = float("nan"), float("inf")
        bad = {"chunk_size": (0, -64, 2.5, "64", None), "headdim": (0, -6, 6.0, "6"),
               "ngroups": (0, -2, 3, 5, 2.0, None),
               "group_size": (0, -4, 5, 24, 4.0), "eps": (0.0, 0, -1e-6, 1e-50, nan, infinity, 1e300, None, "1"),
               "scale": (0.0, -1, 1e-50, nan, infinity, "1", (1, 2)), "H": (0, -2, 3, 2.0),
               "dt_limit": ((1.0, 0.5), (nan, 1.0), (0.0, nan), (1.0,), (0, 1, 2), 1.0, None, ("a", "b"))}
        bad["rmsnorm_eps"] = bad["eps"]
        seen = set()
        for function, right in self.right_calls():
            is_fla = "rwkv6" in function.__name__
            names = set(inspect.signature(function).parameters) | ({"chunk_size"} if is_fla else set())
            for name in names & set(bad):
                seen.add(name)
                for value in (*bad[name], *((3, 48) if is_fla and name == "chunk_size" else ())):
                    if is_fla and name == "chunk_size" and value is None:
                        continue
                    with self.subTest(function=function.__name__, name=name, value=value):
                        self.refuses(function, {**right, name: value}, name)
        self.assertEqual(seen, set(bad))

    def test_bad_calls(self):
        calls = {}
        for function, right in self.right_calls():
            calls.setdefault(function.__name__, []).append((function, right))

        def refuses(name, at, argument, text="", kind=ArgumentError, **wrong):
            function, right = calls[name][at]
            with self.subTest(name, **{key: getattr(value, "shape", value) for key, value in wrong.items()}):
                self.refuses(function, {**right, **wrong}, argument, kind, text)

        r, split = torch.randn, "mamba_split_conv1d_scan_combined"
        refuses("mamba_chunk_scan_combined", 0, "B", "its 3 groups must divide 4", B=r(2, 11, 3, 5), C=r(2, 11, 3, 5))
        refuses("mamba_chunk_scan_combined", 1, "seq_idx", "[1, 11]: must be [B,T], where B = 2",
                seq_idx=torch.zeros(1, 11, dtype=torch.int32))
        refuses("mamba_chunk_scan_combined", 1, "seq_idx", "[11]: must be [B,T]", seq_idx=torch.zeros(11).int())
        refuses(split, 0, "conv1d_weight", "width 5", UnsupportedError, conv1d_weight=r(44, 5))
        refuses(split, 0, "conv1d_weight", "[46, 3]: must be [H P + 2 G N,W]", conv1d_weight=r(46, 3), conv1d_bias=None)
        refuses(split, 0, "zxbcdt", zxbcdt=r(2, 11, 73))
        refuses(split, 0, "outproj_weight", "bfloat16: must be torch.float32", outproj_weight=r(9, 24).bfloat16())
        refuses(split, 0, "outproj_bias", "bfloat16: must be torch.float32", outproj_bias=r(9).bfloat16())
        refuses("selective_scan_fn", 0, "C", "must have 1 groups", C=r(2, 7, 5, 11))
        refuses("selective_scan_fn", 0, "B", "its 2 groups must divide 7", B=r(2, 2, 5, 11), C=r(2, 2, 5, 11))
        refuses("selective_state_update", 0, "B", "its 2 groups must divide 1", B=r(2, 2, 5), C=r(2, 2, 5))
        refuses("selective_state_update", 1, "C", "must have 2 groups", C=r(2, 5))
        refuses("selective_state_update", 0, "state", "a row for each of 2", state=r(3, 7, 5))
        refuses("selective_state_update", 0, "state", "expanded", state=torch.zeros(7, 5).expand(2, 7, 5))
        refuses("causal_conv1d_fn", 0, "weight", "width 5", UnsupportedError, weight=r(7, 5))
        refuses("causal_conv1d_fn", 1, "final_states_out", "bfloat16", final_states_out=r(2, 7, 2).bfloat16())
        refuses("causal_conv1d_fn", 1, "final_states_out", "expanded", final_states_out=r(2, 7, 1).expand(2, 7, 2))
        refuses("causal_conv1d_update", 0, "conv_state", "at least W - 1 = 2", conv_state=r(2, 7, 1))
        refuses("causal_conv1d_update", 0, "conv_state", "a row for each of 2", conv_state=r(3, 7, 2))
        refuses("causal_conv1d_update", 0, "conv_state", "expanded", conv_state=torch.zeros(7, 2).expand(2, 7, 2))
        refuses("causal_conv1d_update", 1, "conv_state", "must have a row", conv_state=r(0, 7, 8))
        refuses("causal_conv1d_update", 0, "weight", "width 1", UnsupportedError, weight=r(7, 1))
        refuses("chunk_rwkv6", 1, "initial_state", "each of 3 sequences", initial_state=r(4, 4, 5, 6))
        refuses("chunk_rwkv6", 1, "cu_seqlens", "at least 2", cu_seqlens=torch.tensor([0]), initial_state=None)
        refuses("chunk_rwkv6", 0, "r", "the batch size must be 1", cu_seqlens=torch.tensor([0, 11]), initial_state=None)
        for wrong in ([1, 3, 7, 11], [0, 7, 3, 11], [0, 3, 7, 12], [0, 3, 7, 2 ** 32 + 11], [0, -1, 7, 11]):
            refuses("fused_recurrent_rwkv6", 1, "cu_seqlens", cu_seqlens=torch.tensor(wrong))
        refuses("RUN_CUDA_RWKV6", 0, "r", r=r(2, 8, 11))

    def refused_split(self, **options):
        tensors, _ = self.split_conv1d_scan("cpu")
        compat.mamba_split_conv1d_scan_combined(*tensors[:6], 64, **{"headdim": 6, "ngroups": 2, **options})

    def test_refusals(self):
        x = torch.zeros(1, 4, 3, 2)
        bounds = torch.tensor([0, 4])
        for text, call in (
                ("scale_factor", lambda: compat.chunk_rwkv6(x, x, x, x, None, scale_factor=2)),
                ("reverse with cu_seqlens", lambda: compat.fused_recurrent_rwkv6(x, x, x, x, None, reverse=True,
                                                                                 cu_seqlens=bounds)),
                ("state_dtype torch.bfloat16", lambda: compat.mamba_chunk_scan_combined(
                    x, x[..., 0], x[0, 0, :, 0], x, x, 64, state_dtype=torch.bfloat16)),
                ("state_dtype torch.float16", lambda: self.refused_split(state_dtype=torch.float16)),
                ("activation 'gelu'", lambda: self.refused_split(activation="gelu")),
                ("without headdim", lambda: self.refused_split(headdim=None)),
                ("outproj_bias without outproj_weight", lambda: self.refused_split(outproj_bias=bounds)),
                ("causal_conv1d_fn: seq_idx on the meta device", lambda: compat.causal_conv1d_fn(
                    *(torch.zeros(shape, device="meta") for shape in ((2, 6, 5), (6, 4))),
                    seq_idx=torch.zeros(2, 5, dtype=torch.int32, device="meta"))),
                ("mamba_chunk_scan_combined: seq_idx on the meta device", lambda: compat.mamba_chunk_scan_combined(
                    *(torch.zeros(shape, device="meta") for shape in ((1, 5, 1, 2), (1, 5, 1), 1, (1, 5, 1, 3), (1, 5, 1, 3))),
                    64, seq_idx=torch.zeros(1, 5, dtype=torch.int32, device="meta"))),
                ("a complex A", lambda: compat.selective_scan_fn(x[0], x[0], x[0, 0].to(torch.complex64), x[0], x[0])),
                ("activation 'gelu'", lambda: compat.causal_conv1d_fn(x[0], x[0, 0], activation="gelu")),
                ("seq_idx with states", lambda: compat.causal_conv1d_fn(x[0], x[0, 0], seq_idx=bounds,
                                                                        return_final_states=True))):
            with self.assertRaisesRegex(UnsupportedError, text):
                call()


if __name__ == "__main__":
    unittest.main()
