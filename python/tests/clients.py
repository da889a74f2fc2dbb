"""Runs models of transformers that use mamba_ssm and causal_conv1d, and fla's RWKV-6, on gt_kernels.compat.install().

    python clients.py [--device cpu|cuda] [FAMILY...]

Every family is a small random model, in float32 and in bfloat16.  It trains, reads padded and packed sequences, and
generates.  One process runs all models on gt_kernels.  A second process does not import gt_kernels: there the models
run the plain PyTorch code of transformers, once in the same dtype and once in float64.  That code casts to float32 in
places.  The float64 run redirects these casts, so its results are exact compared with the others.

The error of a tensor is the norm of its difference from the float64 tensor, over the norm of the float64 tensor.  The
error on gt_kernels must be at most four times the error of the plain code, plus four roundings.  Both programs round
nearly the same number of intermediate values, so their errors differ only by chance, at any depth: the largest quotient
of 500 tensors was 2.5.  A wrong term exceeds the bound, which is about 5e-6 in float32.  The bound for all gradients
comes from the plain code's gradient with the largest error, because the error of a single gradient may be small by
chance.

The first process counts the client's calls of gt_kernels.compat, and the C calls of gt_kernels.  Both numbers must be
those of expected_calls, so a model that falls back to plain PyTorch fails.  transformers 5 calls an installed package
on every device, so no device check needs a patch on a CPU.

On a GPU the head and state sizes are those of released models.  Each call of gt_kernels.compat in generation is also
captured in a CUDA graph and replayed.  The replay must give the same bits and the same states.  .ci/long runs this
program on the CPU.  The last line counts the cases.
"""

import argparse
import collections
import contextlib
import functools
import math
import os
import subprocess
import sys
import tempfile
import types
import unittest.mock

import torch

MAMBA = ("mamba", "falcon_mamba", "jamba", "zamba")
MAMBA2 = ("mamba2", "falcon_h1", "bamba", "zamba2", "granitemoehybrid", "nemotron_h")
FAMILIES = (*MAMBA, *MAMBA2, "rwkv6")
DTYPES = (torch.float32, torch.bfloat16)
VOCABULARY = 61


class Sizes:
    """Small on a CPU.  On a GPU the tensor-core kernels take the scans of these heads and states."""

    def __init__(self, device):
        is_cuda = device == "cuda"
        self.hidden, self.head, self.state, self.chunk = (256, 64, 128, 64) if is_cuda else (32, 8, 16, 8)
        self.heads, self.groups = 2 * self.hidden // self.head, 2
        self.tokens, self.prompt = (300, 150) if is_cuda else (37, 19)


NEW_TOKENS = 6  # of generate
PARTS = (1, 1, 1, 5, 1, 1)  # of serve, after the prompt


def config(family, s):
    """The configuration of a model.  Each token goes to all experts, since rounding may change a choice among them."""
    from transformers import AutoConfig
    common = {"vocab_size": VOCABULARY, "hidden_size": s.hidden, "initializer_range": 0.5 * s.hidden ** -0.5,
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 3 * s.hidden // 2}
    heads = {"mamba_n_heads": s.heads, "mamba_d_head": s.head, "mamba_n_groups": s.groups, "mamba_d_state": s.state,
             "mamba_chunk_size": s.chunk}
    hybrid = {**attention, "num_key_value_heads": 4, "num_hidden_layers": 3,
              "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
    own = {
        "mamba": {"num_hidden_layers": 2},
        "falcon_mamba": {"num_hidden_layers": 2},
        "jamba": {**attention, "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
                  "num_experts_per_tok": 4},
        "zamba": hybrid,
        "mamba2": {"num_hidden_layers": 2, "num_heads": s.heads, "head_dim": s.head, "n_groups": s.groups,
                   "state_size": s.state, "chunk_size": s.chunk},
        "falcon_h1": {**attention, **heads, "num_hidden_layers": 2, "mamba_d_ssm": 2 * s.hidden},
        "bamba": {**attention, **heads, "num_hidden_layers": 3, "attn_layer_indices": [1]},
        "zamba2": {**hybrid, "n_mamba_heads": s.heads, "mamba_ngroups": s.groups, "mamba_d_state": s.state,
                   "chunk_size": s.chunk},
        "granitemoehybrid": {**attention, **heads, "num_hidden_layers": 3, "num_local_experts": 4,
                             "num_experts_per_tok": 4, "shared_intermediate_size": s.hidden,
                             "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "nemotron_h": {**attention, "head_dim": s.hidden // 4, "mamba_num_heads": s.heads, "mamba_head_dim": s.head,
                       "n_groups": s.groups, "ssm_state_size": s.state, "chunk_size": s.chunk, "n_routed_experts": 4,
                       "num_experts_per_tok": 4, "moe_intermediate_size": s.hidden,
                       "moe_shared_expert_intermediate_size": s.hidden,
                       "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]},
    }
    return AutoConfig.for_model(family, **common, **own[family])


class Rwkv6(torch.nn.Module):
    """A layer with the RWKV-6 functions of flash-linear-attention.  Its own models need Triton, which needs a GPU."""

    def __init__(self, sizes):
        super().__init__()
        self.shape = sizes.heads, sizes.head
        inner = sizes.heads * sizes.head
        self.embeddings = torch.nn.Embedding(VOCABULARY, sizes.hidden)
        self.projection = torch.nn.Linear(sizes.hidden, 4 * inner)
        self.A_log = torch.nn.Parameter(torch.randn(self.shape))  # the bonus
        self.head = torch.nn.Linear(inner, VOCABULARY)
        self.has_kernels = True

    def forward(self, ids, use_cache):
        r, k, v, w = self.projection(self.embeddings(ids)).unflatten(-1, (4, *self.shape)).unbind(2)
        w = -w.exp()
        if self.has_kernels:
            from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
            y = (chunk_rwkv6 if self.training else fused_recurrent_rwkv6)(r, k, v, w, self.A_log)[0]
        else:
            from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
            y = naive_recurrent_rwkv6(*(value.transpose(1, 2) for value in (r, k, v, w)), self.A_log)[0].transpose(1, 2)
        return types.SimpleNamespace(logits=self.head(y.flatten(-2)))


def make(family, sizes, dtype):
    """A model on the CPU whose weights are numbers of dtype.  Noise on all parameters makes their channels differ, so
    that a wrong order of channels shows.  Experts run one by one: the grouped product of PyTorch refuses float64."""
    from transformers import AutoModelForCausalLM
    torch.manual_seed(3)
    if family == "rwkv6":
        return Rwkv6(sizes).to(dtype)
    model = AutoModelForCausalLM.from_config(config(family, sizes), experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", "dt_proj.bias", "dt_proj_bias")):
                parameter.zero_()  # released models have a small dt; here outputs must depend on states as on D
            if "conv1d" in name:
                parameter.mul_(3)  # larger B and C
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(dtype)


def count_layers(model):
    """The layers that have a scan."""
    return sum(hasattr(module, "A_log") for module in model.modules())


# ---- cases ----
#
# A case is a function of a model, inputs, and the case's results on gt_kernels (None: this process makes them).

class Inputs:
    def __init__(self, sizes, device):
        numbers = torch.Generator().manual_seed(7)
        self.prompt = sizes.prompt
        self.ids = torch.randint(2, VOCABULARY, (2, sizes.tokens), generator=numbers).to(device)
        self.weights = torch.randn(2, sizes.tokens, VOCABULARY, generator=numbers, dtype=torch.float64).to(device)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :sizes.prompt // 3] = 0  # padding on the left, as in generation
        self.lengths = [sizes.tokens // 3, sizes.tokens - sizes.tokens // 3]  # of packed sequences


def with_gradients(model, logits, weights):
    model.zero_grad()
    (logits * weights.to(logits.dtype)).sum().backward()
    return {"logits": logits, **{name: parameter.grad for name, parameter in model.named_parameters()
                                 if parameter.grad is not None}}


@contextlib.contextmanager
def norm_after_projection(model):
    """FalconMamba's plain code normalizes dt before the projection.  mamba_inner_fn of mamba_ssm, which the model calls
    when it trains, does so after it.  Within this context the plain code does, too."""
    module, norms = sys.modules[type(model).__module__], [layer.mixer.dt_layernorm for layer in model.backbone.layers]
    scan, normalize = module.mamba_selective_scan, norms[0].forward  # all norms are alike and have no weights

    def scan_normalized(x, dt, *rest, **options):
        return scan(x, normalize(dt.transpose(1, 2)).transpose(1, 2), *rest, **options)

    with contextlib.ExitStack() as stack:
        for norm in norms:
            stack.enter_context(unittest.mock.patch.object(norm, "forward", lambda x: x))
        stack.enter_context(unittest.mock.patch.object(module, "mamba_selective_scan", scan_normalized))
        yield


def train(model, inputs, other):
    is_falcon = other is not None and hasattr(model, "config") and model.config.model_type == "falcon_mamba"
    with norm_after_projection(model) if is_falcon else contextlib.nullcontext():
        return with_gradients(model.train(), model(inputs.ids, use_cache=False).logits, inputs.weights)


def evaluate(model, inputs, _):
    """Gradients in evaluation mode, where the models do not call fused functions."""
    return with_gradients(model.eval(), model(inputs.ids, use_cache=False).logits, inputs.weights)


def padded(model, inputs, _):
    logits = model.eval()(inputs.ids, attention_mask=inputs.mask, use_cache=False).logits * inputs.mask[..., None]
    return with_gradients(model, logits, inputs.weights)


def packed(model, inputs, other):
    """Two sequences in one row.  The plain code refuses packed sequences, so it reads them one by one."""
    model.train()
    ids = inputs.ids[:1]
    if other is None:
        places = torch.cat([torch.arange(length) for length in inputs.lengths])[None].to(ids.device)
        numbers = torch.arange(2, dtype=torch.int32).repeat_interleave(torch.tensor(inputs.lengths))[None]
        numbers = numbers.to(ids.device)
        options = {"position_ids": places, "seq_idx": numbers, "use_cache": False}
        if model.config.model_type == "granitemoehybrid":  # its masks of attention are not made from position_ids
            is_own = (numbers[0, :, None] == numbers[0]).tril()
            options["attention_mask"] = {"full_attention": is_own[None, None], "linear_attention": None}
        if model.config.model_type == "mamba2":  # its causal model does not pass seq_idx on
            logits = model.lm_head(model.backbone(ids, **options)[0].to(model.lm_head.weight.dtype)).float()
        else:
            logits = model(ids, **options).logits
    else:
        logits = torch.cat([model(part, use_cache=False).logits for part in ids.split(inputs.lengths, 1)], 1)
    return with_gradients(model, logits, inputs.weights[:1])


@torch.no_grad()
def serve(model, inputs, _):
    """Reads a prompt, decodes, reads five tokens at once into the same cache, and decodes again."""
    from transformers import DynamicCache
    model.eval()
    cache, logits, end = DynamicCache(config=model.config), [], 0
    for count in (inputs.prompt, *PARTS):
        places = torch.arange(end, end + count, device=inputs.ids.device)[None]
        end += count
        logits.append(model(inputs.ids[:, places[0]], position_ids=places, cache=cache, use_cache=True).logits)
    return {"logits": torch.cat(logits, 1)}


@torch.no_grad()
def generate(model, inputs, other):
    """Greedy generation from a padded prompt.  other: the results on gt_kernels, whose tokens the plain code then
    takes, or None: the model chooses its tokens."""
    ids, mask = inputs.ids[:, :inputs.prompt], inputs.mask[:, :inputs.prompt]

    def choose(sequences, scores):
        at = sequences.shape[1] - inputs.prompt
        return torch.full_like(scores, -math.inf).scatter(1, other["tokens"][:, at:at + 1].to(ids.device), 0)

    out = model.eval().generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True,
                                output_logits=True, return_dict_in_generate=True,
                                logits_processor=[choose] if other else None)
    logits, tokens = torch.stack(out.logits, 1), out.sequences[:, inputs.prompt:]
    right = other["tokens"].to(ids.device) if other else logits.argmax(-1)
    if tokens.shape[1] != NEW_TOKENS or not torch.equal(tokens, right):
        raise AssertionError(f"generated {tokens.tolist()}, not {right.tolist()}")
    return {"logits": logits, "tokens": tokens}


CASES = (train, evaluate, padded, packed, serve, generate)


def cases(family):
    """Only models with Mamba-2 pass seq_idx to their layers."""
    if family == "rwkv6":
        return [train, evaluate]
    return [case for case in CASES if case is not packed or family in MAMBA2]


def expected_calls(family, case):
    """Returns {name: calls in a layer}, for functions of gt_kernels.compat and for C operators."""
    if family == "rwkv6":
        return {"chunk_rwkv6" if case is train else "fused_recurrent_rwkv6": 1, "wkv6_forward": 1, "wkv6_backward": 1}
    is_mamba2, heads = family in MAMBA2, 2 if family == "zamba" else 1  # Zamba scans its two heads apart
    function, scan = ("mamba_chunk_scan_combined", "ssd") if is_mamba2 else ("selective_scan_fn", "selective_scan")
    if case in (serve, generate):
        reads, steps = (2, PARTS.count(1)) if case is serve else (1, NEW_TOKENS - 1)
        return {"causal_conv1d_fn": reads, "conv1d_infer": reads, function: reads * heads,
                f"{scan}_infer": reads * heads, "causal_conv1d_update": steps, "conv1d_step": steps,
                "selective_state_update": steps * heads, f"{scan}_step": steps * heads}
    calls, operators = {"causal_conv1d_fn": 1, function: heads}, {"conv1d": 1, scan: heads}
    if case in (train, packed) and is_mamba2:
        calls, operators = {"mamba_split_conv1d_scan_combined": 1}, {"conv_ssd": 1}
        operators.update({"norm_gate": 1} if family != "falcon_h1" else {})
    elif case is train and family in ("mamba", "falcon_mamba"):
        calls = {"mamba_inner_fn": 1}
        operators.update({"norm_gate": 3} if family == "falcon_mamba" else {})
    return {**calls, **{f"{name}_{way}": count for name, count in operators.items() for way in ("forward", "backward")}}


def on_cpu(results):
    return {name: value.detach().cpu() for name, value in results.items()}


# ---- the process on gt_kernels ----

class Watch:
    """Counts calls by clients of gt_kernels.compat, and C calls.  Made before install(), which gives out the functions.

    captures: also captures each call in a CUDA graph, restores the states that the call changed, and replays it."""

    FUNCTIONS = ("causal_conv1d_fn", "causal_conv1d_update", "chunk_rwkv6", "fused_recurrent_rwkv6",
                 "mamba_chunk_scan_combined", "mamba_inner_fn", "mamba_split_conv1d_scan_combined", "selective_scan_fn",
                 "selective_state_update")

    def __init__(self):
        from gt_kernels import compat
        from gt_kernels.torch._engine import Engine
        self.counts, self.captures, self.is_inside, execute = collections.Counter(), False, False, Engine.execute

        def counted(engine, call, plan, tensors):
            if not self.captures or not torch.cuda.is_current_stream_capturing():
                self.counts[f"{engine.name}_{call}"] += 1
            return execute(engine, call, plan, tensors)

        Engine.execute = counted
        for name in self.FUNCTIONS:
            setattr(compat, name, self.wrap(name, getattr(compat, name)))

    def wrap(self, name, function):
        @functools.wraps(function)
        def wrapped(*arguments, **options):
            if self.is_inside:  # a function of compat calls another one
                return function(*arguments, **options)
            self.counts[name] += 1
            self.is_inside = True
            try:
                return (self.capture if self.captures else lambda call: call())(
                    functools.partial(function, *arguments, **options))
            finally:
                self.is_inside = False
        return wrapped

    def capture(self, call):
        tensors = [value for value in (*call.args, *call.keywords.values()) if isinstance(value, torch.Tensor)]
        before = [(tensor, tensor._version, tensor.clone()) for tensor in tensors]
        right = call()
        changed = [(tensor, copy, tensor.clone()) for tensor, version, copy in before if tensor._version != version]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        for _ in range(2):
            for tensor, copy, _ in changed:
                tensor.copy_(copy)
            graph.replay()
            pairs = zip(*(value if isinstance(value, tuple) else (value,) for value in (found, right)))
            if not all(torch.equal(a, b) for a, b in (*pairs, *((tensor, after) for tensor, _, after in changed))):
                raise AssertionError(f"a replayed call of {call.func.__name__} differs from the first one")
        return right

    def take(self):
        counts, self.counts = dict(self.counts), collections.Counter()
        return counts


def run(options):
    """{(family, dtype, name of a case): its results on gt_kernels, or a text that says what is wrong}"""
    from gt_kernels import compat
    watch, results = Watch(), {}
    provided = compat.install()
    if provided != ["causal_conv1d", "mamba_ssm"]:
        raise SystemExit(f"installed packages stand in the way of gt_kernels, which provides only {provided}")
    sizes = Sizes(options.device)
    inputs = Inputs(sizes, options.device)
    for family in options.families:
        for dtype in DTYPES:
            model = make(family, sizes, dtype).to(options.device)
            for case in cases(family):
                watch.captures = options.device == "cuda" and case in (serve, generate)
                right = {name: count * count_layers(model) for name, count in expected_calls(family, case).items()}
                try:
                    out = case(model, inputs, None)
                    found = watch.take()
                    wrong = "" if found == right else f"made the calls {found}, not {right}"
                except (AssertionError, RuntimeError, TypeError, ValueError) as problem:
                    watch.take()
                    wrong = f"{type(problem).__name__}: {problem}"
                results[family, dtype, case.__name__] = wrong or on_cpu(out)
    return results


# ---- the process without gt_kernels ----

@contextlib.contextmanager
def in_float64():
    """Inside this context, code that asks for float32 computes in float64."""
    before = torch.get_default_dtype()
    with unittest.mock.patch.object(torch, "float32", torch.float64), \
            unittest.mock.patch.object(torch, "float", torch.float64), \
            unittest.mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def errors(results, exact):
    """{name: error}, of all floating tensors."""
    if results.keys() != exact.keys():
        raise AssertionError(f"results {sorted(results.keys() ^ exact.keys())} are missing in one of two runs")
    found = {}
    for name, right in exact.items():
        if right.dtype != torch.int64:
            if right.dtype != torch.float64:
                raise AssertionError(f"{name} has dtype {right.dtype} in the float64 run")
            size = right.norm().item()
            difference = (results[name].double() - right).norm().item()
            found[name] = difference / size if size else difference
    return found


def judge(found, plain, dtype):
    """(the largest error over its bound, a text about it)"""
    worst = max(plain.values()) if len(plain) > 1 else 0
    bounds = {name: 4 * (plain[name] if name == "logits" else worst) + 4 * torch.finfo(dtype).eps for name in plain}
    name = max(found, key=lambda name: found[name] / bounds[name] if math.isfinite(found[name]) else math.inf)
    share = found[name] / bounds[name] if math.isfinite(found[name]) else math.inf
    return share, f"{name}: error {found[name]:.2g}, bound {bounds[name]:.2g}; plain code {plain[name]:.2g}"


def compare(options, results):
    sizes, passed, failed = Sizes(options.device), 0, 0
    inputs = Inputs(sizes, options.device)
    for family in options.families:
        for dtype in DTYPES:
            model = make(family, sizes, dtype).to(options.device)
            model.has_kernels = False  # for Rwkv6
            others = {case: results[family, dtype, case.__name__] for case in cases(family)}

            def run_plain():
                return {case: on_cpu(case(model, inputs, other)) for case, other in others.items()
                        if isinstance(other, dict)}

            plain = run_plain()
            model.double()
            with in_float64():
                exact = run_plain()
            for case, other in others.items():
                share, text = math.inf, other
                if isinstance(other, dict):
                    share, text = judge(errors(other, exact[case]), errors(plain[case], exact[case]), dtype)
                passed, failed = (passed + 1, failed) if share <= 1 else (passed, failed + 1)
                word = "ok" if share <= 1 else "FAILED"
                print(f"{word}: {family} {str(dtype)[6:]} {case.__name__}: {text}", flush=True)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed > 0 or passed == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compare", help=argparse.SUPPRESS)  # the file of the process on gt_kernels
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    options = parser.parse_args()
    options.families = options.families or FAMILIES
    for family in options.families:
        if family not in FAMILIES:
            parser.error(f"FAMILY {family}: must be one of {', '.join(FAMILIES)}")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # the second process warns that the packages are missing
    torch.backends.cudnn.allow_tf32 = False  # the plain convolution in float32 would round to 10 bits
    if options.compare:
        return compare(options, torch.load(options.compare, weights_only=False))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "results")
        torch.save(run(options), path)
        return subprocess.run([sys.executable, *sys.argv, "--compare", path]).returncode


if __name__ == "__main__":
    sys.exit(main())
