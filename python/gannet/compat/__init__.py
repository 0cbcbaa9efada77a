"""Drop-ins for FlashMLA, DeepGEMM's MQA logits and FlashInfer's MLA, each a module with the peer's names, argument order,
defaults, returned views and error types: flash_mla, deep_gemm, flashinfer. They need PyTorch. What a peer has and Gannet does
not raises NotImplementedError with its name."""

import importlib
import sys

_PEERS = ("flash_mla", "deep_gemm", "flashinfer")


def install(*peers):
    """Puts the drop-ins in place of the peers for this process: ``gannet.compat.install()`` for all, or by name.

    Where a peer is installed, its module stays and gets our functions under their names (so that the rest of it, such as
    deep_gemm's GEMMs, is there); else our module stands in `sys.modules` under its name. Code that has imported a peer's function
    before keeps that one. Returns {"flash_mla.flash_mla_with_kvcache": "replaced", ...} ("replaced" or "provided").
    """
    done = {}
    for peer in peers or _PEERS:
        if peer not in _PEERS:
            raise ValueError(f"peer is {peer!r}; accepted: {', '.join(_PEERS)}")
        ours = importlib.import_module(f"{__name__}.{peer}")
        parts = {peer: ours}
        if peer == "flashinfer":
            parts.update(
                {
                    "flashinfer.mla": ours.mla,
                    "flashinfer.prefill": ours.prefill,
                    "flashinfer.decode": ours.decode_module,
                    "flashinfer.cascade": ours.cascade,
                }
            )
        provided = False
        try:
            importlib.import_module(peer)
        except ImportError:
            provided = True
        for name, module in parts.items():
            if provided:
                sys.modules[name] = module
            else:
                try:
                    target = importlib.import_module(name)
                except ImportError:
                    continue
            for member, value in public(module).items():
                if not provided:
                    setattr(target, member, value)
                done[f"{name}.{member}"] = "provided" if provided else "replaced"
        if provided and peer == "flashinfer":
            ours.decode = ours.decode_module  # flashinfer.decode is a module there
    return done


def public(module):
    """The functions and classes that a drop-in offers, by name."""
    return {
        n: v
        for n, v in vars(module).items()
        if not n.startswith("_")
        and (isinstance(v, type) or callable(v))
        and getattr(v, "__module__", "").startswith(__name__ + ".")
        and not getattr(v, "__module__", "").endswith("._torch")
    }
