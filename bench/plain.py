#!/usr/bin/env python3
"""Times whole models in plain PyTorch operations, beside the same models on gt_kernels.torch, on a GPU:

    python3 bench/plain.py --csv plain.csv
    python3 bench/plain.py --models 'HY,Mamba-2 130M'
    python3 bench/plain.py --check                          compares on a CPU, in small sizes, without times

The plain operations are those of python/examples/plain.py, whose recurrences are loops over tokens.  Both sides have
the same module and the same weights; only its operators change.  Before anything is timed, both sides run on a short
text in fp32, and their logits are compared; if the model also trains, so are their gradients.  Models that differ
give a comment, and no time.  bench/peers.py --plain times only wkv6.

inf is a forward call under no_grad, with matrices in bf16.  fwd+bwd computes the loss and its gradient, and step also
runs AdamW; both have weights in fp32 under autocast to bf16.  latency_ms is the median of up to 10 runs, or of fewer if
these take over 20 seconds.  peak_mib is the most memory that PyTorch's tensors had at once.  The column launch says how
kernels start: eager means one by one from Python, graph means the replay of a CUDA graph.  A plain loop over 2048
tokens has up to millions of launches.  The host takes longer for them than the GPU computes, so its eager row is a time
of the host.

hybrid_train times its own side of the first three models, whose parameters have the same sizes:
    hybrid_train --device cuda --model HY --batch 8 --bench 256
    hybrid_train --device cuda --model RWKV-6 --hidden 2048 --layers 24 --head-size 64 --batch 1 --bench 2048
    hybrid_train --device cuda --model HY --hidden 2048 --layers 24 --head-size 64 --batch 1 --bench 2048"""
import argparse
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'python', 'examples'))
import hybrid  # noqa: E402
import plain  # noqa: E402

SHORT = 64              # tokens of the comparison
MOST_RUNS, BUDGET_S = 10, 20
MOST_NODES = 8192       # layers x tokens of the longest plain loop that is captured; a token takes about 20 nodes
LIMIT = 1e-3            # of differences in fp32
LIMIT_MIXED = 5e-2      # the same in bf16, of the small models of --check
HEADING = ('model,device,dtype,pass,batch,seq,parameters,tokens_per_s,tokens_per_s_per_parameter,latency_ms,peak_mib,'
           'kb_per_token,tokens_per_s_per_1000_parameters,deviation_ms,impl,launch,difference')


# ---- models --------------------------------------------------------------------------------------

class Rwkv(nn.Module):
    """A layer of the model RWKV-6 of hybrid_train: time mixing and an FFN."""

    def __init__(self, ops, C, heads):
        super().__init__()
        self.ops, self.norm, self.rwkv, self.ffn = ops, hybrid.vector(C, 1), hybrid.TimeMix(ops, C, heads), nn.Module()
        self.ffn.norm, self.ffn.up = hybrid.vector(C, 1), hybrid.matrix(4 * C, C)
        self.ffn.down = hybrid.matrix(C, 4 * C)

    def forward(self, x):
        x = x + self.rwkv(self.ops.norm_gate(x, None, self.norm))
        up = self.ops.rmsnorm_linear(x, self.ffn.up, self.ffn.norm)
        return x + F.linear(F.gelu(up, approximate='tanh'), self.ffn.down)


class Mamba2(nn.Module):
    """A layer of a Mamba-2 model: one block, and no FFN."""

    def __init__(self, ops, C, head, state):
        super().__init__()
        self.ops, self.norm, self.mixer = ops, hybrid.vector(C, 1), hybrid.Mamba(ops, C, 2 * C // head, state)

    def forward(self, x):
        return x + self.mixer(self.ops.norm_gate(x, None, self.norm))


def stack(ops, vocabulary, C, layers):
    """hybrid.Hybrid with other layers."""
    model = hybrid.Hybrid(ops, vocabulary, C, 0)
    model.layers = nn.ModuleList(layers)
    return model


# By name: a function of the operators, and of a divisor of its width; batch; lengths in tokens; passes.  HY has the
# vocabulary of the text that ships.  Widths and layers of Mamba-2 are those of its paper, arXiv:2405.21060, table 9.
INFERENCE, TRAINING = ('inf',), ('inf', 'fwd+bwd', 'step')


def hy(C, layers, head):
    return lambda ops, part: hybrid.Hybrid(ops, 62, C // part, max(layers // part, 1), C // head, 2 * C // 64)


def rwkv6(C, layers):
    return lambda ops, part: stack(ops, 62, C // part, [Rwkv(ops, C // part, C // 64)
                                                        for _ in range(max(layers // part, 1))])


def mamba2(C, layers):
    return lambda ops, part: stack(ops, 50288 // part // part, C // part, [
        Mamba2(ops, C // part, 64 // part, 128) for _ in range(max(layers // part, 1))])


MODELS = {
    'HY': (hy(128, 8, 32), 8, (256,), TRAINING),
    'RWKV-6 24x2048': (rwkv6(2048, 24), 1, (2048,), TRAINING),
    'HY 24x2048': (hy(2048, 24, 64), 1, (2048,), TRAINING),
    'Mamba-2 130M': (mamba2(768, 24), 1, (2048,), TRAINING),
    'Mamba-2 1.4B': (mamba2(2048, 48), 1, (2048,), INFERENCE),
    'Mamba-2 2.8B': (mamba2(2560, 64), 1, (2048, 8192), INFERENCE),
}


def set_ops(model, ops):
    for module in model.modules():
        if hasattr(module, 'ops'):
            module.ops = ops


def shrink_matrices(model):
    """Puts matrices of products into bf16, as inference has them."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name.rsplit('.', 1)[-1] not in ('conv_weight', 'bonus'):
            weight.data = weight.data.to(torch.bfloat16)


# ---- comparing -----------------------------------------------------------------------------------

def relative(got, right):
    return float((got.double() - right.double()).norm() / right.double().norm())


def difference(model, sides, tokens, passes, is_mixed):
    """The largest relative difference of both sides' logits and, if the model trains, of their gradients together."""
    found = []
    for ops in sides:
        set_ops(model, ops)
        with torch.autocast(tokens.device.type, torch.bfloat16, is_mixed):
            with torch.no_grad():
                logits = model(tokens[:, :-1]).float()
            gradient = torch.zeros(1)
            if 'fwd+bwd' in passes:
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
                gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        found.append((logits, gradient))
    (logits, gradient), (right, right_gradient) = found
    differences = [relative(logits, right)]
    if 'fwd+bwd' in passes:
        differences.append(relative(gradient, right_gradient))
    return float(torch.tensor(differences).max())  # NaN stays


# ---- timing --------------------------------------------------------------------------------------

def pass_of(name, model, tokens, optimizer, caches):
    """The pass as a function without arguments.  caches: autocast keeps the weights it has converted."""
    def inference():
        with torch.no_grad(), torch.autocast('cuda', torch.bfloat16, cache_enabled=caches):
            return model(tokens[:, :-1])

    def gradient():
        for weight in model.parameters():
            weight.grad = None
        with torch.autocast('cuda', torch.bfloat16, cache_enabled=caches):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()

    def step():
        gradient()
        optimizer.step()

    return {'inf': inference, 'fwd+bwd': gradient, 'step': step}[name]


def captured(call):
    """A replay of the call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def timed(call):
    """Milliseconds of up to 10 runs, by the GPU's clock.  The caller has warmed up."""
    times, begin = [], time.monotonic()
    while not times or (len(times) < MOST_RUNS and time.monotonic() - begin < BUDGET_S):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def row(name, pass_, shape, parameters, times, peak, impl, launch, differs):
    ms, tokens = statistics.median(times), shape[0] * shape[1]
    rate, mib = tokens / ms * 1e3, peak / 2**20
    return (f'{name},cuda,bf16,{pass_},{shape[0]},{shape[1]},{parameters},{rate:.6g},{rate / parameters:.6g},{ms:.4f},'
            f'{mib:.1f},{mib * 1024 / tokens:.3f},{rate / parameters * 1e3:.4g},{statistics.pstdev(times):.4f},{impl},'
            f'{launch},{differs:.1e}')


def time_side(write, name, model, pass_, shape, impl, launch, differs):
    tokens = torch.randint(model.embedding.shape[0], (shape[0], shape[1] + 1), device='cuda')
    parameters = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 0.0, betas=(0.9, 0.95), fused=True) if pass_ == 'step' else None
    label = f'{name},{pass_},{impl},{launch},{shape[0]} x {shape[1]}'
    try:
        warm = tokens if launch == 'graph' or impl != 'plain PyTorch' else tokens[:, :SHORT + 1]
        pass_of(pass_, model, warm, optimizer, launch == 'eager')()
        call = pass_of(pass_, model, tokens, optimizer, launch == 'eager')
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if launch == 'graph':
            call = captured(call)
            peak = torch.cuda.max_memory_allocated()  # a replay allocates nothing
            call()
        times = timed(call)
        peak = peak if launch == 'graph' else torch.cuda.max_memory_allocated()
        write(row(name, pass_, shape, parameters, times, peak, impl, launch, differs))
    except torch.cuda.OutOfMemoryError as error:
        write(f'# failed: {label}: out of memory: {" ".join(str(error).split())[:120]}')
    except Exception as error:  # the other rows are still worth their time
        write(f'# failed: {label}: {type(error).__name__}: {" ".join(str(error).split())[:200]}')
    for weight in model.parameters():
        weight.grad = None


def launches(impl, model, shape, pass_):
    if pass_ == 'step' or (impl == 'plain PyTorch' and len(model.layers) * shape[1] > MOST_NODES):
        return ['eager']
    return ['eager', 'graph']


def time_model(write, name, sides):
    make, batch, lengths, passes = MODELS[name]
    torch.manual_seed(0)
    for kind in (INFERENCE, tuple(p for p in passes if p not in INFERENCE)):
        if not kind:
            continue
        with torch.device('cuda'):
            model = make(plain, 1)
        short = torch.randint(model.embedding.shape[0], (batch, SHORT + 1), device='cuda')
        differs = difference(model, list(sides.values()), short, kind, False)
        if not differs <= LIMIT:
            write(f'# failed: {name},{"/".join(kind)}: the sides differ by {differs:.1e}')
            continue
        if kind == INFERENCE:
            shrink_matrices(model)
        for length in lengths:
            for pass_ in kind:
                for impl, ops in sides.items():
                    set_ops(model, ops)
                    for launch in launches(impl, model, (batch, length), pass_):
                        time_side(write, name, model, pass_, (batch, length), impl, launch, differs)
                        torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()


def check(names, sides):
    """--check: the number of models whose sides differ."""
    failed = 0
    for name in names:
        make, batch, _, passes = MODELS[name]
        torch.manual_seed(0)
        model = make(plain, 8)
        tokens = torch.randint(model.embedding.shape[0], (min(batch, 2), 25))
        in_fp32 = difference(model, list(sides.values()), tokens, passes, False)
        shrink_matrices(model)
        mixed = difference(model, list(sides.values()), tokens, INFERENCE, True)
        is_right = in_fp32 <= 1e-4 and mixed <= LIMIT_MIXED
        failed += not is_right
        print(f'{"ok" if is_right else "FAIL"}: {name}: fp32 {in_fp32:.1e}, bf16 {mixed:.1e}', flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', metavar='A,B', default=','.join(MODELS), help='of: ' + ', '.join(MODELS))
    parser.add_argument('--csv', metavar='FILE', help='write the rows to FILE too')
    parser.add_argument('--check', action='store_true', help='compare both sides on the CPU, in small sizes')
    options = parser.parse_args()
    names = options.models.split(',')
    for name in names:
        if name not in MODELS:
            parser.error(f'--models: {name!r} is none of {", ".join(MODELS)}')
    import gt_kernels.torch as gt
    sides = {'gt_kernels.torch': gt, 'plain PyTorch': plain}
    if options.check:
        sys.exit(1 if check(names, sides) else 0)
    if not torch.cuda.is_available():
        sys.exit('PyTorch finds no GPU')
    out = open(options.csv, 'w') if options.csv else open(os.devnull, 'w')

    def write(line):
        print(line, flush=True)
        print(line, file=out, flush=True)

    write(f'# gpu: {torch.cuda.get_device_name()}; torch: {torch.__version__}, CUDA {torch.version.cuda}')
    write(HEADING)
    for name in names:
        time_model(write, name, sides)


if __name__ == '__main__':
    main()
