"""The attention of a DSA layer through a backend: a prompt in two chunks, then decode, one selection for two layers.

python examples/python/dsa_layer.py
"""

import numpy as np

import gannet

HEADS, INDEX_HEADS, TOPK, PAGES = 16, 8, 64, 16
rng = np.random.default_rng(0)

latent = gannet.LatentPool(num_layers=2, num_pages=PAGES, format="bf16")
index = gannet.IndexKPool(layers=[0], num_pages=PAGES)  # layer 1 shares layer 0's selection and has no index keys
backend = gannet.Backend(
    "dsa",
    num_heads=HEADS,
    softmax_scale=192**-0.5,
    max_context_len=PAGES * 64,
    q_lora_rank=1536,
    index_num_heads=INDEX_HEADS,
    index_topk=TOPK,
)
backend.bind([latent.layer(0), latent.layer(1)], [index.layer(0), None])

table = gannet.PageTable(rows=1, max_pages=8)
pages = gannet.PageAllocator(PAGES).acquire(gannet.pages_for(400))
table.set_row(0, pages)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


def layers(rows):
    """What a model computes for its rows, in place of projections random numbers."""
    kv = (normal(rows, 512), normal(rows, 64), normal(rows, 128))
    selection = backend.select(0, normal(rows, INDEX_HEADS, 128), normal(rows, INDEX_HEADS), kv=kv)
    for layer in range(2):
        own = None if layer == 0 else (normal(rows, 512), normal(rows, 64))
        out = backend.attend(layer, normal(rows, HEADS, 576), selection=selection, kv=own)
    return out, selection


done = 0
for chunk in (200, 150):
    backend.prepare([done + chunk], table, prefix_lens=[done], extend_lens=[chunk])
    layers(chunk)
    done += chunk
for _ in range(3):
    done += 1
    backend.prepare([done], table)
    out, (slots, lens) = layers(1)
print(f"{done} tokens, the last row attends to {lens[0]} of them, in pages {sorted(set(slots[0] // 64))}")
print("implementations:", backend.implementations)
assert lens[0] == TOPK and out.shape == (1, HEADS, 512) and np.isfinite(out).all()
