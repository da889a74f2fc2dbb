#!/usr/bin/env python3
"""Times transformers' Mamba-2 model of 130M parameters on a GPU, on gt_kernels and on mamba_ssm with causal_conv1d:

    python3 bench/mamba2_130m.py --csv mamba2_130m.csv
    python3 bench/mamba2_130m.py --check                        a small model on a CPU: compares, times nothing

Each implementation runs in a process of its own, because transformers binds its functions when it is imported:

    gt_kernels     gt_kernels.compat.install(): transformers' model, unchanged
    mamba_ssm      the same model on the packages mamba_ssm and causal_conv1d
    gt_kernels.nn  the model of python/examples/mamba2.py, only for decoding

All have the same random weights.  Before anything is timed, the logits of a text and the gradient of its loss are
compared with those of transformers' plain code.  An implementation that differs by more than LIMIT is not timed; a
comment names it.  The check uses fp32 and 4 layers, because random weights enlarge differences: 24 layers in bf16
differ by a third of the logits.

step is a training step: autocast to bf16, loss, gradient and AdamW.  inf is a forward call in bf16 under no_grad.
decode is one token of greedy generation in bf16: the time of generate() with 65 new tokens less its time with one, over
64.  latency_ms is the median of the runs.  kernels is the number of kernels in a layer per token of decoding, from
PyTorch's profiler: the difference between models of 24 and of 12 layers, over 12.  peak_mib is the most memory that
PyTorch's tensors had at once.

--peers names a folder with mamba_ssm and causal_conv1d, because transformers uses these packages wherever it finds
them: the environment itself must not have them."""
import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.nn.functional as F

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')
IMPLS = ('gt_kernels', 'mamba_ssm', 'gt_kernels.nn')
LIMIT = 1e-2  # of differences from the plain code in fp32; mamba_ssm multiplies in tf32
NEW = 64  # tokens that are timed in decoding
HEADING = 'model,impl,pass,dtype,batch,seq,latency_ms,tokens_per_s,peak_mib,kernels,difference'


def configuration(small, layers):
    from transformers import Mamba2Config
    if small:
        sizes = dict(hidden_size=64, num_heads=8, head_dim=16, state_size=16, vocab_size=64)
    else:
        sizes = dict(hidden_size=768, num_heads=24, head_dim=64, state_size=128, vocab_size=50288)
    return Mamba2Config(n_groups=1, num_hidden_layers=layers, tie_word_embeddings=True, use_cache=True, pad_token_id=0,
                        bos_token_id=0, eos_token_id=None, **sizes)


def transformers_model(args, layers=24):
    from transformers import Mamba2ForCausalLM
    torch.manual_seed(1)
    return Mamba2ForCausalLM(configuration(args.check, layers)).to(args.device)


def nn_model(args, layers=24):
    """The model of python/examples/mamba2.py, with the weights of transformers' model."""
    model = mamba2.Model(configuration(args.check, layers).to_dict())
    model.load_state_dict(transformers_model(args, layers).state_dict())
    return model.to(args.device)


def ids(args, batch, seq):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, 64 if args.check else 50288, (batch, seq), generator=generator).to(args.device)


def logits_of(model, tokens):
    result = model(tokens)
    return (result if torch.is_tensor(result) else result.logits).float()


def judge(make, args):
    """Logits of a short text, and the gradient of the embedding if the model trains."""
    model, tokens = make(args, 4), ids(args, 2, 320)
    if make is nn_model:
        model = model.eval().requires_grad_(False)
    logits = logits_of(model, tokens)
    answers = [logits.detach().cpu()]
    if logits.requires_grad:
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        answers.append(next(model.parameters()).grad.float().cpu())
    return answers


def difference(a, b):
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b))


def synchronize(args):
    if args.device == 'cuda':
        torch.cuda.synchronize()


def median_ms(args, function, most=10, seconds=20):
    for _ in range(3):
        function()
    times, start = [], time.perf_counter()
    while len(times) < most and time.perf_counter() - start < seconds:
        synchronize(args)
        begin = time.perf_counter()
        function()
        synchronize(args)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def generate(model, tokens, new):
    if not hasattr(model, 'generate'):
        return mamba2.generate(model, tokens, new)
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False)


def count_kernels(model, tokens):
    """Kernels of one token of generation."""
    from torch.profiler import ProfilerActivity, profile

    def count(new):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            generate(model, tokens, new)
            torch.cuda.synchronize()
        names = (event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)
        return sum(not name.startswith(('Memcpy', 'Memset')) for name in names)

    generate(model, tokens, 2)
    return (count(9) - count(1)) / 8


def run(args):
    """One implementation: compares it with the plain answers, and prints its rows."""
    global mamba2
    is_nn = args.impl == 'gt_kernels.nn'
    if args.impl == 'mamba_ssm':
        sys.path.insert(0, args.peers)
    elif is_nn:
        sys.path.insert(0, os.path.join(ROOT, 'python', 'examples'))
        import mamba2
    else:
        from gt_kernels import compat
        compat.install()
    make = nn_model if is_nn else transformers_model
    error = difference(judge(make, args), torch.load(args.plain))
    print(f'# {args.impl}: differs from the plain code by {error:.1e}; the limit is {LIMIT:.0e}', flush=True)
    if not error <= LIMIT:
        return 1
    if args.check:
        generate(make(args, 2).eval(), ids(args, 2, 8), 3)
        return 0
    dtype, model = torch.bfloat16, make(args)
    if is_nn:
        model = model.to(dtype).eval().requires_grad_(False)

    def row(name, batch, seq, ms, tokens, kernels='', peak=None):
        peak = (peak or torch.cuda.max_memory_allocated()) / 2**20
        print(f'Mamba-2 130M,{args.impl},{name},bf16,{batch},{seq},{ms:.4f},{1e3 * tokens / ms:.0f},{peak:.1f},{kernels},'
              f'{error:.1e}', flush=True)

    if not is_nn:
        batch, seq = 8, 2048
        tokens, optimizer = ids(args, batch, seq), torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast('cuda', torch.bfloat16):
                logits = model(tokens).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            optimizer.step()

        torch.cuda.reset_peak_memory_stats()
        row('step', batch, seq, median_ms(args, step), batch * seq)
        optimizer.zero_grad(set_to_none=True)
        del optimizer
        model = model.to(dtype).eval().requires_grad_(False)
    with torch.no_grad():
        tokens = ids(args, 8, 2048)
        torch.cuda.reset_peak_memory_stats()
        row('inf', 8, 2048, median_ms(args, lambda: logits_of(model, tokens)), 8 * 2048)
    for batch in (1, 64):
        tokens = ids(args, batch, 32)
        torch.cuda.reset_peak_memory_stats()
        ms = (median_ms(args, lambda: generate(model, tokens, 1 + NEW), 5, 15)
              - median_ms(args, lambda: generate(model, tokens, 1), 5, 15)) / NEW
        peak = torch.cuda.max_memory_allocated()  # before another model exists
        half = make(args, 12).to(dtype).eval()
        kernels = (count_kernels(model, tokens) - count_kernels(half, tokens)) / 12
        row('decode', batch, 32, ms, batch, f'{kernels:.1f}', peak)
    return 0


def plain_answers(args):
    """Writes the answers of transformers' own code in fp32."""
    for name in ('mamba_ssm', 'causal_conv1d'):
        if importlib.util.find_spec(name):
            print(f'# plain: the environment has {name}, so there is no plain code to compare with')
            return 1
    torch.backends.cudnn.allow_tf32 = False
    torch.save(judge(transformers_model, args), args.plain)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--impls', default=','.join(IMPLS), help='implementations to time, with commas')
    parser.add_argument('--peers', default='.', help='folder of mamba_ssm and causal_conv1d (default: .)')
    parser.add_argument('--csv', help='file of the rows (default: the terminal only)')
    parser.add_argument('--check', action='store_true', help='compare a small model on a CPU, and time nothing')
    parser.add_argument('--seconds', type=int, default=240, help='limit of each implementation')
    parser.add_argument('--impl', help=argparse.SUPPRESS)
    parser.add_argument('--plain', help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = 'cpu' if args.check else 'cuda'
    os.environ['TRANSFORMERS_VERBOSITY'] = 'error'
    if args.impl:
        return plain_answers(args) if args.impl == 'plain' else run(args)
    lines, status = [], 0
    if not args.check:
        lines += [f'# gpu: {torch.cuda.get_device_name()}; PyTorch {torch.__version__}', HEADING]
    print('\n'.join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plain = os.path.join(folder, 'plain.pt')
        for impl in ('plain', *args.impls.split(',')):
            words = [sys.executable, __file__, '--impl', impl, '--plain', plain, '--peers', args.peers,
                     *(['--check'] if args.check else [])]
            rows = []
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            timer = threading.Timer(args.seconds, process.kill)
            timer.start()
            for line in process.stdout:
                if line.startswith(('#', 'Mamba-2')):
                    rows.append(line.rstrip())
                    print(rows[-1], flush=True)
            result = process.wait()
            timer.cancel()
            if result:
                rows.append(f'# {impl}: ended with {result}')
                print(rows[-1], flush=True)
                status = 1
            lines += rows
            if args.csv:
                with open(args.csv, 'w') as file:
                    file.write('\n'.join(lines) + '\n')
    return status


if __name__ == '__main__':
    sys.exit(main())
