"""PyTorch modules on gt_kernels.torch.  Their parameters have the names and shapes of the original packages' modules.

    from gt_kernels.nn import Mamba2
    block = Mamba2(768).cuda()
    y = block(x)                                  # training: x [B,T,768]
    with torch.no_grad():
        cache = block.new_cache(batch)
        y = block(prompt, cache)                  # prefill
        y = block(token, cache)                   # then single tokens, up to 16 at a time

Activations are float32, bfloat16 or float16; states are float32.  Packed sequences of different lengths have batch 1
and cu_seqlens.  A module raises gt_kernels.ArgumentError or UnsupportedError for a call that it cannot do.  A
constructor raises ValueError.
"""

from ._mamba import Mamba, Mamba2
from ._norms import LayerNormGated, RMSNorm, RMSNormGated
from ._rwkv6 import HybridBlock, RWKV6TimeMix

__all__ = ["HybridBlock", "LayerNormGated", "Mamba", "Mamba2", "RMSNorm", "RMSNormGated", "RWKV6TimeMix"]
