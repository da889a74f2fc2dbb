"""Tests of gt_kernels.torch.distributed on processes with gloo, against the operators on the whole sequence.  Also
tests data parallel training of python/examples/hybrid.py."""

import contextlib
import multiprocessing.connection
import os
import sys
import tempfile
import traceback
import unittest
import unittest.mock
from datetime import timedelta

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    raise unittest.SkipTest("no PyTorch with gloo")

from gt_kernels import ArgumentError
import gt_kernels.torch as gt
from gt_kernels.torch import distributed
from test_torch import INPUTS, STATES, TOLERANCE, make, shapes, without_batch

HERE = os.path.dirname(os.path.abspath(__file__))
OPERATORS = ("wkv6", "ssd", "conv1d", "conv_ssd")
RANKS = 4
PAIR = []  # a group of the first two ranks
CALLS = int(os.environ.get("GT_TEST_CALLS", 0))


# ---- processes ----


def serve(rank, folder, connection):
    """The main function of a process: runs the functions of this file that the parent names."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS,
                            timeout=timedelta(seconds=100))
    PAIR.append(dist.new_group([0, 1]))
    while (task := connection.recv()) is not None:
        try:
            name, arguments = task
            connection.send(globals()[name](*arguments))
        except Exception:
            connection.send(traceback.format_exc())
    dist.destroy_process_group()


class Processes:
    """A server imports PyTorch once and forks before it has threads.  All processes compute on the CPU: they see no GPU,
    because a process that forks must not have started CUDA."""

    def __init__(self):
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["test_distributed", "torch.distributed.fsdp"])
        self.folder, self.all, self.ends = tempfile.TemporaryDirectory(), [], []
        with unittest.mock.patch.dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
                                      PYTHONPATH=os.pathsep.join(sys.path)):
            for rank in range(RANKS):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(rank, self.folder.name, theirs), daemon=True)
                process.start()
                theirs.close()
                self.all.append(process)
                self.ends.append(ours)

    def run(self, ranks, name, *arguments):
        """Runs a function on the first ranks.  Returns the errors."""
        if any(not process.is_alive() for process in self.all):
            return ["a process has ended before"]
        for end in self.ends[:ranks]:
            end.send((name, arguments))
        left, wrong = dict(zip(self.ends, range(ranks))), []
        while left:
            ready = multiprocessing.connection.wait(left, 150 + CALLS)
            if not ready:
                return wrong + [f"ranks {list(left.values())} do not answer"]
            for end in ready:
                try:
                    answer = end.recv()
                except EOFError:
                    answer = "the process has ended"
                wrong += [f"rank {left.pop(end)}: {answer}"] * (answer is not None)
        return wrong

    def stop(self):
        for process, end in zip(self.all, self.ends):
            if process.is_alive():
                end.send(None)
        for process in self.all:
            process.join(20)
            process.kill()
        self.folder.cleanup()


# ---- functions that the processes run ----


def group_of(ranks):
    return PAIR[0] if ranks == 2 else dist.group.WORLD


def invoke(module, op, tensors, **options):
    """Calls an operator.  Returns (y, final states)."""
    values = {name: tensors[name] for name in INPUTS[op].split()}
    states = {name: values.pop(name) for name in list(values) if name in STATES}
    if op == "conv_ssd":
        options.update(state_size=8, groups=2)
    y, *last = getattr(module, op)(*values.values(), **states, final_state=True, **options)
    return y, last


def has_time(op, name):
    shape = shapes(op, B=1, T=99)[name]
    return len(shape) > 1 and shape[1] == 99


def weights(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


def close(got, right, tolerance, what):
    assert got.shape == right.shape and got.dtype == right.dtype, f"{what}: {got.shape}, {right.shape}"
    error = (got.double() - right.double()).norm().item()
    assert error <= tolerance * max(right.double().norm().item(), 1e-2), f"{what}: error {error}"


def whole_tensors(op, lengths, B, dtype, without, shared, cu_seqlens, tweak=None):
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1
    shape = shapes(op, B=B, T=sum(lengths), rows=rows)
    if tweak:
        shape.update(tweak)
    tensors = make(op, dtype=dtype, without=without, shape=without_batch(shape) if shared else shape)
    return tensors


def piece_of(op, tensors, start, stop):
    return {name: None if value is None else
            (value[:, start:stop] if has_time(op, name) else value).detach().clone().requires_grad_()
            for name, value in tensors.items()}


def compare(op, lengths, options=None, B=2, dtype=torch.float32, without=(), shared=False, cu_seqlens=None, tweak=None,
            wide=False, loss="all"):
    """Compares a call in pieces with a call on the whole sequence: y, states, all gradients."""
    options, rank, group = options or {}, dist.get_rank(), group_of(len(lengths))
    B = 1 if cu_seqlens else B
    whole = whole_tensors(op, lengths, B, dtype, without, shared, cu_seqlens, tweak)
    if wide:
        for name in ("w", "dt"):
            if name in whole:
                whole[name] = whole[name].detach().float().requires_grad_()
    start = sum(lengths[:rank])
    stop = start + lengths[rank]
    packed = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32)}

    def gradients(tensors, y, states, weight):
        total = y.new_zeros((), dtype=torch.float64)
        if loss != "states":
            total = total + (y.double() * weight).sum()
        if loss != "y":
            for seed, state in enumerate(states):
                total = total + (state.double() * weights(state, seed)).sum()
        names = [name for name, value in tensors.items() if value is not None]
        found = torch.autograd.grad(total + 0 * y.sum(), [tensors[name] for name in names], allow_unused=True)
        return dict(zip(names, found))

    y, states = invoke(gt, op, whole, **options, **packed)
    weight = weights(y, 77)
    right = gradients(whole, y, states, weight)
    piece = piece_of(op, whole, start, stop)
    same = None if lengths == (lengths[0],) * len(lengths) else lengths
    found_y, found_states = invoke(distributed, op, piece, group=group, lengths=same, **options, **packed)
    found = gradients(piece, found_y, found_states, weight[:, start:stop])
    tolerance = TOLERANCE[dtype]
    close(found_y, y[:, start:stop], tolerance, "y")
    for got, state in zip(found_states, states):
        got = got.detach().clone()
        dist.all_reduce(got, group=group)
        close(got, state, tolerance, "state")
    for name, gradient in found.items():
        expected = right[name]
        if has_time(op, name):
            expected = expected[:, start:stop]
        else:
            gradient = torch.zeros_like(expected) if gradient is None else gradient
            dist.all_reduce(gradient, group=group)
        close(gradient, expected, tolerance, f"d{name}")


def run_compare(op, lengths, arguments):
    compare(op, lengths, **arguments)


def log_decay():
    whole = [tensor.detach() for tensor in make("wkv6").values()][:4]
    whole[3] = -whole[3].exp()
    here = slice(*((0, 7), (7, 19))[dist.get_rank()])
    piece = distributed.wkv6(*(t[:, here] for t in whole), decay="log", lengths=[7, 12], group=PAIR[0])
    close(piece, gt.wkv6(*whole, decay="log")[:, here], 2e-5, "y")


def grown():
    """Decays above 1, whose product over the first piece overflows float32.  The other numbers are small, so that the
    results are finite."""
    rank, results, weight = dist.get_rank(), [], 2.0 ** -100
    x, dt = torch.tensor([0, 0, 1.0, 1]).reshape(1, 4, 1, 1), torch.tensor([45, 45, 0.1, 0.1]).reshape(1, 4, 1)
    one, here = torch.ones(1, 4, 1, 1), slice(2 * rank, 2 * rank + 2)
    for module, cut, options in ((gt, slice(None), {}), (distributed, here, {"group": PAIR[0]})):
        state = torch.full((1, 1, 1, 1), 2.0 ** -100, requires_grad=True)
        y, last = module.ssd(x[:, cut], dt[:, cut], torch.ones(1), one[:, cut], one[:, cut], state=state,
                             final_state=True, **options)
        gradient, = torch.autograd.grad((y * weight).sum() + (last * weight).sum(), state)
        results.append([y.detach(), gradient])
    (y, gradient), (piece, found) = results
    dist.all_reduce(found, group=PAIR[0])
    assert torch.isfinite(y).all() and gradient.item() > 1e6
    close(piece, y[:, here], 2e-5, "y")
    close(found, gradient, 2e-5, "dstate")


def spoilt(op):
    """Infinite and NaN numbers in one sequence do not reach another sequence, in forward or backward."""
    lengths, cu_seqlens, rank = (4, 4, 4, 4), [0, 3, 6, 9, 14, 16], dist.get_rank()
    for bad in (float("nan"), float("inf")):
        outputs = []
        for value in (bad, 1.0):
            whole = whole_tensors(op, lengths, 1, torch.float32, (), False, cu_seqlens)
            with torch.no_grad():
                for name, tensor in whole.items():
                    if has_time(op, name):
                        tensor[:, 7] = value  # token 7 belongs to sequence 2, tokens 6 to 8, on ranks 1 and 2
                    if name in STATES:
                        tensor[2] = value
            piece = piece_of(op, whole, 4 * rank, 4 * rank + 4)
            y, states = invoke(distributed, op, piece, cu_seqlens=cu_seqlens)
            names = [name for name in piece if has_time(op, name) or name in STATES]
            found = torch.autograd.grad(y.sum() + sum(state.sum() for state in states), [piece[name] for name in names])
            tokens = [y, *(g for name, g in zip(names, found) if has_time(op, name))]
            rows = [*states, *(g for name, g in zip(names, found) if not has_time(op, name))]
            others = torch.tensor([not 6 <= t < 9 for t in range(4 * rank, 4 * rank + 4)])
            outputs.append([tensor[:, others] for tensor in tokens] + [row[[0, 1, 3, 4]] for row in rows])
        for a, b in zip(*outputs):
            assert torch.isfinite(b).all() and torch.equal(a, b), op


def random_cases(ranks, seed, count):
    """Random lengths, sequences and options, the same on all ranks."""
    import random
    draw = random.Random(seed)
    for i in range(count):
        op = draw.choice(OPERATORS)
        lengths = tuple(draw.choice((0, 1, 2, 3, draw.randrange(40))) for _ in range(ranks))
        total, cu_seqlens = sum(lengths), None
        if draw.random() < 0.6:
            cuts = sorted(draw.randrange(total + 1) for _ in range(draw.randrange(6)))
            cu_seqlens = [0, *cuts, total if draw.random() < 0.8 else max([*cuts, 0])]
        optional = [name for name in ("u", "Dskip", "dt_bias", "bias", "z", *STATES) if name in INPUTS[op].split()]
        without = [name for name in optional if draw.random() < 0.2]
        options = {}
        if op in ("wkv6", "ssd", "conv_ssd"):
            options = {"recompute": draw.random() < 0.5, "segments": draw.choice((0, 3))}
        if op in ("ssd", "conv_ssd"):
            options["softplus"] = draw.random() < 0.5
        shared = draw.random() < 0.3 and not {"conv_state", "state"} & set(without)
        dtype = draw.choice(list(TOLERANCE))
        case = dict(op=op, lengths=lengths, options=options, B=draw.randrange(1, 4), dtype=dtype, without=without,
                    shared=shared, cu_seqlens=cu_seqlens, wide=draw.random() < 0.3,
                    loss=draw.choice(("all", "all", "y", "states")))
        try:
            compare(**case)
        except Exception:
            raise AssertionError(f"seed {seed}, case {i}: {case}") from None
    return None


@contextlib.contextmanager
def refused(kind, text):
    try:
        yield
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"not refused: {text}")


def disagreements():
    """Disagreements of two ranks.  Both ranks refuse each, and the next call is right."""
    ops, group, rank = distributed, PAIR[0], dist.get_rank()
    distributed._agreements.pop(group, None)  # like in a new program

    def conv(T=5, D=3, dtype=torch.float32, **options):
        return ops.conv1d(torch.ones(1, T, D, dtype=dtype), torch.ones(D, 4), group=group, **options)

    for text, options in (
            ("D = 3 at rank 0, 4 at rank 1", {"D": 3 + rank}),
            ("tokens = 5 at rank 0, 6 at rank 1: must be equal unless lengths are given", {"T": 5 + rank}),
            ("lengths[0] = 5 at rank 0, 4 at rank 1", {"lengths": [5 - rank, 5]}),
            ("lengths[0] = None at rank 0, 5 at rank 1", {"lengths": [5, 5] if rank else None}),
            ("lengths[1] = 6: rank 1 has 5 tokens", {"lengths": [5, 6]}),
            ("lengths[0] = 4: rank 0 has 5 tokens", {"lengths": [4, 5]}),
            ("the sequences of cu_seqlens = 2 at rank 0, 1 at rank 1", {"cu_seqlens": [0, 10] if rank else [0, 3, 10]}),
            ("cu_seqlens[1] = 3 at rank 0, 4 at rank 1", {"cu_seqlens": [0, 3 + rank, 10]}),
            ("dtype = torch.float32 at rank 0, torch.bfloat16 at rank 1",
             {"dtype": torch.bfloat16 if rank else torch.float32}),
            ("D = 3 at rank 0, 2 at rank 1", {"D": 3 - rank})):
        with refused(ArgumentError, f"gt_kernels.torch.distributed.conv1d: {text}"):
            conv(**options)
        assert conv().shape == (1, 5, 3)
    with refused(ArgumentError, "operator = conv1d at rank 0, wkv6 at rank 1"):
        if rank:
            ops.wkv6(*(torch.ones(1, 5, 2, 3) for _ in range(4)), group=group)
        else:
            conv()
    for text, options in (  # errors that all ranks share
            ("cu_seqlens[0] = 1: must be 0", {"cu_seqlens": [1, 10]}),
            ("cu_seqlens[2] = 4: must be 5 to 10", {"cu_seqlens": [0, 5, 4]}),
            ("cu_seqlens[1] = 11: must be 0 to 10", {"cu_seqlens": [0, 11]}),
            ("cu_seqlens = (0,): must have at least 2", {"cu_seqlens": (0,)}),
            ("cu_seqlens[1] = 2.5: must be an integer", {"cu_seqlens": [0, 2.5]}),
            ("cu_seqlens has shape [1, 2]", {"cu_seqlens": torch.tensor([[0, 5]])}),
            ("lengths = [5]: must be None, or the tokens of each of 2 ranks", {"lengths": [5]}),
            ("lengths[1] = -1: must not be negative", {"lengths": [5, -1]}),
            ("final_state = 2: must be True or False", {"final_state": 2}),
            ("activation = 'gelu'", {"activation": "gelu"})):
        with refused(ArgumentError, text):
            conv(**options)
    x = torch.ones(1, 5, 3)
    for text, arguments, options in (
            ("state has shape [2, 3, 3]: must be [1,D,W-1]", (x, torch.ones(3, 4), None, torch.ones(2, 3, 3)), {}),
            ("B = 2: must be 1 with packed sequences", (x.expand(2, 5, 3), torch.ones(3, 4)), {"cu_seqlens": [0, 10]}),
            ("weight is None", (x, None), {}),
            ("x is a builtins.list: must be a torch.Tensor", ([1.0], torch.ones(3, 4)), {})):
        with refused(ArgumentError, text):
            ops.conv1d(*arguments, group=group, **options)
    with refused(ArgumentError, "group = 7: must be a process group"):
        ops.conv1d(x, torch.ones(3, 4), group=7)


def once_per_call():
    """Checks how many messages a call exchanges, and how many numbers each message has."""
    header, counts, inner = 2 * (14 + 2), [], dist.all_gather_into_tensor

    def count(out, message, group):
        counts.append(message.numel())
        inner(out, message, group=group)

    B, H, N, V, P, D, W = 2, 4, 8, 8, 6, 12, 4
    wkv6, ssd, conv = B * H * N * V, B * H * P * N, B * D * (W - 1)
    channels = H * P + 2 * 2 * N
    for op, forward, backward in (
            ("wkv6", [wkv6 + B * H * N], [wkv6]), ("ssd", [ssd + B * H], [ssd]), ("conv1d", [conv], [conv]),
            ("conv_ssd", [B * channels * 3, ssd + B * H], [ssd, B * channels * 3])):
        distributed._agreements.pop(PAIR[0], None)
        tensors = make(op, T=5, seed=dist.get_rank())
        for call in range(3):
            with unittest.mock.patch.object(dist, "all_gather_into_tensor", count):
                y, states = invoke(distributed, op, tensors, group=PAIR[0])
                messages = [header + numbers for numbers in forward]
                assert counts[-len(forward):] == messages and len(counts) == len(forward) * (1 + (call == 0)), \
                    f"{op}, forward {call}: {counts}"
                counts.clear()
                (y.sum() + sum(state.sum() for state in states)).backward()
                assert counts == backward, f"{op}, backward: {counts}"
                counts.clear()


def one_rank():
    """A call in a group of one rank gives the bits of the plain call."""
    group = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    for op in OPERATORS:
        for cu_seqlens in (None, [0, 5, 5, 19]):
            tensors = make(op, B=1 if cu_seqlens else 2, rows=3 if cu_seqlens else 2)
            packed = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32)}
            results = []
            for module, options in ((gt, {}), (distributed, {"group": group})):
                y, states = invoke(module, op, tensors, **options, **packed)
                loss = y.square().sum() + sum(state.square().sum() for state in states)
                results.append([y, *states, *torch.autograd.grad(loss, list(tensors.values()))])
            for a, b in zip(*results):
                assert torch.equal(a, b), op


def backward_twice():
    for op in OPERATORS:
        tensors = make(op, T=4)
        y, _ = invoke(distributed, op, tensors, group=PAIR[0])
        y.sum().backward()
        with refused(RuntimeError, "backward through the graph a second time"):
            y.sum().backward()
        y, _ = invoke(distributed, op, tensors, group=PAIR[0])
        first, = torch.autograd.grad(y.square().sum(), next(iter(tensors.values())), create_graph=True)
        with refused(NotImplementedError, "gradients of gradients"):
            first.sum().backward()
        with torch.no_grad():
            assert not invoke(distributed, op, tensors, group=PAIR[0])[0].requires_grad


def other_contexts():
    """With autocast and checkpointing the tensors and exchanges of the ranks still match."""
    from torch.utils.checkpoint import checkpoint
    tensors = make("conv_ssd", T=6, without=("conv_state", "state"))
    names = INPUTS["conv_ssd"].split()
    run = lambda *values: distributed.conv_ssd(*values, state_size=8, groups=2, group=PAIR[0])  # noqa: E731
    values, results = [tensors[name] for name in names], []
    for call in (run, lambda *values: checkpoint(run, *values, use_reentrant=False)):
        y = call(*values)
        leaves = [value for value in values if value is not None]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for a, b in zip(*results):
        assert torch.equal(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(*values)
    assert y.dtype == torch.bfloat16
    y.sum().backward()


def seq_idx_of_pieces(lengths, numbers, right):
    rank, start = dist.get_rank(), sum(lengths[:dist.get_rank()])
    mine = torch.tensor(numbers[start:start + lengths[rank]], dtype=torch.int32)
    cu_seqlens, found = distributed.pack(mine, group=group_of(len(lengths)))
    assert (cu_seqlens.tolist(), found) == (right, lengths), (cu_seqlens, found)
    with refused(ArgumentError, "seq_idx is [[2, 3], torch.int32]"):
        distributed.pack(torch.zeros(2, 3, dtype=torch.int32), group=group_of(len(lengths)))


def train(kind, ranks):
    """Losses of three steps of python/examples/hybrid.py.  Each rank has its share of a batch."""
    sys.path.insert(0, os.path.join(HERE, "..", "examples"))
    import hybrid
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    torch.manual_seed(3)
    model, run = hybrid.Hybrid(gt, 40, 32, 2, 2, 2), None
    if kind == "DDP":
        run = DistributedDataParallel(model, process_group=PAIR[0])
    elif kind == "FSDP2":
        mesh = DeviceMesh.from_group(PAIR[0], "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    rank, losses, run = dist.get_rank() if kind else 0, [], run or model
    optimizer = torch.optim.AdamW(run.parameters(), 0.01)
    tokens = torch.randint(40, (4, 25), generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        batch = tokens.chunk(ranks)[rank] if kind else tokens
        loss = F.cross_entropy(run(batch[:, :-1]).flatten(0, -2), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if kind:
        dist.all_reduce(losses, group=PAIR[0])
        losses /= ranks
    return losses


def train_alike(kind):
    alone, together = train(None, 1), train(kind, 2)
    assert alone[2] < alone[0] - 0.1 and (alone - together).abs().max() < 1e-5, f"{kind}: {alone}, {together}"


# ---- tests ----


class Distributed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.processes = Processes()
        cls.addClassCleanup(cls.processes.stop)

    def ask(self, ranks, name, *arguments):
        wrong = self.processes.run(ranks, name, *arguments)
        if wrong:
            self.fail("\n".join(wrong))

    def compare(self, op, lengths, **arguments):
        with self.subTest(op=op, lengths=lengths, arguments=arguments):
            self.ask(len(lengths), "run_compare", op, lengths, arguments)

    def test_two_ranks(self):
        for op in OPERATORS:
            for lengths in ((20, 20), (37, 3), (2, 30), (0, 9), (9, 0), (0, 0)):
                self.compare(op, lengths)

    def test_four_ranks(self):
        for op in OPERATORS:
            for lengths in ((10, 10, 10, 10), (1, 2, 0, 1), (0, 1, 30, 0)):
                self.compare(op, lengths)

    def test_dtypes(self):
        for op in OPERATORS:
            for dtype in (torch.bfloat16, torch.float16):
                self.compare(op, (30, 17), dtype=dtype)
                self.compare(op, (2, 2, 1, 15), dtype=dtype, wide=True)

    def test_packed_sequences(self):
        for op in OPERATORS:
            for cu_seqlens in ([0, 40], [0, 5, 5, 16, 40], [0, 20, 20, 40, 40], [0, 1, 19, 22, 39], [0, 0, 30]):
                self.compare(op, (20, 20), cu_seqlens=cu_seqlens)
            for cu_seqlens in ([0, 13], [0, 3, 6, 6, 13], [0, 4, 11]):
                self.compare(op, (4, 0, 2, 7), cu_seqlens=cu_seqlens)
            self.compare(op, (7, 12), cu_seqlens=[0, 3, 9, 19], shared=True)
            self.compare(op, (7, 12), cu_seqlens=[0, 3, 9, 19], without=STATES)

    def test_options(self):
        for op, options in (("wkv6", {"segments": 3}), ("wkv6", {"recompute": True}), ("wkv6", {"scale": 0.5}),
                            ("ssd", {"segments": 3}), ("ssd", {"recompute": True}), ("conv1d", {"activation": "silu"}),
                            ("ssd", {"softplus": True, "dt_limit": (0.2, 0.9)}), ("conv_ssd", {"softplus": True})):
            self.compare(op, (8, 11), options=options)

    def test_missing_and_shared_tensors(self):
        for op in OPERATORS:
            optional = [name for name in ("u", "bias", "Dskip", "z", "dt_bias", *STATES) if name in INPUTS[op].split()]
            for name in optional:
                self.compare(op, (8, 11), without=(name,))
            self.compare(op, (8, 11), shared=True)
            self.compare(op, (1, 2), loss="states")
            self.compare(op, (8, 11), loss="y")
        self.compare("wkv6", (8, 11), tweak={"v": (2, 19, 4, 5), "state": (2, 4, 8, 5)})
        self.compare("ssd", (8, 11), tweak={"Dskip": (4, 6)})

    def test_log_decay(self):
        self.ask(2, "log_decay")

    def test_random_cases(self):
        self.ask(2, "random_cases", 2, 1, CALLS or 20)
        self.ask(4, "random_cases", 4, 2, CALLS or 8)

    def test_growing_states(self):
        """A decay above 1, whose product over a piece overflows float32."""
        self.ask(2, "grown")

    def test_one_spoilt_sequence(self):
        for op in OPERATORS:
            self.ask(4, "spoilt", op)

    def test_one_exchange_a_pass(self):
        self.ask(2, "once_per_call")

    def test_group_of_one_rank(self):
        self.ask(RANKS, "one_rank")

    def test_ranks_that_disagree(self):
        self.ask(2, "disagreements")

    def test_second_backward(self):
        self.ask(2, "backward_twice")

    def test_autocast_and_checkpoint(self):
        self.ask(2, "other_contexts")

    def test_seq_idx(self):
        numbers = [1, 1, 4, 4, 4, 4, 4, 2]
        for lengths in ((5, 3), (0, 8), (2, 6), (5, 0, 1, 2)):
            self.ask(len(lengths), "seq_idx_of_pieces", lengths, numbers, [0, 2, 7, 8])
        self.ask(2, "seq_idx_of_pieces", (0, 0), [], [0, 0])

    def test_data_parallel_training(self):
        for kind in ("DDP", "FSDP2"):
            self.ask(2, "train_alike", kind)


if __name__ == "__main__":
    unittest.main()
