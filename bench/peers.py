#!/usr/bin/env python3
"""Times public implementations of the bench's operators on a GPU, as the bench times its own:

    build/bench/gt_bench --list | python3 bench/peers.py --csv peers.csv
    build/bench/gt_bench --peers peers.csv

The list on standard input, or --rows FILE (a CSV of the bench serves, too), says what to time.
Per row: cold L2, CUDA events, median after warm-ups; a call is enqueued while the GPU is still
busy, so that launches cost nothing.  fwd is a forward call that autograd records, inf one under
no_grad, bwd only the backward call.  step is a call with one token and a state; it is captured in a
CUDA graph, and the time is of a replay.  rel_err is the error of a forward call against float64, on two heads, four
channels or eight rows, for ssd on all.  In rows of bwd it is nan, except for ssd: there it is the largest error of any
gradient.  The gradients of A, D and dt_bias are sums over tokens: their errors are relative to the sums and the
magnitudes of their terms together.  A comment below the rows gives the plain relative error of each gradient.  For the
gradients that are sums, the error just described follows in brackets.
Functions of rows (rmsnorm_linear, norm_mix, norm_gate, add_norm) are compared with float64 on all rows, with their
gradients, before they are timed.  A function whose error is beyond the limit of its dtype gives a comment, and no time.
Each of their calls is captured in a CUDA graph, and the time is of a replay.  So launches cost nothing, however small
the kernels are.  gt_kernels.torch, if it is installed, is timed in the same way.
mem_mib is the peak beyond inputs, outputs and gradients; of bwd with what forward has saved.  Triton kernels are tuned
anew for each row, which takes minutes a row until Triton's cache on disk has all their variants.

Needs PyTorch.  A peer that is not installed is named at the end, with its source.  --rwkv takes the folder RWKV-v5/cuda
of a clone of BlinkDL/RWKV-LM, for the original WKV6 kernel.  --rwkv4 takes the folder RWKV-v4/cuda or RWKV-v4neo/cuda,
for the kernel of RWKV-4; only the latter folder has a kernel for bf16.  The other WKV6 peers and the wkv4 peers get the
logarithm of the decay; its computation is not timed.

--plain times only wkv6, as a loop over tokens in PyTorch, for calls of at most 2048 tokens.  The host launches the
kernels of "torch loop" one by one, and is slower than the GPU.  "torch loop graph" replays a CUDA graph of the call.
Both are also compared with float64 gradients, of two heads.

--check needs no GPU: it compares every function of rows and the loop with float64 on the CPU, in small sizes, and times
nothing."""
import argparse
import functools
import gc
import importlib
import math
import os
import re
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

DTYPES = {'f32': torch.float32, 'bf16': torch.bfloat16, 'f16': torch.float16}
WHERE = {
    'fla': 'pip install flash-linear-attention (github.com/fla-org/flash-linear-attention)',
    'mamba_ssm': 'pip install mamba-ssm --no-build-isolation (github.com/state-spaces/mamba)',
    'causal_conv1d':
        'pip install causal-conv1d --no-build-isolation (github.com/Dao-AILab/causal-conv1d)',
    'gt_kernels': 'pip install . in the root of this repository',
    'rwkv': '--rwkv with RWKV-v5/cuda of github.com/BlinkDL/RWKV-LM',
    'rwkv4': '--rwkv4 with RWKV-v4neo/cuda of github.com/BlinkDL/RWKV-LM',
}
WARM_UPS, LEAST_RUNS, MOST_RUNS, BUDGET_MS = 4, 10, 100, 200
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of errors, for functions of rows
MOST_PLAIN = 2048  # tokens of a loop that is timed
DEVICE = 'cuda'
missing = {}  # peer: why


# ---- peers that may not be there -----------------------------------------------------------------

def find(package, module, name):
    """The function, or None."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a broken extension fails in many ways
        missing.setdefault(package, f'{type(error).__name__}: {error}')
        return None


@functools.cache
def build_rwkv(folder, head):
    """The original WKV6 kernel as a differentiable function of r k v w u, or None.  The head size
    and the maximum number of tokens are compile-time constants."""
    from torch.utils.cpp_extension import load
    try:
        load('wkv6', [f'{folder}/wkv6_op.cpp', f'{folder}/wkv6_cuda.cu'], is_python_module=False,
             extra_cuda_cflags=['-O3', '--use_fast_math', '--extra-device-vectorization',
                                f'-D_N_={head}', '-D_T_=4096'])
    except Exception as error:
        missing.setdefault('rwkv', ' '.join(str(error).split())[-400:])
        return None

    class Wkv6(torch.autograd.Function):
        @staticmethod
        def forward(ctx, r, k, v, w, u):
            B, T, H, N = r.shape
            y = torch.empty_like(v)
            torch.ops.wkv6.forward(B, T, H * N, H, r, k, v, w, u, y)
            ctx.save_for_backward(r, k, v, w, u)
            return y

        @staticmethod
        def backward(ctx, dy):
            inputs = ctx.saved_tensors
            B, T, H, N = inputs[0].shape
            grads = [torch.empty_like(inputs[0]) for _ in range(4)]
            du = torch.empty(B, H * N, dtype=dy.dtype, device=dy.device)
            torch.ops.wkv6.backward(B, T, H * N, H, *inputs, dy.contiguous(), *grads, du)
            return *grads, du.sum(0).view(H, N)

    return Wkv6.apply


@functools.cache
def build_rwkv4(folder, T, dtype):
    """The original RWKV-4 kernel as a differentiable function of k v log_w u, or None.  The most tokens
    are compiled in.  Without a kernel for bf16 it is the one for fp32, with casts, as RWKV-4 calls it."""
    from torch.utils.cpp_extension import load
    kind = '_bf16' if dtype == torch.bfloat16 and os.path.exists(f'{folder}/wkv_cuda_bf16.cu') else ''
    own = torch.bfloat16 if kind else torch.float32
    try:
        with open(f'{folder}/wkv_op{kind}.cpp') as file:
            text = file.read()
        binding = os.path.join(tempfile.mkdtemp(), f'wkv_op{kind}.cpp')
        with open(binding, 'w') as file:  # names of operators, which no second build may use again
            file.write(text.split('TORCH_LIBRARY(')[0])
        wkv = load(f'wkv4_{T}{kind}', [binding, f'{folder}/wkv_cuda{kind}.cu'], extra_cuda_cflags=[
            '-O3', '--maxrregcount', '60', '--use_fast_math', '--extra-device-vectorization', f'-DTmax={T}'])
    except Exception as error:
        missing.setdefault('rwkv4', ' '.join(str(error).split())[-400:])
        return None
    takes_y = '&y, torch::Tensor &gy' in ' '.join(text.split())

    class Wkv4(torch.autograd.Function):
        @staticmethod
        def forward(ctx, k, v, log_w, u):
            inputs = log_w, u.to(own), k.to(own), v.to(own)
            y = torch.empty_like(inputs[3])
            wkv.forward(*k.shape, *inputs, y)
            ctx.save_for_backward(*inputs, *([y] if takes_y else []))
            return y.to(k.dtype)

        @staticmethod
        def backward(ctx, dy):
            B, T, D = dy.shape
            dw, du = (torch.empty(B, D, dtype=own, device=dy.device) for _ in range(2))
            dk, dv = (torch.empty(B, T, D, dtype=own, device=dy.device) for _ in range(2))
            wkv.backward(B, T, D, *ctx.saved_tensors, dy.to(own).contiguous(), dw, du, dk, dv)
            return dk.to(dy.dtype), dv.to(dy.dtype), dw.sum(0).float(), du.sum(0).float()

    return Wkv4.apply


def tune_anew():
    """Triton keeps the best variant of a kernel under a key that need not hold the sizes: it would
    be the best of an earlier row.  There are hundreds of variants: 10 ms for each have to do."""
    if 'triton' not in sys.modules:
        return
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench
    for tuner in gc.get_objects():
        if issubclass(type(tuner), Autotuner):
            tuner.cache.clear()
            tuner.cache_results = False
            tuner.do_bench = functools.partial(do_bench, warmup=5, rep=10)


# ---- operators -----------------------------------------------------------------------------------
# A function for each operator gives the cases: the inputs; the peers, by name, as functions of the inputs; and a check
# of forward results.  The check has the float64 reference on a part of the inputs, and picks the same part of a result.
# If the part is the whole, the case may name inputs, whose gradients are then checked, too.

class Case:
    """is_captured: the function is one of rows.  pick: the part of a gradient that belongs to the part of a result."""
    is_captured, backward_bytes = False, None

    def __init__(self, inputs, peers, reference, part, names=(), pick=lambda gradient: gradient):
        self.inputs, self.reference, self.part, self.names, self.pick = inputs, reference, part, names, pick
        self.peers = {name: peer for name, peer in peers.items() if peer}

    @functools.cached_property
    def truth(self):
        with torch.no_grad():
            return self.reference(*self.inputs)

    def error_of(self, result):
        return float((self.part(result).double() - self.truth).norm() / self.truth.norm())

    def gradient_errors(self, dy, gradients):
        """Returns two errors for each name: the plain relative error, and the error that is judged.  For a sum over
        tokens the second error is relative to the sum and the magnitudes of its terms.  To get these terms, an input
        [heads] is expanded to all tokens."""
        leaves = [(x.double() if x.dim() > 1 else x.double().expand(*dy.shape[:2], -1))
                  .requires_grad_() for x in self.inputs]
        truths = torch.autograd.grad(self.reference(*leaves), leaves, self.part(dy).double())
        errors = {}
        for name, got, truth in zip(self.names, gradients, truths):
            terms = 0
            if got.dim() == 1:
                terms, truth = truth.abs().sum((0, 1)).norm(), truth.sum((0, 1))
            difference, size = (self.pick(got).double() - self.pick(truth)).norm(), self.pick(truth).norm()
            errors[name] = float(difference / size), float(difference / (size + terms))
        return errors


def randn(*shape, dtype=torch.float32, mean=0.0, spread=1.0):
    return (torch.randn(*shape, device=DEVICE) * spread + mean).to(dtype)


def wkv6_loop(r, k, v, log_w, u):
    given, dtype = r.dtype, torch.promote_types(r.dtype, torch.float32)  # decays are near one
    r, k, v, log_w, u = (x.to(dtype) for x in (r, k, v, log_w, u))
    state = torch.zeros(*r.shape[::2], r.shape[3], v.shape[3], dtype=dtype, device=r.device)
    y = []
    for r_t, k_t, v_t, decay in zip(*(x.unbind(1) for x in (r, k, v, log_w.exp()))):
        new = k_t[..., None] * v_t[..., None, :]
        y.append(torch.einsum('bhn,bhnv->bhv', r_t, state + u[..., None] * new))
        state = decay[..., None] * state + new
    return torch.stack(y, 1).to(given)


def wkv6(n, words, dtype, options):
    B, T, H, N = n['B'], n['T'], n['H'], n['N']
    r, k, v = (randn(B, T, H, N, dtype=dtype, spread=.5) for _ in range(3))
    raw = randn(B, T, H, N, dtype=dtype, mean=-6)
    log_w, u = -raw.float().exp(), randn(H, N, dtype=dtype, spread=.5)
    chunk = find('fla', 'fla.ops.rwkv6', 'chunk_rwkv6')
    recurrent = find('fla', 'fla.ops.rwkv6', 'fused_recurrent_rwkv6')
    peers = {'fla chunk': chunk and (lambda *x: chunk(*x, scale=1.0)[0])}
    if B * H >= 128:  # it is one block per head: hopeless for few
        peers['fla recurrent'] = recurrent and (lambda *x: recurrent(*x, scale=1.0)[0])
    if T <= 256:
        peers['torch loop'] = wkv6_loop

    def reference(r, k, v, log_w, u):
        return wkv6_loop(*(x[:, :, :2].double() for x in (r, k, v, log_w)), u[:2].double())

    def part(y):
        return y[:, :, :2]

    if options.plain:
        loops = {'torch loop': wkv6_loop, 'torch loop graph': wkv6_loop} if T <= MOST_PLAIN else {}
        return [Case([r, k, v, log_w.to(dtype), u], loops, reference, part, ['r', 'k', 'v', 'log_w', 'u'],
                     lambda gradient: gradient[:, :, :2] if gradient.dim() == 4 else gradient[:2])]
    cases = [Case([r, k, v, log_w.to(dtype), u], peers, reference, part)]
    if not options.rwkv:
        missing.setdefault('rwkv', 'no folder was given')
    elif dtype == torch.bfloat16 and T <= 4096 and N == 64:
        original = {'rwkv cuda': build_rwkv(options.rwkv, N)}
        cases.append(Case([r, k, v, raw, u], original, lambda r, k, v, raw, u: reference(
            r, k, v, -raw.double().exp(), u), part))
    return cases


def wkv4_loop(k, v, log_w, u):
    given, dtype = k.dtype, torch.promote_types(k.dtype, torch.float32)
    k, v, log_w, u = (x.to(dtype) for x in (k, v, log_w, u))
    a, b, p = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e38)
    y = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1)):
        top = torch.maximum(p, u + k_t)
        state, own = (p - top).exp(), (u + k_t - top).exp()
        y.append((state * a + own * v_t) / (state * b + own))
        top = torch.maximum(p + log_w, k_t)
        state, own = (p + log_w - top).exp(), (k_t - top).exp()
        a, b, p = state * a + own * v_t, state * b + own, top
    return torch.stack(y, 1).to(given)


def wkv4(n, words, dtype, options):
    B, T, D = n['B'], n['T'], n['D']
    k, v = (randn(B, T, D, dtype=dtype) for _ in range(2))
    log_w, u = -randn(D, mean=-5).exp(), randn(D)
    peers = {'torch loop': wkv4_loop}
    if options.rwkv4:
        peers['rwkv cuda'] = build_rwkv4(options.rwkv4, T, dtype)
    else:
        missing.setdefault('rwkv4', 'no folder was given')

    def reference(k, v, log_w, u):
        return wkv4_loop(k[..., :4].double(), v[..., :4].double(), log_w[:4].double(), u[:4].double())

    return [Case([k, v, log_w, u], peers, reference, lambda y: y[..., :4])]


def ssd_chunks(x, dt, A, Bm, Cm, D, bias, z=None):
    """All of ssd in float64, in chunks of tokens.  A, D and bias are of heads, or of each token and
    head."""
    x, dt, A, Bm, Cm, D, bias = (t.double() for t in (x, dt, A, Bm, Cm, D, bias))
    (T, H, P), (G, N), size = x.shape[1:], Bm.shape[2:], 64

    def chunks(t):
        """[B, chunks, heads or groups, size, ...]; tokens beyond T are 0, which changes nothing."""
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, -T % size))
        return t.unflatten(1, (-1, size)).transpose(2, 3)

    step = F.softplus(dt + bias)
    a = chunks(step * A).unflatten(2, (G, H // G)).cumsum(-1)
    u = chunks(step[..., None] * x).unflatten(2, (G, H // G))
    Bm, Cm = chunks(Bm), chunks(Cm)
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    # masked before exp, because exp would overflow for later tokens
    decay = (a[..., :, None] - a[..., None, :]).masked_fill(later, -math.inf).exp()
    products = torch.einsum('bcgtn,bcgsn->bcgts', Cm, Bm)[:, :, :, None] * decay
    y = torch.einsum('bcgrts,bcgrsp->bcgrtp', products, u)
    end = a[..., -1:]
    added = torch.einsum('bcgrsp,bcgsn->bcgrpn', (end - a).exp()[..., None] * u, Bm)
    states = [torch.zeros_like(added[:, 0])]  # before each chunk
    for factor, more in zip(end.exp()[..., None].unbind(1), added.unbind(1)):
        states.append(factor * states[-1] + more)
    states = torch.stack(states[:-1], 1)
    y = y + a.exp()[..., None] * torch.einsum('bcgtn,bcgrpn->bcgrtp', Cm, states)
    y = y.flatten(2, 3).transpose(2, 3).flatten(1, 2)[:, :T] + D[..., None] * x
    return y if z is None else y * F.silu(z.double())


def ssd(n, words, dtype, options):
    B, T, H, P, N, G = n['B'], n['T'], n['H'], n['P'], n['N'], n.get('G', 1)
    x, dt = randn(B, T, H, P, dtype=dtype), randn(B, T, H, dtype=dtype, spread=.5)
    A = -1 - 15 * torch.rand(H, device=DEVICE)
    Bm, Cm = (randn(B, T, G, N, dtype=dtype) for _ in range(2))
    D, bias = randn(H, mean=1, spread=.3), randn(H, mean=-4, spread=.2)
    gate = [randn(B, T, H, P, dtype=dtype)] if 'z' in words else []
    scan = find('mamba_ssm', 'mamba_ssm.ops.triton.ssd_combined', 'mamba_chunk_scan_combined')

    def chunked(size):
        return scan and (lambda x, dt, A, Bm, Cm, D, bias, z=None: scan(
            x, dt, A, Bm, Cm, size, D=D, z=z, dt_bias=bias, dt_softplus=True))

    peers = {f'mamba_ssm chunk {size}': chunked(size) for size in (128, 256)}
    return [Case([x, dt, A, Bm, Cm, D, bias, *gate], peers, ssd_chunks, lambda y: y,
                 ['x', 'dt', 'A', 'B', 'C', 'D', 'dt_bias', 'z'][:7 + len(gate)])]


def selective_scan(n, words, dtype, options):
    B, T, D, N = n['B'], n['T'], n['D'], n['N']
    u, dt = randn(B, D, T, dtype=dtype), randn(B, D, T, dtype=dtype, spread=.5)
    A = -1 - 15 * torch.rand(D, N, device=DEVICE)
    Bm, Cm = (randn(B, 1, N, T, dtype=dtype) for _ in range(2))
    skip, bias = randn(D, mean=1, spread=.3), randn(D, mean=-4, spread=.2)
    gate = [randn(B, D, T, dtype=dtype)] if 'z' in words else []
    scan = find('mamba_ssm', 'mamba_ssm.ops.selective_scan_interface', 'selective_scan_fn')

    def reference(u, dt, A, Bm, Cm, skip, bias, z=None):
        u, dt = u[:, :4].double(), dt[:, :4].double()
        A, skip, bias = A[:4].double(), skip[:4].double(), bias[:4].double()
        Bm, Cm = Bm[:, 0].double(), Cm[:, 0].double()
        step, y = F.softplus(dt + bias[:, None]), []
        state = torch.zeros(B, 4, N, dtype=torch.float64, device=DEVICE)
        for t in range(T):
            state = (step[:, :, t, None] * A).exp() * state + (
                step[:, :, t] * u[:, :, t])[..., None] * Bm[:, None, :, t]
            y.append((state * Cm[:, None, :, t]).sum(-1) + skip * u[:, :, t])
        y = torch.stack(y, 2)
        return y if z is None else y * F.silu(z[:, :4].double())

    peers = {'mamba_ssm cuda': scan and (lambda u, dt, A, Bm, Cm, skip, bias, z=None: scan(
        u, dt, A, Bm, Cm, skip, z, bias, True))}
    return [Case([u, dt, A, Bm, Cm, skip, bias, *gate], peers, reference, lambda y: y[:, :4])]


def conv1d(n, words, dtype, options):
    B, T, D, W = n['B'], n['T'], n['D'], n['W']
    x = randn(B, D, T, dtype=dtype)
    if 'BTD' in words:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = randn(D, W, dtype=dtype), randn(D, dtype=dtype)
    conv = find('causal_conv1d', 'causal_conv1d', 'causal_conv1d_fn')

    def torch_conv(x, weight, bias):
        return F.silu(F.conv1d(x, weight[:, None], bias, padding=W - 1, groups=D)[..., :T])

    def reference(x, weight, bias):
        x = F.pad(x[:, :4].double(), (W - 1, 0))
        return F.silu(F.conv1d(x, weight[:4, None].double(), bias[:4].double(), groups=4))

    peers = {'torch': torch_conv, 'causal_conv1d': conv and (
        lambda x, weight, bias: conv(x, weight, bias, activation='silu'))}
    return [Case([x, weight, bias], peers, reference, lambda y: y[:, :4])]


def compiled(function):
    """Forgets what was compiled before: PyTorch compiles a function for at most 8 shapes, and then runs it as it is."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


class RowCase(Case):
    """A function of rows, with its inputs by name.  Its error is the largest of its outputs, of all rows.
    backward_bytes: what backward must read and write, unless that is all inputs and the gradients of all tensors."""
    is_captured = True

    def __init__(self, named, function, more=None, backward_bytes=None):
        inputs, self.backward_bytes = list(named.values()), backward_bytes
        everywhere = {'torch': function, 'torch.compile': compiled(function), **(more or {})}
        super().__init__(inputs, everywhere, function, None, list(named))

    def check(self, peer):
        """The error of results, and by name the error of each gradient, which counts itself."""
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        exact = [x.detach().double().requires_grad_() for x in self.inputs]
        results, truths = together(peer(*leaves)), together(self.reference(*exact))
        given = [torch.randn_like(y) for y in results]
        pairs = list(zip(results, truths))
        gradients = (torch.autograd.grad(ys, xs, [dy.to(ys[0].dtype) for dy in given])
                     for ys, xs in ((results, leaves), (truths, exact)))
        errors = [error_between(got, truth) for got, truth in zip(*gradients)]
        return largest(error_between(*pair) for pair in pairs), {
            name: (error, error) for name, error in zip(self.names, errors)}


def together(result):
    return result if isinstance(result, tuple) else (result,)


def error_between(got, truth):
    return float((got.detach().double() - truth.detach()).norm() / truth.detach().norm())


def largest(errors):
    return float(torch.tensor(list(errors)).max())  # NaN stays


def own(name):
    """The function of gt_kernels.torch, or None."""
    return find('gt_kernels', 'gt_kernels.torch', name)


def rmsnorm_linear(n, words, dtype, options):
    M, D, O = n['M'], n['D'], n['O']
    norm = 'layer' if 'layer' in words else 'rms'
    fla = find('fla', 'fla.modules.layernorm', 'layer_norm_linear' if norm == 'layer' else 'rms_norm_linear')
    gt = own('rmsnorm_linear')

    def function(x, gamma, weight):
        normed = F.rms_norm(x, (D,), gamma, 1e-5) if norm == 'rms' else F.layer_norm(x, (D,), gamma, None, 1e-5)
        return F.linear(normed, weight)

    named = {'x': randn(M, D, dtype=dtype), 'gamma': randn(D, dtype=dtype, mean=1, spread=.3),
             'weight': randn(O, D, dtype=dtype, spread=.03)}
    return [RowCase(named, function, {
        'fla': fla and (lambda x, gamma, weight: fla(x, gamma, None, weight, None, eps=1e-5)),
        'gt_kernels.torch': gt and (lambda x, gamma, weight: gt(x, weight, gamma, norm=norm))})]


def norm_mix(n, words, dtype, options):
    M, D = n['M'], n['D']
    gt = own('norm_mix')

    def function(a, b, residual, gain_a, gain_b):
        return residual + F.rms_norm(a, (D,), gain_a, 1e-5) + F.rms_norm(b, (D,), gain_b, 1e-5)

    named = {name: randn(M, D, dtype=dtype) for name in ('a', 'b', 'residual')}
    named.update({name: randn(D, dtype=dtype, mean=1, spread=.3) for name in ('gain_a', 'gain_b')})
    return [RowCase(named, function, {'gt_kernels.torch': gt and (
        lambda a, b, residual, gain_a, gain_b: gt(a, b, gain_a, gain_b, residual))})]


def norm_gate(n, words, dtype, options):
    M, D = n['M'], n['D']
    gt = own('norm_gate')
    named = {'x': randn(M, D, dtype=dtype), 'z': randn(M, D, dtype=dtype),
             'gamma': randn(D, dtype=dtype, mean=1, spread=.3)}
    if 'RMS' in words:
        gated = find('mamba_ssm', 'mamba_ssm.ops.triton.layernorm_gated', 'rmsnorm_fn')

        def rms(x, z, gamma):
            return F.rms_norm(x * F.silu(z), (D,), gamma, 1e-5)

        return [RowCase(named, rms, {
            'mamba_ssm': gated and (lambda x, z, gamma: gated(x, gamma, None, z=z, eps=1e-5, norm_before_gate=False)),
            'gt_kernels.torch': gt and (lambda x, z, gamma: gt(x, z, gamma, gate_first=True))})]
    count = D // int(words[-1])

    def heads(x, z, gamma, beta):
        return F.group_norm(x, count, gamma, beta, 64e-5) * F.silu(z)

    return [RowCase({**named, 'beta': randn(D, dtype=dtype)}, heads, {'gt_kernels.torch': gt and (
        lambda x, z, gamma, beta: gt(x, z, gamma, beta, norm='layer', heads=count, eps=64e-5))})]


def add_norm(n, words, dtype, options):
    """Two results, y and the sum; backward gets the gradients of both.  It can do with the sum in place of x and
    residual, and both have the same gradient.  Rows "inputs" have no peers of their own."""
    if 'inputs' in words:
        return []
    M, D = n['M'], n['D']
    gt = own('add_norm')

    def function(x, residual, gamma):
        total = x + residual
        return F.rms_norm(total, (D,), gamma, 1e-5), total

    named = {'x': randn(M, D, dtype=dtype), 'residual': randn(M, D, dtype=dtype),
             'gamma': randn(D, dtype=dtype, mean=1, spread=.3)}
    moved = 4 * bytes_of([named['x']]) + 2 * bytes_of([named['gamma']])
    return [RowCase(named, function, {'gt_kernels.torch': gt and (
        lambda x, residual, gamma: gt(x, residual, gamma, reads_sum=True))}, moved)]


OPERATORS = {f.__name__: f for f in (wkv6, wkv4, ssd, selective_scan, conv1d, rmsnorm_linear, norm_mix,
                                     norm_gate, add_norm)}


# ---- measuring -----------------------------------------------------------------------------------

class Clock:
    FLUSH_MS = .03  # at least, on any GPU of today
    MOST_FLUSHES = 200

    def __init__(self):
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def once(self, run, before, flushes):
        """ms that the GPU takes, and ms that the host takes to enqueue it."""
        before()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            self.flush.zero_()
        start.record()
        begin = time.perf_counter()
        run()
        host_ms = (time.perf_counter() - begin) * 1e3
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop), host_ms

    def median(self, run, before=lambda: None, is_quick=False):
        flushes = 1
        for _ in range(WARM_UPS):
            last, host_ms = self.once(run, before, flushes)
            flushes = min(1 + math.ceil(host_ms / self.FLUSH_MS), self.MOST_FLUSHES)
        runs = 1 if is_quick else int(min(max(BUDGET_MS / last, LEAST_RUNS), MOST_RUNS))
        return statistics.median(self.once(run, before, flushes)[0] for _ in range(runs))

    def copy_bandwidth(self):
        source = torch.ones(1 << 30, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.median(lambda: target.copy_(source))  # bytes per ms


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def peak_of(run):
    """The result of run, and the bytes that were in use at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def time_peer(clock, case, peer, is_quick):
    """Per pass (ms, compulsory bytes, relative error, extra bytes); and Case.gradient_errors."""
    plain = case.inputs
    leaves = [x.detach().requires_grad_(True) for x in plain]

    def no_grad():
        with torch.no_grad():
            return peer(*plain)

    def backward():
        y.backward(dy, retain_graph=True)

    def forget():
        for x in leaves:
            x.grad = None

    y = no_grad()  # tunes: not to be in a peak
    error, dy = case.error_of(y), torch.randn_like(y)
    y = peer(*leaves)
    backward()
    gradients = bytes_of(leaves)
    size = bytes_of(plain) + bytes_of([y])
    y = None
    forget()

    needed = torch.cuda.memory_allocated() + bytes_of([dy])  # all of a forward call, with y
    y, peak = peak_of(no_grad)
    y, result = None, {}
    result['inf'] = clock.median(no_grad, is_quick=is_quick), size, error, peak - needed
    y, peak = peak_of(lambda: peer(*leaves))
    result['fwd'] = (clock.median(lambda: peer(*leaves), is_quick=is_quick), size, error,
                     peak - needed)
    _, peak = peak_of(backward)
    ms = clock.median(backward, forget, is_quick)
    y, error, errors = None, math.nan, {}
    if case.names:  # after all that is measured: it takes much memory
        errors = case.gradient_errors(dy, [x.grad for x in leaves])
        error = float(torch.tensor([counts for _, counts in errors.values()]).max())  # NaN stays
    result['bwd'] = ms, size + gradients, error, peak - needed - gradients
    return result, errors


def capture(call, stream):
    """A CUDA graph of the call on the stream.  What a backward call reads must have been made on the same stream."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def time_captured(clock, case, peer, is_quick):
    """time_peer for a peer whose calls are captured.  A function of rows is compared with float64 before."""
    plain, stream = case.inputs, torch.cuda.Stream()
    leaves = [x.detach().requires_grad_(True) for x in plain]
    if case.is_captured:
        error, errors = case.check(peer)
        limit = LIMITS[plain[0].dtype]
        for name, found in (('result', error), *((name, counts) for name, (_, counts) in errors.items())):
            if not found <= limit:
                raise ArithmeticError(f'{name}: error {found:.1e} against float64, more than {limit:.0e}')

    def no_grad():
        with torch.no_grad():
            return peer(*plain)

    def backward():
        return torch.autograd.grad(results, leaves, given, retain_graph=True)

    with torch.cuda.stream(stream):
        results = together(no_grad())
        given = [torch.randn_like(y) for y in results]
    torch.cuda.synchronize()
    if not case.is_captured:
        error, errors = case.error_of(results[0]), {}
    size = bytes_of(plain) + bytes_of(results)
    gradients = bytes_of(leaves)
    results, needed = None, torch.cuda.memory_allocated() + bytes_of(given)  # all of a forward call, with its results
    result, peaks = {}, {}
    with torch.cuda.stream(stream):
        results, peaks['inf'] = peak_of(no_grad)
        results = None
        results, peaks['fwd'] = peak_of(lambda: together(peer(*leaves)))
        made, peaks['bwd'] = peak_of(backward)
    if not case.is_captured:
        errors = case.gradient_errors(given[0], made)
    made = None
    peaks['bwd'] -= gradients
    counts = {'inf': error, 'fwd': error, 'bwd': largest(counts for _, counts in errors.values())}
    for name, call in (('bwd', backward), ('inf', no_grad), ('fwd', lambda: peer(*leaves))):
        if name == 'inf':
            results = None  # it holds the memory that forward saved
        graph = capture(call, stream)
        ms = clock.median(graph.replay, is_quick=is_quick)
        graph = None
        torch.cuda.empty_cache()
        moved = size if name != 'bwd' else case.backward_bytes or size + gradients
        result[name] = ms, moved, counts[name], peaks[name] - needed
    return result, errors


# ---- steps of one token --------------------------------------------------------------------------
# Each function gives the peer, its call, the state that the call updates, the other tensors, and the float64 result.
# States are fp32, except causal_conv1d's, which have the dtype of activations.

def ssd_step(n, dtype):
    """A, dt, D and dt_bias are expanded over rows and columns, as mamba_ssm's clients expand them."""
    B, H, P, N, G = n['B'], n['H'], n['P'], n['N'], n.get('G', 1)
    update = find('mamba_ssm', 'mamba_ssm.ops.triton.selective_state_update',
                  'selective_state_update')
    state, x = randn(B, H, P, N), randn(B, H, P, dtype=dtype)
    dt, Bm, Cm = randn(B, H, dtype=dtype), randn(B, G, N, dtype=dtype), randn(B, G, N, dtype=dtype)
    A, skip, bias = -randn(H).exp(), randn(H), randn(H)
    wide = [dt[:, :, None].expand(B, H, P), A[:, None, None].expand(H, P, N), Bm, Cm,
            skip[:, None].expand(H, P), bias[:, None].expand(H, P)]

    def truth(h):
        step = F.softplus(dt.double() + bias)
        b, c = (t.double().repeat_interleave(H // G, 1)[:, :, None] for t in (Bm, Cm))
        h = h * (step * A)[..., None, None].exp() + (step[..., None] * x)[..., None] * b
        return (h * c).sum(-1) + skip[:, None] * x

    return ('mamba_ssm', update and (lambda: update(state, x, *wide[:5], None, wide[5], True)), state,
            [x, dt, A, Bm, Cm, skip, bias], truth)


def selective_scan_step(n, dtype):
    B, D, N = n['B'], n['D'], n['N']
    update = find('mamba_ssm', 'mamba_ssm.ops.triton.selective_state_update',
                  'selective_state_update')
    state, x, dt = randn(B, D, N), randn(B, D, dtype=dtype), randn(B, D, dtype=dtype)
    Bm, Cm = randn(B, N, dtype=dtype), randn(B, N, dtype=dtype)
    A, skip, bias = -randn(D, N).exp(), randn(D), randn(D)

    def truth(h):
        step = F.softplus(dt.double() + bias)[..., None]
        h = h * (step * A).exp() + step * x[..., None] * Bm[:, None].double()
        return (h * Cm[:, None]).sum(-1) + skip * x

    return ('mamba_ssm', update and (lambda: update(state, x, dt, A, Bm, Cm, skip, None, bias, True)),
            state, [x, dt, A, Bm, Cm, skip, bias], truth)


def conv1d_step(n, dtype):
    B, D, W = n['B'], n['D'], n['W']
    update = find('causal_conv1d', 'causal_conv1d', 'causal_conv1d_update')
    state, x = randn(B, D, W, dtype=dtype), randn(B, D, dtype=dtype)
    weight, bias = randn(D, W, dtype=dtype), randn(D, dtype=dtype)

    def truth(h):
        rows = torch.cat([h[..., 1:].double(), x[..., None].double()], -1)
        return F.silu((rows * weight).sum(-1) + bias)

    return ('causal_conv1d', update and (lambda: update(x, state, weight, bias, 'silu')), state,
            [x, weight, bias], truth)


STEPS = {'ssd': ssd_step, 'selective_scan': selective_scan_step, 'conv1d': conv1d_step}


def time_step(clock, op, sizes, dtype, is_quick, bandwidth, row, write):
    """A call is captured in a CUDA graph, as gt_bench captures steps; a replay is timed."""
    name, call, state, others, truth = STEPS[op](sizes, dtype)
    if not call:
        return
    expected = truth(state.double())
    y = call()  # compiles
    error = float((y.double() - expected).norm() / expected.norm())
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        call()
    size = bytes_of(others) + 2 * bytes_of([state]) + bytes_of([y])
    ms = clock.median(graph.replay, is_quick=is_quick)
    write(f'{op},step,{name},{row[0]},{row[1]},{ms:.4f},{size / bandwidth:.6f},{error:.3e},0.000')


# ---- rows ----------------------------------------------------------------------------------------

def read_rows(file):
    """(op, dtype, shape) -> passes, of the rows of the kernels."""
    rows = {}
    for line in file:
        field = line.strip().split(',')
        if len(field) >= 5 and field[2] == 'gt':
            rows.setdefault((field[0], field[3], field[4]), []).append(field[1])
    return rows


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', metavar='FILE', help='file with the rows to time; default: standard input')
    parser.add_argument('--csv', metavar='FILE', help='write the rows to FILE too')
    parser.add_argument('--filter', metavar='TEXT', default='',
                        help="time only rows that contain every word of TEXT, for example 'wkv6 bf16'")
    parser.add_argument('--quick', action='store_true', help='one timed run per row')
    parser.add_argument('--plain', action='store_true', help='time only wkv6, as loops over tokens in PyTorch')
    parser.add_argument('--check', action='store_true',
                        help='time nothing; compare with float64 on the CPU, in small sizes')
    parser.add_argument('--rwkv', metavar='FOLDER', help='folder with the sources of the original WKV6 kernel')
    parser.add_argument('--rwkv4', metavar='FOLDER', help='folder with the sources of the original RWKV-4 kernel')
    return parser.parse_args()


def run_row(clock, case, peer, is_quick, bandwidth, row, passes, write):
    op, name, dtype, shape = row
    measure = time_captured if case.is_captured or name.endswith(' graph') else time_peer
    try:
        result, errors = measure(clock, case, peer, is_quick)
    except Exception as error:  # the other peers are still worth their time
        text = ' '.join(f'{type(error).__name__}: {error}'.split())[:150]
        write(f'# failed: {op},{name},{dtype},{shape}: {text}')
        return
    for p in passes:
        ms, size, error, extra = result[p]
        write(f'{op},{p},{name},{dtype},{shape},{ms:.4f},{size / bandwidth:.6f},{error:.3e},'
              f'{max(extra, 0) / 2**20:.3f}')
    if errors and 'bwd' in passes:
        text = ' '.join(f'{key} {plain:.1e}' + (f' ({counts:.1e})' if counts != plain else '')
                        for key, (plain, counts) in errors.items())
        write(f'# gradients: {op},{name},{dtype},{shape}: {text}')


def cases_of(op, dtype, shape, options, most=None):
    """most: a limit of each size that is no number of channels."""
    words = shape.split()
    sizes = {letter: int(n) for letter, n in re.findall(r'\b([A-Z])(\d+)\b', shape)}
    if most:
        sizes = {letter: min(n, most.get(letter, n)) for letter, n in sizes.items()}
    return OPERATORS[op](sizes, words, DTYPES[dtype], options)


def is_wanted(options, op, dtype, shape, passes):
    words = f'{op} {dtype} {shape}'.split()
    return (set(options.filter.split()) <= set(words + passes) and op in OPERATORS and 'packed' not in words and
            (op == 'wkv6' or not options.plain))


def check(options, rows):
    """--check: the number of functions whose error is beyond its limit."""
    failed = done = 0
    for (op, dtype, shape), passes in rows.items():
        options.plain = op == 'wkv6'  # on a CPU, only the loop runs
        if ('step' in passes or op not in ('wkv6', 'rmsnorm_linear', 'norm_mix', 'norm_gate', 'add_norm') or
                not is_wanted(options, op, dtype, shape, passes)):
            continue
        for case in cases_of(op, dtype, shape, options, {'B': 2, 'T': 24, 'H': 3, 'M': 64, 'O': 256}):
            for name, peer in case.peers.items():
                if name in WHERE:  # Triton needs a GPU
                    continue
                if case.is_captured:
                    error, errors = case.check(peer)
                else:
                    leaves = [x.detach().requires_grad_(True) for x in case.inputs]
                    y = peer(*leaves)
                    dy = torch.randn_like(y)
                    error = case.error_of(y.detach())
                    errors = case.gradient_errors(dy, torch.autograd.grad(y, leaves, dy))
                worst = largest([error, *(counts for _, counts in errors.values())])
                is_right = worst <= LIMITS[DTYPES[dtype]]
                failed, done = failed + (not is_right), done + 1
                print(f'{"ok" if is_right else "FAIL"}: {op},{name},{dtype},{shape}: {worst:.1e}', flush=True)
    print(f'{done} compared, {failed} wrong')
    return failed


def main():
    global DEVICE
    options = parse_options()
    with open(options.rows) if options.rows else sys.stdin as file:
        rows = read_rows(file)
    if not rows:
        sys.exit("there are no rows to time: give the output of 'gt_bench --list' on standard input, or in --rows")
    torch.manual_seed(0)
    functorch = importlib.import_module('torch._functorch.config')
    if hasattr(functorch, 'donated_buffer'):
        functorch.donated_buffer = False  # backward runs several times on what one forward saved
    if options.check:
        DEVICE = 'cpu'
        sys.exit(1 if check(options, rows) else 0)
    if not torch.cuda.is_available():
        sys.exit('PyTorch finds no GPU')
    out = open(options.csv, 'w') if options.csv else open(os.devnull, 'w')

    def write(line):
        print(line, flush=True)
        print(line, file=out, flush=True)

    clock = Clock()
    bandwidth = clock.copy_bandwidth()
    gpu = torch.cuda.get_device_name()
    write(f'# gpu: {gpu}; copies {bandwidth * 1e-6:.1f} GB/s, read + written')
    write(f'# torch: {torch.__version__}, CUDA {torch.version.cuda}')
    write('# launched: steps, functions of rows and "torch loop graph" as a CUDA graph; other calls kernel by kernel, '
          'behind a flush of the L2')
    write('op,pass,impl,dtype,shape,ms,floor_ms,rel_err,mem_mib')
    for (op, dtype, shape), passes in rows.items():
        if not is_wanted(options, op, dtype, shape, passes):
            continue
        sizes = {letter: int(n) for letter, n in re.findall(r'\b([A-Z])(\d+)\b', shape)}
        if 'step' in passes:
            if op in STEPS and sizes['T'] == 1 and not options.plain:
                time_step(clock, op, sizes, DTYPES[dtype], options.quick, bandwidth, (dtype, shape),
                          write)
            continue
        cases = cases_of(op, dtype, shape, options)
        tune_anew()
        for case in cases:
            for name, peer in case.peers.items():
                row = (op, name, dtype, shape)
                run_row(clock, case, peer, options.quick, bandwidth, row, passes, write)
                torch.cuda.empty_cache()
    for peer, why in missing.items():
        print(f'not timed: {peer} ({why}); {WHERE[peer]}', file=sys.stderr)


if __name__ == '__main__':
    main()
