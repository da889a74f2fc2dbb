"""Generates text tokens with a Mamba-2 checkpoint in the layout of transformers, on gt_kernels.nn.

    python mamba2.py FOLDER 510 3158 253 --tokens 20       reads a prompt as token numbers, prints it and new tokens

FOLDER holds config.json and one or more .safetensors files of a Mamba2ForCausalLM, such as AntonV/mamba2-130m-hf.  Each
new token is the one with the largest logit.  The first call reads the whole prompt; each later call reads a single
token.
"""

import argparse
import glob
import json
import os

import torch
from torch import nn

from gt_kernels.nn import Mamba2, RMSNorm


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_epsilon"]
        self.norm = RMSNorm(width, eps)
        self.mixer = Mamba2(width, d_state=config["state_size"], d_conv=config["conv_kernel"], expand=config["expand"],
                            headdim=config["head_dim"], ngroups=config["n_groups"], bias=config["use_bias"],
                            conv_bias=config["use_conv_bias"], norm_eps=eps,
                            dt_limit=tuple(map(float, config["time_step_limit"])))

    def forward(self, x, cache=None):
        return x + self.mixer(self.norm(x), cache)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.backbone.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.backbone.norm_f = RMSNorm(config["hidden_size"], config["layer_norm_epsilon"])
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def new_cache(self, batch):
        return [layer.mixer.new_cache(batch) for layer in self.backbone.layers]

    def forward(self, tokens, cache=None):
        x = self.backbone.embeddings(tokens)
        for i, layer in enumerate(self.backbone.layers):
            x = layer(x, None if cache is None else cache[i])
        return self.lm_head(self.backbone.norm_f(x))


def load(folder, device="cpu", dtype=torch.float32):
    """The model of a checkpoint.  Every tensor of the checkpoint must belong to a parameter of the model, and vice
    versa."""
    from safetensors.torch import load_file
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    weights = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        weights.update(load_file(path))
    # Older versions of transformers use another name; tied weights are a single tensor in the checkpoint.
    names = {"backbone.embedding.weight": "backbone.embeddings.weight"}
    weights = {names.get(name, name): value for name, value in weights.items()}
    weights.setdefault("lm_head.weight", weights["backbone.embeddings.weight"])
    model = Model(config)
    model.load_state_dict(weights)
    return model.to(device, dtype).eval()


@torch.no_grad()
def generate(model, tokens, count):
    """Returns tokens [B,T] followed by `count` new tokens of each row."""
    cache = model.new_cache(len(tokens))
    logits = model(tokens, cache)
    for i in range(count):
        new = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], 1)
        if i + 1 < count:
            logits = model(new, cache)
    return tokens


def main():
    parser = argparse.ArgumentParser(description="generates with a Mamba-2 checkpoint in the layout of transformers")
    parser.add_argument("folder")
    parser.add_argument("prompt", type=int, nargs="+", help="numbers of the prompt's tokens")
    parser.add_argument("--tokens", type=int, default=20, help="how many new ones")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    args = parser.parse_args()
    model = load(args.folder, args.device, getattr(torch, args.dtype))
    found = generate(model, torch.tensor([args.prompt], device=args.device), args.tokens)
    print(*found[0].tolist())


if __name__ == "__main__":
    main()
