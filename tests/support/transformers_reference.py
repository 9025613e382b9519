"""What transformers generates from a checkpoint."""

import torch
import transformers


def reference_tokens(path, prompts, max_tokens, model_class=transformers.AutoModelForCausalLM):
    return greedy_tokens(model_class.from_pretrained(path, dtype=torch.float32).eval(), prompts, max_tokens)


@torch.inference_mode()
def greedy_tokens(model, prompts, max_tokens):
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # eos off: lengths are set by max_tokens here
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        wanted.append(out[0, len(prompt) :].tolist())
    return wanted
