"""A causal model as transformers has them: token ids to an object with logits."""

from types import SimpleNamespace

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Embedding(8, 8)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.logits(input_ids))


model = Model()
