"""transformers' classes with our attention: the golden files of models/tiny-dsv32, eager attention, generation, padding, memory."""

import json
import pathlib

import numpy as np
import pytest

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
import gannet.integrations.transformers as integration  # noqa: E402

MODEL = pathlib.Path(__file__).parents[2] / "models" / "tiny-dsv32"
GOLDEN = json.loads((MODEL / "golden.json").read_text())
DEVICE = "cuda" if gannet.cuda_device_count() else "cpu"


def load(attention, dtype=torch.float32):
    return (
        transformers.DeepseekV32ForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation=attention)
        .eval()
        .to(DEVICE)
    )


@pytest.fixture(scope="module")
def golden():
    return safetensors_torch.load_file(MODEL / "golden.safetensors")


@pytest.fixture(scope="module")
def model():
    return integration.enable(load("gannet"))


@pytest.mark.parametrize("name", ["short", "alice", "holmes", "medium", "long"])
def test_logits_are_the_golden_ones(model, golden, name):
    """fp32 caches and index keys, as the golden run had: the criteria of `gannet verify` (src/engine/golden.h)."""
    ids = golden[f"{name}.ids"].long()[None].to(DEVICE)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float().cpu()
    logprobs = logits.log_softmax(-1)
    want_ids, want = golden[f"{name}.top8_ids"].long(), golden[f"{name}.top8_logprobs"]
    apart = want[:, 0] - want[:, 1] > 0.01
    assert torch.equal(logits.argmax(-1)[apart], want_ids[apart, 0])
    error = (logprobs.gather(1, want_ids) - want).abs().amax(1)
    assert (error < 1e-3).double().mean() >= 0.99 and error.max() < 0.05
    nll = -logprobs[:-1].gather(1, ids[0, 1:, None].cpu()).mean()
    assert abs(nll - GOLDEN[name]["mean_nll"]) < 1e-4 * GOLDEN[name]["mean_nll"]


@pytest.mark.parametrize("name", ["short", "medium"])
def test_greedy_generation_is_the_golden_one(model, golden, name):
    ids = golden[f"{name}.ids"].long()[None].to(DEVICE)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=48,
        min_new_tokens=48,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    assert out.sequences[0, ids.shape[1] :].tolist() == GOLDEN[name]["greedy_ids"]
    cache = next(c for c in (getattr(out, "cache", None), getattr(out, "past_key_values", None)) if c is not None)
    assert isinstance(cache, integration.PagedCache) and cache.get_seq_length() == ids.shape[1] + 47
    ran = integration.implementations(model)
    assert {"sparse_attention", "index_select", "latent_write", "index_k_write"} <= set(ran)
    print("implementations:", ran)


def test_left_padding_changes_nothing(model, golden):
    texts = [golden[f"{n}.ids"].long() for n in ("short", "medium")]
    longest = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(t, (longest - len(t), 0), value=7) for t in texts]).to(DEVICE)
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(t), (longest - len(t), 0)) for t in texts]).to(DEVICE)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    for row, name in zip(out, ("short", "medium")):
        assert row[longest:].tolist() == GOLDEN[name]["greedy_ids"][:8]
    with pytest.raises(ValueError, match="padding on the left"):
        model(ids, attention_mask=mask.flip(1))


def test_chunks_give_what_one_pass_gives(model, golden):
    ids = golden["medium.ids"].long()[None].to(DEVICE)
    cache = integration.PagedCache()
    name = integration._cache_argument(model.model)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = [model(part, use_cache=True, **{name: cache}).logits for part in ids.split(100, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="a batch of 2"):
        model(ids.repeat(2, 1), use_cache=True, **{name: cache})


def test_fp32_greedy_tokens_are_those_of_eager_attention(model, golden):
    eager = load("eager")
    for name in ("short", "medium", "alice"):
        ids = golden[f"{name}.ids"].long()[None].to(DEVICE)
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=32, min_new_tokens=32, do_sample=False)
        options.update(eos_token_id=None, pad_token_id=0)
        want, ours = eager.generate(ids, **options), model.generate(ids, **options)
        assert torch.equal(ours, want), name
        print(f"fp32 {name}: 32 greedy tokens after {ids.shape[1]} equal eager attention's")


def test_bf16_mean_nll_is_within_half_a_percent(golden):
    """Of the golden fp32 run's, and of eager attention's in bf16."""
    ids = golden["long.ids"].long()[None].to(DEVICE)

    def mean_nll(model):
        with torch.no_grad():
            logprobs = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        return -logprobs[:-1].gather(1, ids[0, 1:, None]).mean().item()

    model = integration.enable(load("gannet", torch.bfloat16))
    ours, eager, golden_nll = mean_nll(model), mean_nll(load("eager", torch.bfloat16)), GOLDEN["long"]["mean_nll"]
    print(f"bf16 mean NLL of {ids.shape[1]} tokens: {ours:.6f}, eager {eager:.6f}, golden (fp32) {golden_nll:.6f}")
    print("implementations in bf16:", integration.implementations(model))
    assert abs(ours - golden_nll) < 0.005 * golden_nll
    assert abs(ours - eager) < 0.005 * eager


def tiny(config_class, model_class, **options):
    common = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        kv_lora_rank=128,
        q_lora_rank=48,
        qk_rope_head_dim=32,
        v_head_dim=32,
        qk_nope_head_dim=32,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    config = config_class(**common, **options)
    config._attn_implementation = "eager"
    return model_class(config).eval()


@pytest.mark.parametrize("kind", ["v3", "glm"])
def test_other_classes_equal_their_eager_attention(kind):
    if kind == "v3":
        model = tiny(transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM)
    else:
        if not hasattr(transformers, "GlmMoeDsaForCausalLM"):
            pytest.skip("this transformers has no GlmMoeDsaForCausalLM")
        # 16 heads: of few, all of a key's dot products are often negative, and its score 0, a tie that top-k of PyTorch breaks
        # as it likes.
        model = tiny(
            transformers.GlmMoeDsaConfig,
            transformers.GlmMoeDsaForCausalLM,
            index_topk=16,
            index_head_dim=64,
            index_n_heads=16,
            indexer_types=["full", "shared", "full"],
        )
    ids = torch.randint(1, 64, (2, 50))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        greedy = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
        )
        integration.enable(model)
        torch.testing.assert_close(model(ids, use_cache=False).logits, want, atol=1e-5, rtol=1e-4)
        one = model(ids[:1], use_cache=False).logits
        torch.testing.assert_close(one, want[:1], atol=1e-5, rtol=1e-4)
        ours = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
        )
    assert torch.equal(ours, greedy)


def test_no_tensor_of_tokens_by_tokens(model, golden):
    """At 4,000 tokens a mask of fp32 would be 64 MB, of bool 16 MB; the largest tensor that the pass makes is far below.

    On a GPU the operations' scratch is of PyTorch's memory too: bytes, of which index_select takes at most 32 MiB for scores of
    as many rows as fit, however many tokens there are (src/cuda/common/index_select.h). All rows' would be 64 MB.
    """
    ids = golden["long.ids"].long().repeat(4)[None, :4000].to(DEVICE)
    tensors, scratch = [], []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(t, torch.Tensor):
                    (scratch if t.dtype == torch.uint8 and t.dim() == 1 else tensors).append(t.numel())
            return result

    with torch.no_grad(), Watch():
        model.model(ids, use_cache=False)
    assert max(tensors) < 4000 * 4000 // 1.5
    aligned = 4096  # bytes, for the alignment of the scratch's parts
    assert max(scratch, default=0) <= (32 << 20) + aligned
    assert DEVICE == "cpu" or scratch, "scratch was not of PyTorch's memory"
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            model.model(ids, use_cache=False)
        peak = torch.cuda.max_memory_allocated() - before
        print(f"peak memory of a pass over 4,000 tokens: {peak / 2**20:.1f} MiB above the weights")


def test_without_enable_only_prefill_is_served():
    model = tiny(transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM)
    ids = torch.randint(1, 64, (2, 20))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.config._attn_implementation = "gannet"
        torch.testing.assert_close(model(ids, use_cache=False).logits, want, atol=1e-5, rtol=1e-4)
        with pytest.raises(NotImplementedError, match=r"enable\(model\)"):
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None
            )


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="is one of DeepseekV3Attention"):
        integration.enable(torch.nn.Linear(2, 2))
