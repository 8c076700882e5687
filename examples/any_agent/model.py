"""A small language model that can hold a conversation with a tool, and no more: `python model.py FOLDER`.

It is taught, in seconds, to answer, or to look under some thing before. What of it is worth doing, reinforcement
learning has to find out. A Qwen3 of some 130,000 parameters, as `save_pretrained` writes it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from task import ANSWERS, QUESTION, THINGS, TOOL, House
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<|im_end|>"
CALL, CALLED = '<tool_call>\n{"name": "look", "arguments": {"item": "', '"}}\n</tool_call>'
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if call.function.arguments is string
else call.function.arguments | tojson }}}
</tool_call>{% else %}{{ message.content }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the words of the task."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", END])
    words = ["<tool_call>", "</tool_call>", CALL.partition("\n")[2], '"}}', *THINGS, *ANSWERS]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def lesson(tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> list[int]:
    """One conversation, whatever comes of it."""
    said: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    while chance.random() < 0.5 and len(said) < 2 * House.LOOKS:
        called = {"name": TOOL["function"]["name"], "arguments": {"item": chance.choice(THINGS)}}
        said.append({"role": "assistant", "content": "", "tool_calls": [{"function": called}]})
        said.append({"role": "tool", "content": chance.choice(("a ring", "nothing"))})
    said.append({"role": "assistant", "content": chance.choice(ANSWERS)})
    return list(tokenizer(tokenizer.apply_chat_template(said, tokenize=False))["input_ids"])


def main(folder: str, steps: int = 100, seed: int = 0) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    chance, tokenizer = random.Random(seed), new_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = [lesson(tokenizer, chance) for _ in range(32)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [config.pad_token_id] * (width - len(row)) for row in rows])
        loss = model(ids, labels=ids.masked_fill(ids == config.pad_token_id, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:2])
