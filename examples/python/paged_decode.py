"""One decode step of two requests over a paged latent cache, from NumPy alone: python examples/python/paged_decode.py"""

import numpy as np

import gannet

HEADS, PAGE, SCALE = 16, 64, 192**-0.5  # the scale is that of the model's q and k widths, 128 + 64

pool = gannet.LatentPool(num_layers=1, num_pages=8, format="fp32", page_size=PAGE)
cache = pool.layer(0)
allocator = gannet.PageAllocator(pool.num_pages)  # never hands out page 0
table = gannet.PageTable(rows=2, max_pages=2)
lens = np.array([100, 30], np.int32)
pages = [allocator.acquire(gannet.pages_for(n, PAGE)) for n in lens]
for request, list_of_pages in enumerate(pages):
    table.set_row(request, list_of_pages)

rng = np.random.default_rng(0)
for request, n in enumerate(lens):  # what prefill would have written: normalised kv_a and rotated k_pe, a slot a token
    position = np.arange(n)
    slots = np.asarray(pages[request].ids)[position // PAGE] * PAGE + position % PAGE
    latent, rope = rng.standard_normal((n, 512), np.float32), rng.standard_normal((n, 64), np.float32)
    gannet.latent_write(latent, rope, slots, cache)

q = rng.standard_normal((2, HEADS, 576), np.float32)  # absorbed: [Wk^T q_nope | rotated q_pe]
out, lse = gannet.mla_decode(q, cache, table, lens, softmax_scale=SCALE, return_lse=True)
print(f"{gannet.last_impl('mla_decode')}: out {out.shape}, lse {lse.shape}, out[0, 0, :3] = {out[0, 0, :3]}")
assert out.shape == (2, HEADS, 512) and np.isfinite(out).all()
