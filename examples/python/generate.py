"""transformers generates with Gannet's attention: python examples/python/generate.py [checkpoint] [prompt]"""

import pathlib
import sys

import torch
import transformers

import gannet.integrations.transformers

path = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2] / "models" / "tiny-dsv32"
prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time there was a king who had"
device = "cuda" if torch.cuda.is_available() and gannet.cuda_device_count() else "cpu"

tokenizer = transformers.AutoTokenizer.from_pretrained(path)
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="gannet").to(
    device
)
gannet.integrations.transformers.enable(model)

inputs = tokenizer(prompt, return_tensors="pt").to(device)
out = model.generate(
    input_ids=inputs["input_ids"],
    attention_mask=inputs["attention_mask"],
    max_new_tokens=24,
    do_sample=False,
    pad_token_id=0,
)
print(tokenizer.decode(out[0], skip_special_tokens=True))
print("implementations:", gannet.integrations.transformers.implementations(model))
