"""wkv6, ssd, conv1d and conv_ssd for sequences whose tokens are split over the ranks of a process group.

    y = gt_kernels.torch.distributed.wkv6(r, k, v, w, u, group=group)    # tensors of this rank's tokens

Arguments are those of gt_kernels.torch.  group (None: all processes), lengths and cu_seqlens are equal on all ranks.
  lengths      tokens of each rank, in order; 0 is allowed.  None: all ranks have the same number.
  cu_seqlens   packed sequences over all tokens of the group, batch 1; may be a list.  On a GPU the call waits to
               read it.
  state        is read on the rank of a sequence's first token (not packed: on the first rank).  On other ranks its
               gradient is 0.
  final_state  is on the rank of a sequence's last token (not packed: on the last rank).  On other ranks it is 0.
Sum over ranks to get final states, and gradients of state, u, A, Dskip, dt_bias, weight and bias.  Every rank must call
forward, and backward on a loss that depends on its y.  In a group of one rank a call is the plain call.

Recurrences: C states cross a border between ranks (C: the batch; 1 if packed).  A rank's tokens are a piece.  E is the
decay of a piece, and L its final state from a zero state.
  forward   segment computes E and L.  all_gather exchanges them.  join computes S, the state before this rank's piece.
            The usual forward then starts from S, and saves for backward.
  backward  segment computes X, the gradient of S from the rank's own dy.  all_gather exchanges X.  join computes G, the
            gradient of the piece's final state.  The usual backward then runs with S and G.
  Bytes     that a rank sends: 4 C (state + decays) in forward, 4 C state in backward.  Numbers of state and decays:
            wkv6 C H (N V + N), ssd C H (P N + 1).
  Passes    segment reads k v w (ssd: x dt Bm), and needs half of forward's products with states.  Instead, S could
            correct y with as many products.  That would read r w y, write y, and round y twice; it would also have to
            undo a gate z and correct the saved arrays.  In backward G would correct dk dv dw, which moves six arrays,
            while segment reads r w dy.  So segment moves fewer bytes.
Window of conv1d
  forward   all_gather exchanges the last W-1 inputs in float32, 4 C D (W-1) bytes.  A rank takes the inputs before its
            first token from as many ranks as hold them.  The usual forward follows.
  backward  Backward of the first W-1 tokens gives the gradients of these inputs.  all_gather exchanges them.  Backward
            of all tokens follows.
conv_ssd    runs conv1d, then ssd; backward runs ssd, then conv1d.
Errors      A message of forward begins with 8 (14 + ranks) bytes: sizes, dtypes, tokens, lengths, a hash of cu_seqlens.
            If two values differ, all ranks refuse the call and report both values.  On a GPU only calls with new values
            wait and compare.  A call with new sizes makes one more exchange, because the length of a message depends on
            sizes.
"""

import bisect
import functools
import hashlib
import itertools
import types
import weakref

import torch
import torch.distributed as dist

from .. import c
from .._arguments import flag, integer, refuse
from . import _ACTIVATION, _DECAY, _choice, _dt_limit, _engine, _flag, _float, _int
from . import _call as _plain
from ._errors import named

__all__ = ["conv1d", "conv_ssd", "pack", "ssd", "wkv6"]

_MODULE = "gt_kernels.torch.distributed"
_EXCHANGED = ("wkv6", "ssd", "conv1d")
_SIZES = "BHNVPGDW"
_MOST_KEPT = 4096
_agreements = weakref.WeakKeyDictionary()  # {group: Agreement}


# ---- which rank has which tokens ----


class Layout:
    """The piece of one rank.  It holds tokens of the group's sequences `first` to `last` - 1; `bounds` are their bounds
    within the piece.  incoming: the first of these sequences began on an earlier rank; its tokens here end at `end`.
    outgoing: the last one continues on a later rank; its tokens here begin at `begin`.  passes: incoming and outgoing
    sequence are the same.  Without packed sequences the whole batch counts as one sequence over all tokens of all
    ranks."""

    def __init__(self, rank, lengths, cu_seqlens):
        self.rank, self.lengths, self.cu_seqlens = rank, lengths, cu_seqlens
        offsets, last_rank = [0, *itertools.accumulate(lengths)], len(lengths) - 1
        start, stop = offsets[rank:rank + 2]
        if cu_seqlens is None:
            self.crossing = [None] + [0] * last_rank + [None]  # the sequence that crosses the border before each rank
        else:
            self.crossing = [self.find_crossing(cu_seqlens, offset) for offset in offsets]
        before, after = self.crossing[rank:rank + 2]
        self.incoming, self.outgoing = before is not None, after is not None
        self.passes = self.incoming and before == after
        self.begin, self.end, self.bounds, self.tensors = 0, lengths[rank], None, {}
        if cu_seqlens is not None:
            count = len(cu_seqlens) - 1
            self.first = before if self.incoming else bisect.bisect_left(cu_seqlens, start, 0, count)
            self.last = count if rank == last_rank else max(bisect.bisect_left(cu_seqlens, stop, 0, count), self.first)
            inside = [min(max(bound, start), stop) - start for bound in cu_seqlens[self.first:self.last + 1]]
            self.bounds = inside if self.last > self.first else [0, 0]  # without sequences: one empty sequence
            self.begin, self.end = inside[-2:][0], inside[:2][-1]
        self.from_rank = self.to_rank = rank  # first rank of the incoming, last of the outgoing sequence
        while self.incoming and self.crossing[self.from_rank] == before:
            self.from_rank -= 1
        while self.outgoing and self.crossing[self.to_rank + 1] == after:
            self.to_rank += 1

    @staticmethod
    def find_crossing(cu_seqlens, offset):
        """Returns the sequence that has tokens on both sides of a border, or None."""
        i = bisect.bisect_left(cu_seqlens, offset)
        return i - 1 if 0 < i < len(cu_seqlens) and cu_seqlens[i] > offset else None

    def cu_seqlens_on(self, device):
        if self.bounds is None:
            return None
        if device not in self.tensors:
            self.tensors[device] = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        return self.tensors[device]

    def inputs_before(self, rank, count):
        """Finds the `count` inputs before a rank's tokens of the incoming sequence.  Returns [(source rank, number of
        its last inputs, the index among the `count` at which they end)]."""
        result, crossing = [], self.crossing[rank]
        while crossing is not None and count:
            rank -= 1
            here = min(count, self.lengths[rank]) if self.crossing[rank] == crossing else count
            result.append((rank, here, count))
            count -= here
        return result


_layout = functools.lru_cache(256)(Layout)


# ---- the exchange over borders ----


class Exchange:
    """The exchange of one call on one rank.  The states of a call are rows: [rows, ...]."""

    def __init__(self, name, layout, group, header, sizes, options, rest):
        self.engine, self.layout, self.group, self.header = _engine.ENGINES[name], layout, group, header
        self.sizes, self.options, self.rest = sizes, options, rest
        shapes, operator = self.engine.planner, self.engine.operator
        self.rows = sizes["B"] if layout.bounds is None else len(layout.bounds) - 1
        self.carried = sizes["B"] if layout.bounds is None else 1  # rows that cross a border
        self.state_shape = shapes.shape(operator.outputs[-1].shape[1:], sizes, None)
        self.decay_shape = shapes.shape(operator.decays[1:], sizes, None)
        # If the number of tokens is not the one in `lengths`, the rank sends no content, and the exchange ends in an
        # error.
        self.sends = layout.outgoing and layout.lengths[layout.rank] == sizes["T"]
        self.times = ["T" in tensor.shapes[0] for tensor in operator.tensors[:-1]]

    def cut(self, inputs, *bounds):
        """Cuts the tensors that have a time index to the tokens in `bounds`."""
        return [tensor[:, slice(*bounds)] if has_time and tensor is not None else tensor
                for tensor, has_time in zip(inputs, self.times)]

    def gather(self, parts, *shapes):
        """all_gather of one message per rank.  The message holds `parts` of these shapes; None: zeros, which no rank
        reads.  Returns the parts of all ranks as views [ranks, ...]."""
        counts, ranks = [torch.Size(shape).numel() for shape in shapes], len(self.layout.lengths)
        if parts is None:
            message = torch.zeros(sum(counts), device=self.device)
        else:
            message = torch.cat([part.reshape(-1) for part in parts])
        if self.header is not None:
            agreement = _agreements.setdefault(self.group, Agreement())
            header, self.header = self.header, None  # backward sends no header
            every = agreement.gather(header, message.view(torch.int32), self.group).view(torch.float32)
        else:
            every = message.new_empty(ranks * len(message))
            if len(message):
                dist.all_gather_into_tensor(every, message, group=self.group)
            every = every.view(ranks, -1)
        return [column.unflatten(1, shape) for column, shape in zip(every.split(counts, 1), shapes)]

    def with_first(self, rows, others):
        """Returns the states of all sequences: the incoming `rows` first, then the states of `others`, or zeros."""
        if self.rows == self.carried:
            return rows
        left = others[self.carried:] if others is not None else rows.new_zeros(self.rows - 1, *self.state_shape)
        return torch.cat([rows, left])

    def with_last(self, rows, others):
        if self.rows == self.carried:
            return rows
        left = others[:-self.carried] if others is not None else rows.new_zeros(self.rows - 1, *self.state_shape)
        return torch.cat([left, rows])

    def forward(self, inputs, state, is_saving):
        """Returns the results of the operator's forward, the states that it started from, and data for backward."""
        self.device, layout = inputs[0].device, self.layout
        start, kept = self.exchange(inputs, state[-self.carried:] if state is not None else None)
        if start is not None:
            state = self.with_first(start, state)
        rest = self.rest if is_saving else self.rest[:len(self.options) + 1]
        arguments = (*inputs, state, layout.cu_seqlens_on(self.device), None)
        results = self.engine.run("forward" if is_saving else "infer", (*arguments, *rest))
        if self.rest[len(self.options)] and layout.outgoing:
            results[1][-self.carried:] = 0  # not a final state: the sequence continues
        return results, state, kept

    def backward(self, inputs, state, dy, dstate, kept):
        """Returns the gradient of the final states, including the gradients that came from other ranks."""
        self.device, layout = dy.device, self.layout
        is_final = layout.incoming and not layout.passes  # the incoming sequence ends here
        own = dstate[:self.carried].contiguous() if is_final and dstate is not None else None
        start = state[:self.carried] if layout.incoming else None
        end = self.exchange_backward(inputs, start, dy, own, kept)
        return dstate if end is None else self.with_last(end, dstate)


class Recurrence(Exchange):
    def exchange(self, inputs, state):
        layout, parts = self.layout, None
        if self.sends:
            parts = self.engine.run("segment", (*self.cut(inputs, layout.begin, None), None, *self.options))
            if not layout.passes:  # the outgoing sequence begins here
                if state is not None:
                    states, decays = (torch.stack([part, part]) for part in parts)
                    parts[0] = self.engine.join("join", states, decays, state)[1]
                parts[1].zero_()  # a decay of 0 cuts off states and gradients of other sequences
        states, decays = self.gather(parts, (self.carried, *self.state_shape), (self.carried, *self.decay_shape))
        start = kept = None
        if layout.incoming:
            pieces = slice(layout.from_rank, layout.rank + 1)
            start = self.engine.join("join", states[pieces].contiguous(), decays[pieces].contiguous(), None)[-1]
        if layout.outgoing:
            kept = decays[layout.rank:layout.to_rank + 1].clone()
        return start, kept

    def exchange_backward(self, inputs, start, dy, own, kept):
        layout, parts = self.layout, None
        if layout.incoming:
            parts = self.engine.run("segment_backward", (dy[:, :layout.end], *self.cut(inputs, layout.end), start,
                                                         *self.options))
            if own is not None:
                states, decays = (torch.stack([part, part]) for part in parts)
                parts[0] = self.engine.join("join_backward", states, decays, own)[0]
            del parts[1]
        gradients, = self.gather(parts, (self.carried, *self.state_shape))
        if not layout.outgoing:
            return None
        return self.engine.join("join_backward", gradients[layout.rank:layout.to_rank + 1].contiguous(), kept, None)[0]


class Window(Exchange):
    def exchange(self, inputs, state):
        layout, parts, width = self.layout, None, self.state_shape[-1]
        if self.sends:
            x = inputs[0][:, layout.begin:]
            x = x[:, max(x.shape[1] - width, 0):].transpose(1, 2).float()
            before = x.new_zeros(*x.shape[:2], width) if state is None else state  # read if the sequence begins here
            parts = [torch.cat([before[..., x.shape[2]:], x], 2)]
        last, = self.gather(parts, (self.carried, *self.state_shape))
        if not layout.incoming:
            return None, None
        sources = reversed(layout.inputs_before(layout.rank, width))
        return torch.cat([last[rank][..., width - count:] for rank, count, _ in sources], 2), None

    def exchange_backward(self, inputs, start, dy, own, kept):
        layout, parts, width = self.layout, None, self.state_shape[-1]
        if layout.incoming:
            count = min(layout.end, width)
            own = own if count < width else None  # else the final state contains none of the earlier inputs
            wanted = 1 << self.engine.gradients.index("dstate_in")
            parts = self.engine.run("backward", (dy[:, :count], own, *self.cut(inputs, count), start, None, None,
                                                 *self.options, wanted))
        gradients, = self.gather(parts, (self.carried, *self.state_shape))
        if not layout.outgoing:
            return None
        result = gradients.new_zeros(gradients.shape[1:])
        for rank in range(layout.rank + 1, len(layout.lengths)):
            for source, count, end in layout.inputs_before(rank, width):
                if source == layout.rank:
                    result[..., width - count:] += gradients[rank][..., end - count:end]
        return result


_EXCHANGES = {"wkv6": Recurrence, "ssd": Recurrence, "conv1d": Window}


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, is_saving, *tensors):
        *inputs, first = tensors
        results, state, kept = exchange.forward(inputs, first, is_saving)
        results, engine = list(results), exchange.engine
        saved = results.pop() if is_saving and engine.operator.has_saved else None
        results = results[:1 + exchange.rest[len(exchange.options)]]
        saved = saved if exchange.rest[-1] else None  # recompute
        ctx.save_for_backward(*inputs, state, kept, saved, *engine.keep(tensors, results))
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, dy, dstate=None):
        exchange, needed = ctx.exchange, ctx.needs_input_grad[2:]
        layout, engine, count = exchange.layout, exchange.engine, len(needed)
        everything = ctx.saved_tensors  # read only once, because checkpointing allows no more
        tensors, (kept, *saved) = everything[:count], everything[count:]
        *inputs, state = tensors
        with torch.no_grad():
            shape = engine.planner.shape(engine.operator.outputs[0].shape, exchange.sizes, None)
            given = dy, dstate
            dy = inputs[0].new_zeros(shape) if dy is None else dy
            dstate = exchange.backward(inputs, state, dy, dstate, kept)
            found = types.SimpleNamespace(
                saved_tensors=(*tensors, layout.cu_seqlens_on(dy.device), None, *saved), options=exchange.options)
            results = list(engine.find_gradients(found, [shape], (dy, dstate), (*needed, False, False)))[:count]
            if layout.incoming and results[-1] is not None:
                results[-1][:exchange.carried] = 0  # incoming states are not the caller's
        if torch.is_grad_enabled():  # create_graph
            positions = [i for i, result in enumerate(results) if result is not None]
            once = Once.apply(engine.name, len(positions), *(results[i] for i in positions), *given, *tensors)
            for i, result in zip(positions, once):
                results[i] = result
        return None, None, *results


class Once(torch.autograd.Function):
    """Makes the first `count` tensors, which are gradients, depend on all others, and refuses to differentiate them."""

    @staticmethod
    def forward(ctx, name, count, *tensors):
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"{_MODULE}.{ctx.name}: gradients of gradients (create_graph=True, double backward) "
                                  "are not supported")


# ---- agreement of ranks ----


def _all(values, group, ranks, device):
    """Gathers a list of integers from every rank.  Returns one list per rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    every = mine.new_empty(ranks * len(values))
    dist.all_gather_into_tensor(every, mine, group=group)
    return every.view(ranks, -1).tolist()


class Header:
    """The values that must be equal on all ranks of a call.  They are the first numbers of a message."""

    NAMES = ("operator", *_SIZES, "dtype", "dtype of w or dt", "the sequences of cu_seqlens", "cu_seqlens", "tokens")

    def __init__(self, name, sizes, dtypes, lengths, cu_seqlens, ranks, device):
        self.lengths, self.cu_seqlens, self.ranks, self.device = lengths, cu_seqlens, ranks, device
        digest, count = 0, 0
        if cu_seqlens is not None:
            digest = int.from_bytes(hashlib.blake2b(repr(cu_seqlens).encode(), digest_size=7).digest(), "big")
            count = len(cu_seqlens) - 1
        self.sizes = (device, _EXCHANGED.index(name), *(sizes.get(letter, 0) for letter in _SIZES), *dtypes)
        self.values = (*self.sizes[1:], count, digest, sizes["T"], *(lengths or (-1,) * ranks))
        self.names = self.NAMES + tuple(f"lengths[{rank}]" for rank in range(ranks))

    @staticmethod
    def text(name, value):
        if name == "operator":
            return _EXCHANGED[value]
        if "dtype" in name:
            return list(_engine.DTYPES)[value]
        return None if name.startswith("lengths") and value < 0 else value

    def check(self, every, group):
        """Refuses the call if values differ.  every: the values of each rank."""
        tokens = self.names.index("tokens")
        for rank, others in enumerate(every):
            for i, (name, right, value) in enumerate(zip(self.names, every[0], others)):
                if right == value or (i == tokens and self.lengths):
                    continue
                if name == "cu_seqlens" and self.device.type != "cpu":  # rank 0 may not compare in this call
                    self.refuse(f"cu_seqlens of rank 0 and rank {rank} differ")
                if name == "cu_seqlens":
                    bounds = _all(self.cu_seqlens, group, self.ranks, self.device)
                    at = next(at for at, bound in enumerate(bounds[0]) if bounds[rank][at] != bound)
                    name, right, value = f"cu_seqlens[{at}]", bounds[0][at], bounds[rank][at]
                hint = " unless lengths are given" if i == tokens else ""
                right, value = self.text(name, right), self.text(name, value)
                self.refuse(f"{name} = {right} at rank 0, {value} at rank {rank}: must be equal{hint}")
        for rank, length in enumerate(self.lengths or ()):
            if every[rank][tokens] != length:
                self.refuse(f"lengths[{rank}] = {length}: rank {rank} has {every[rank][tokens]} tokens")

    def refuse(self, text):
        refuse(f"{_MODULE}.{self.text('operator', self.values[0])}", text, c.GT_ERROR_SIZE)


class Agreement:
    """The values that the ranks of a group have already agreed on.  The length of a message depends on sizes, and
    all_gather needs equal lengths.  So a rank with new sizes first exchanges a message without content that is as long
    as its previous one.  A rank that still has the previous sizes takes this message for a usual one, reads the header,
    and finds the difference."""

    def __init__(self):
        self.sizes, self.headers, self.last = set(), {}, {}

    def gather(self, header, payload, group):
        """all_gather of a header and a payload of int32; returns all payloads, [ranks, ...]."""
        operator, content = header.values[0], payload
        if header.sizes not in self.sizes:
            content = payload.new_zeros(self.last.get(operator, self.last.get(None, 0)))
            self.exchange(header, content, group)
            if len(self.sizes) >= _MOST_KEPT:  # happens on all ranks in the same call
                self.sizes.clear()
            self.sizes.add(header.sizes)
        self.last[operator] = self.last[None] = len(payload)
        return self.exchange(header, payload, group)

    def exchange(self, header, content, group):
        key = (header.device, *header.values)
        is_new = key not in self.headers
        if is_new:
            first = torch.tensor(header.values, device=header.device).view(torch.int32)
        else:
            first = self.headers[key]
        message = torch.cat([first, content])
        every = message.new_empty(header.ranks * len(message))
        dist.all_gather_into_tensor(every, message, group=group)
        every = every.view(header.ranks, -1)
        if is_new or header.device.type == "cpu":  # on a GPU only for new values, because a check waits for the device
            header.check(every[:, :len(first)].contiguous().view(torch.int64).tolist(), group)
        if len(self.headers) >= _MOST_KEPT:
            self.headers.clear()
        self.headers[key] = first
        return every[:, len(first):]


# ---- calls ----


def _members(function, group):
    """Returns (group, rank, number of ranks)."""
    if not dist.is_initialized():
        refuse(function, "torch.distributed has no process group: call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        refuse(function, f"group = {group!r}: must be a process group that this process is in, or None")
    return group, dist.get_rank(group), dist.get_world_size(group)


def _lengths(function, lengths, ranks):
    if lengths is None:
        return None
    if not isinstance(lengths, (list, tuple)) or len(lengths) != ranks:
        refuse(function, f"lengths = {lengths!r}: must be None, or the tokens of each of {ranks} ranks")
    lengths = tuple(integer(function, f"lengths[{i}]", length) for i, length in enumerate(lengths))
    for i, length in enumerate(lengths):
        if length < 0:
            refuse(function, f"lengths[{i}] = {length}: must not be negative")
    return lengths


def _bounds(function, cu_seqlens):
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            refuse(function, f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}: must be "
                   "[sequences + 1], int32 or int64")
        cu_seqlens = cu_seqlens.tolist()
    if not isinstance(cu_seqlens, (list, tuple)) or len(cu_seqlens) < 2:
        refuse(function, f"cu_seqlens = {cu_seqlens!r}: must have at least 2 elements")
    return tuple(integer(function, f"cu_seqlens[{i}]", bound) for i, bound in enumerate(cu_seqlens))


def _check_bounds(function, cu_seqlens, total):
    for i, bound in enumerate(cu_seqlens):
        least = cu_seqlens[i - 1] if i else 0
        if not least <= bound <= (total if i else 0):
            refuse(function, f"cu_seqlens[{i}] = {bound}: must be " + (f"{least} to {total}" if i else "0"))


def _call(name, tensors, options, final_state, recompute, group, lengths, cu_seqlens):
    """Checks everything, makes the ranks agree, and runs the call."""
    function, engine = f"{_MODULE}.{name}", _engine.ENGINES[name]
    operator, planner = engine.operator, engine.planner
    group, rank, ranks = _members(function, group)
    lengths, bounds = _lengths(function, lengths, ranks), _bounds(function, cu_seqlens)
    final_state, recompute = flag(function, "final_state", final_state), flag(function, "recompute", recompute)
    tensors = engine.convert("infer", (*tensors, None, None))[:-2]
    given = {tensor.name: value for tensor, value in zip(operator.tensors, tensors) if value is not None}
    for tensor in operator.tensors:
        if not tensor.optional and tensor.name not in given:
            planner.fail(c.GT_ERROR_NULL, f"{tensor.name} is None")
    struct, sizes, device = operator.struct(), {}, tensors[0].device
    planner.set_dtypes(struct, "infer", given, device)
    planner.set_options(struct, options, sizes)
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    planner.set_sizes(struct, {**given, **packed}, "infer", sizes)
    if bounds is not None and sizes["B"] != 1:
        refuse(function, f"B = {sizes['B']}: must be 1 with packed sequences", c.GT_ERROR_SIZE)
    tokens = lengths or (sizes["T"],) * ranks
    if bounds is not None:
        _check_bounds(function, bounds, sum(tokens))
    if ranks == 1:
        cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
        return _plain(name, (*tensors, cu, None), options, final_state, recompute)
    layout = _layout(rank, tokens, bounds)
    run = _run_conv_ssd if name == "conv_ssd" else _run
    results = run(name, tensors, options, final_state, recompute, layout, lengths, group)
    return results if final_state else results[0]


def _run(name, tensors, options, final_state, recompute, layout, lengths, group):
    """Runs a call with checked arguments; ranks may still disagree.  Returns (y,) or (y, final state)."""
    engine, (*inputs, state), sizes = _engine.ENGINES[name], tensors, {}
    operator, planner = engine.operator, engine.planner
    for tensor, value in zip(operator.tensors, inputs):
        if value is not None:
            planner.match(tensor, value, sizes, None, "infer")
    rows = sizes["B"] if layout.bounds is None else len(layout.cu_seqlens) - 1
    if state is not None:
        if state.dim() < len(operator.outputs[-1].shape):
            state = state.expand(rows, *state.shape)
        if layout.bounds is not None:
            state = state[layout.first:layout.last] if layout.last > layout.first else None
        state = state.contiguous() if state is not None else None
    rest = engine.rest(tensors, options, final_state, recompute)
    order = list(_engine.DTYPES)
    dtypes = {tensor.kind: order.index(value.dtype) for tensor, value in zip(operator.tensors, inputs)
              if value is not None}
    header = Header(name, sizes, (dtypes["x"], dtypes.get("w", dtypes["x"])), lengths, layout.cu_seqlens,
                    len(layout.lengths), inputs[0].device)
    exchange = _EXCHANGES[name](name, layout, group, header, sizes, options, rest)
    is_saving = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, state))
    results = Function.apply(exchange, is_saving, *inputs, state)
    if not final_state or layout.bounds is None:
        return results
    y, last = results
    last = last[:layout.last - layout.first]
    around = (0, 0) * (last.dim() - 1) + (layout.first, rows - layout.last)
    return y, torch.nn.functional.pad(last, around)


def _run_conv_ssd(name, tensors, options, final_state, recompute, layout, lengths, group):
    xBC, dt, weight, A, bias, Dskip, z, dt_bias, conv_state, state = tensors
    N, G, *options = options
    convolved, *conv_state = _run("conv1d", (xBC, weight, bias, conv_state), (_ACTIVATION["silu"],), final_state,
                                  recompute, layout, lengths, group)
    x, Bm, Cm = convolved.split((convolved.shape[2] - 2 * G * N, G * N, G * N), 2)
    y, *state = _run("ssd", (x.unflatten(2, (dt.shape[2], -1)), dt, A, Bm.unflatten(2, (G, N)), Cm.unflatten(2, (G, N)),
                             Dskip, z, dt_bias, state), tuple(options), final_state, recompute, layout, lengths, group)
    return (y, *conv_state, *state)


@named(f"{_MODULE}.wkv6", state_in="state")
def wkv6(r, k, v, w, u=None, state=None, *, decay="raw", scale=1.0, final_state=False, group=None, lengths=None,
         cu_seqlens=None, segments=0, recompute=False):
    """gt_kernels.torch.wkv6 of tokens on all ranks of `group`."""
    options = (_choice("wkv6", "decay", _DECAY, decay), _float("wkv6", "scale", scale),
               _int("wkv6", "segments", segments))
    return _call("wkv6", (r, k, v, w, u, state), options, final_state, recompute, group, lengths, cu_seqlens)


@named(f"{_MODULE}.ssd", state_in="state", dt_min="dt_limit[0]", dt_max="dt_limit[1]")
def ssd(x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, *, softplus=False, dt_limit=None,
        final_state=False, group=None, lengths=None, cu_seqlens=None, segments=0, recompute=False):
    """gt_kernels.torch.ssd of tokens on all ranks of `group`."""
    options = (_flag("ssd", "softplus", softplus), *_dt_limit("ssd", dt_limit), _int("ssd", "segments", segments))
    return _call("ssd", (x, dt, A, Bm, Cm, Dskip, z, dt_bias, state), options, final_state, recompute, group, lengths,
                 cu_seqlens)


@named(f"{_MODULE}.conv1d", state_in="state")
def conv1d(x, weight, bias=None, state=None, *, activation=None, final_state=False, group=None, lengths=None,
           cu_seqlens=None):
    """gt_kernels.torch.conv1d of tokens on all ranks of `group`."""
    options = (_choice("conv1d", "activation", _ACTIVATION, activation),)
    return _call("conv1d", (x, weight, bias, state), options, final_state, False, group, lengths, cu_seqlens)


@named(f"{_MODULE}.conv_ssd", state_in="state", conv_state_in="conv_state", dt_min="dt_limit[0]", dt_max="dt_limit[1]")
def conv_ssd(xBC, dt, weight, A, bias=None, Dskip=None, z=None, dt_bias=None, conv_state=None, state=None, *,
             state_size, groups=1, softplus=False, dt_limit=None, final_state=False, group=None, lengths=None,
             cu_seqlens=None, segments=0, recompute=False):
    """gt_kernels.torch.conv_ssd of tokens on all ranks of `group`.  With several ranks the output of the convolution is
    kept for backward."""
    options = (_int("conv_ssd", "state_size", state_size), _int("conv_ssd", "groups", groups),
               _flag("conv_ssd", "softplus", softplus), *_dt_limit("conv_ssd", dt_limit),
               _int("conv_ssd", "segments", segments))
    return _call("conv_ssd", (xBC, dt, weight, A, bias, Dskip, z, dt_bias, conv_state, state), options, final_state,
                 recompute, group, lengths, cu_seqlens)


def pack(seq_idx, *, group=None):
    """Returns (cu_seqlens, lengths) for the functions above.  seq_idx [T] or [1,T], int32 or int64, has the sequence of
    each of this rank's tokens; T may differ between ranks.  A sequence ends where seq_idx changes, as in mamba_ssm.
    The call waits for two exchanges, so make it once for all layers."""
    function = f"{_MODULE}.pack"
    group, _, ranks = _members(function, group)
    if not isinstance(seq_idx, torch.Tensor) or seq_idx.dtype not in (torch.int32, torch.int64) \
            or seq_idx.dim() not in (1, 2) or (seq_idx.dim() == 2 and len(seq_idx) != 1):
        what = [list(seq_idx.shape), seq_idx.dtype] if isinstance(seq_idx, torch.Tensor) else type(seq_idx)
        refuse(function, f"seq_idx is {what}: must be [T] or [1,T], int32 or int64")
    mine = seq_idx.flatten().tolist()
    lengths = [one for one, in _all([len(mine)], group, ranks, seq_idx.device)]
    longest = max(lengths)
    every = _all(mine + [0] * (longest - len(mine)), group, ranks, seq_idx.device) if longest else [[]] * ranks
    whole = [number for part, length in zip(every, lengths) for number in part[:length]]
    changes = [i for i in range(1, len(whole)) if whole[i] != whole[i - 1]]
    return torch.tensor([0, *changes, len(whole)], dtype=torch.int32), tuple(lengths)
