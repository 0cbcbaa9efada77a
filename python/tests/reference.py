"""The contract in NumPy's float64, by loops that share nothing with the library (docs/semantics.md)."""

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16


def attend(q, keys, scale, sink=None, latent_dim=512):
    """q [H, R + P], keys [n, R + P]: (out [H, R], lse [H], largest score [H])."""
    q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
    heads = q.shape[0]
    if len(keys) == 0:
        return np.zeros((heads, latent_dim)), np.full(heads, -np.inf), np.full(heads, -np.inf)
    x = scale * q @ keys.T
    top = x.max(axis=1)
    p = np.exp(x - top[:, None])
    total = p.sum(axis=1)
    lse = top + np.log(total)
    if sink is not None:
        with np.errstate(over="ignore"):
            total = total + np.exp(np.asarray(sink, np.float64) - top)
    return p @ keys[:, :latent_dim] / total[:, None], lse, top


def row_keys(cache, table, length, page_size):
    """Keys 0 .. length - 1 of a request; cache [pages, page_size, width]."""
    slots = [table[t // page_size] * page_size + t % page_size for t in range(length)]
    return np.asarray(cache, np.float64).reshape(-1, cache.shape[-1])[slots]


def bound(kind, length, rows, j):
    if length <= 0:
        return 0
    return max(
        0, {"causal_full": length - (rows - 1) + j, "causal_from_first": length + j, "uniform_block": length}[kind]
    )


def ragged(q, k, v, cu_q, cu_k, scale, causal):
    """q [rows, H, D], k [n, H, D], v [n, H, V]: (out, lse)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.zeros((q.shape[0], q.shape[1], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for r in range(len(cu_q) - 1):
        nq, nk = cu_q[r + 1] - cu_q[r], cu_k[r + 1] - cu_k[r]
        for a in range(nq):
            n = min(nk, a + nk - nq + 1) if causal else nk
            if n <= 0:
                continue
            keys = slice(cu_k[r], cu_k[r] + n)
            x = scale * np.einsum("hd,nhd->hn", q[cu_q[r] + a], k[keys])
            top = x.max(axis=1, keepdims=True)
            p = np.exp(x - top)
            out[cu_q[r] + a] = np.einsum("hn,nhv->hv", p, v[keys]) / p.sum(axis=1, keepdims=True)
            lse[cu_q[r] + a] = top[:, 0] + np.log(p.sum(axis=1))
    return out, lse


def index_scores(q, weights, keys):
    """q [heads, D], weights [heads], keys [n, D]: [n]."""
    dots = np.maximum(np.asarray(q, np.float64) @ np.asarray(keys, np.float64).T, 0)
    return np.asarray(weights, np.float64) @ dots


def best(scores, k):
    """Positions of the k largest, ascending; the smaller position first among equals."""
    n = len(scores)
    return sorted(sorted(range(n), key=lambda i: (-scores[i], i))[:k])


def pack656(rows):
    """fp rows [n, 576] as 656 bytes each, and what they stand for: e4m3 with power-of-two scales of 128, bf16 rope."""
    rows = np.asarray(rows, np.float32)
    bytes_, values = np.zeros((len(rows), 656), np.uint8), np.zeros((len(rows), 576))
    for i, row in enumerate(rows):
        for t in range(4):
            part = row[128 * t : 128 * t + 128]
            scale = np.float32(2.0 ** np.ceil(np.log2(max(np.abs(part).max() / 448, 1e-4))))
            e = (part / scale).astype(E4M3)
            bytes_[i, 128 * t : 128 * t + 128] = e.view(np.uint8)
            bytes_[i, 512 + 4 * t : 516 + 4 * t] = np.frombuffer(scale.tobytes(), np.uint8)
            values[i, 128 * t : 128 * t + 128] = e.astype(np.float64) * scale
        rope = row[512:].astype(BF16)
        bytes_[i, 528:] = rope.view(np.uint8)
        values[i, 512:] = rope.astype(np.float64)
    return bytes_, values


def pack_index(keys, page_size=64):
    """fp keys [n, D], n a multiple of page_size, as planar pages, and what they stand for."""
    keys = np.asarray(keys, np.float32)
    n, d = keys.shape
    scale = (np.maximum(np.abs(keys).max(axis=1), 1e-4) / 448).astype(np.float32)
    e = (keys / scale[:, None]).astype(E4M3)
    pages = np.zeros((n // page_size, page_size * (d + 4)), np.uint8)
    for p in range(n // page_size):
        rows = slice(p * page_size, (p + 1) * page_size)
        pages[p, : page_size * d] = e[rows].view(np.uint8).reshape(-1)
        pages[p, page_size * d :] = np.frombuffer(scale[rows].tobytes(), np.uint8)
    return pages, e.astype(np.float64) * scale[:, None].astype(np.float64)
