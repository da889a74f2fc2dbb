"""gt_kernels.compat: what the packages' functions do, as float64 loops over tokens, and what is refused."""

import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import torch.nn.functional as F

import loops
from gt_kernels import UnsupportedError, c, compat

DEVICES = ["cpu"]
if torch.cuda.is_available() and c.gt_device_supported(-1) == c.GT_OK:
    DEVICES.append("cuda")


def leaf(*shape, scale=1.0, device="cpu", dtype=torch.float32):
    return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()


def exact(tensors):
    return [None if t is None else t.detach().double().cpu().requires_grad_() for t in tensors]


class Compat(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)

    def same(self, tensors, outputs, twins, right, tolerance=1e-4):
        """Outputs and gradients of all tensors, against those of the float64 twins."""
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
        """rows: for each row of the batch the bounds of its sequences."""
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
            for kind in ("constant", "variable", "groups"):
                B, D, T, N = 2, 6, 9, 4
                shape = {"constant": (D, N), "variable": (B, N, T), "groups": (B, 2, N, T)}[kind]
                tensors = [leaf(B, D, T, device=device), leaf(B, D, T, device=device), leaf(D, N, device=device),
                           leaf(*shape, device=device), leaf(*shape, device=device), leaf(D, device=device),
                           leaf(B, D, T, device=device), leaf(D, device=device)]
                with torch.no_grad():
                    tensors[2].copy_(-tensors[2].exp())
                twins = exact(tensors)
                out = compat.selective_scan_fn(*tensors, True, True)

                def turned(x):
                    if kind == "constant":
                        return x.expand(B, T, D, N)
                    return x.transpose(1, 2).unsqueeze(2) if kind == "variable" else x.permute(0, 3, 1, 2)

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
            seq_idx = torch.tensor([[0] * 4 + [1] * 5, [2] * 6 + [-1] * 3], dtype=torch.int32, device=device)
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
            return  # tokens that overwrite what later ones of the same call read
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
        """B and C in float32 beside 16 bits are not rounded; the output has the dtype of x."""
        tensors, twins = self.ssd("cpu")
        with torch.no_grad():
            half = [t.bfloat16() if i in (0, 6) else t for i, t in enumerate(tensors)]
            wide = [t.float() if t is not None else t for t in half]
            y = compat.mamba_chunk_scan_combined(*half[:5], 64, *half[5:8])
            self.assertTrue(torch.equal(y, compat.mamba_chunk_scan_combined(*wide[:5], 64, *wide[5:8]).bfloat16()))

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
                ("return_varlen_states", lambda: compat.mamba_chunk_scan_combined(x, x[..., 0], x[0, 0, :, 0], x, x, 64,
                                                                                  return_varlen_states=True)),
                ("a complex A", lambda: compat.selective_scan_fn(x[0], x[0], x[0, 0].to(torch.complex64), x[0], x[0])),
                ("activation 'gelu'", lambda: compat.causal_conv1d_fn(x[0], x[0, 0], activation="gelu")),
                ("seq_idx with states", lambda: compat.causal_conv1d_fn(x[0], x[0, 0], seq_idx=bounds,
                                                                        return_final_states=True))):
            with self.assertRaisesRegex(UnsupportedError, text):
                call()


if __name__ == "__main__":
    unittest.main()
