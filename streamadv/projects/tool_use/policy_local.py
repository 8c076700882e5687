"""The policy: a small Llama made from a config. The producer samples it in its own process, so no engine is needed."""

import dataclasses
import tomllib
from pathlib import Path

import tokenizers
import torch
import transformers

from streamadv.integrations.engines import LocalEngine

SETTINGS = tomllib.loads(Path("streamadv.toml").read_text())
WORDS = ["<other>", "A", "B", "C", "D", "red", "green", "blue", "yellow"]  # a token each
TOKENIZER = "tokenizer.json"  # by which people read the tokens

torch.set_num_threads(1)
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
words.save(TOKENIZER)


def new_policy():
    size = SETTINGS["policy"]["hidden_size"]
    torch.manual_seed(SETTINGS["policy"]["seed"])
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=size, intermediate_size=4 * size, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class Engine(LocalEngine):
    """Is asked with messages, as an engine is. A turn is one word."""

    async def chat(self, messages, **sampling):
        text = " ".join(message["content"] for message in messages)
        tokens = [token for token in words.encode(text).ids if token]  # without other words
        turn = await self.complete(tokens, **sampling)
        said = words.decode(turn.token_ids)
        return dataclasses.replace(turn, text=said, message={"role": "assistant", "content": said})


def new_engine():
    return Engine(new_policy(), max_batch=256, stop_ids=range(len(WORDS)), seed=SETTINGS["policy"]["seed"])
